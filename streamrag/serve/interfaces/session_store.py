"""The sessions of a service: who has which, what happened in them, and when they have been idle for too long."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

from streamrag.errors import SessionLogError, SessionLogInUseError, StreamRagError, TooManySessionsError
from streamrag.serve.failures import RefusedError, RequestError, failure_of
from streamrag.serve.frames import MAX_ID
from streamrag.serve.interfaces.session_folder import SessionFolder
from streamrag.serve.limits import Limits
from streamrag.serve.observing import Refusal
from streamrag.serve.service import Caller, Service
from streamrag.sessions import Session, SessionLimits, Watch
from streamrag.sessions.asking import Asked
from streamrag.sessions.limits import SessionBooks
from streamrag.sessions.log import SessionLog
from streamrag.support.tasks import Broadcast, cancel_regardless, run_regardless

MAX_KEPT_EVENTS = 256
"""Of a session, for readers that come back with the id of the last event that they saw."""

MAX_SHOWN = 200
"""Characters of a watched question that are shown to readers: each of them gets all questions, again and again."""

MAX_WATCHED = 2_000
"""Characters of a watched question and its answers, which are kept as long as the session."""

TOGETHER_S = 0.25
"""Seconds between two events that say which version stands: each goes to all readers."""

LOOK_S = 5.0
"""Between looks for sessions that nobody uses, and for readers whose key no longer counts."""

TOUCH_SHARE = 0.05
"""Of the time that a session stays without use: a log's time is no older than that, if its service is killed."""

RETRY_S = 60.0
"""After which whoever was refused may try again: somebody may have closed a session, or one has expired."""

log = logging.getLogger("streamrag.serve")


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened in a session."""

    id: int
    name: str
    """"flash_ready": a watched answer changed; "flash_failed"; "data_updated": another version stands; "data_dropped":
    more came than could be taken in; "log_failed": the session's text cannot be written at the moment; "gap": events
    before this are not kept any more."""
    values: dict[str, Any]
    at_s: float = field(default_factory=time.monotonic)
    """Of the monotonic clock."""

    @property
    def age_s(self) -> float:
        """Since it happened."""
        return time.monotonic() - self.at_s


@dataclass(eq=False)
class Held:
    """One session of one client."""

    id: str
    client: str
    session: Session
    log: SessionLog | None
    used_s: float
    """When it was last, on `time.monotonic`."""
    was_used: bool = False
    """Since it was opened. If not, whoever opened it may never have heard of it."""
    is_of_before: bool = False
    """A restart. It is started by its first request."""
    is_started: bool = False
    log_error: str = ""
    """Why its text cannot be had, as the service's log has it."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    touched_s: float = 0.0
    """The last use that its log's time says."""
    num_users: int = 0
    num_readers: int = 0
    """Who read its events, and do nothing else by that."""
    events: deque[SessionEvent] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_EVENTS))
    num_events: int = 0
    watches: dict[str, tuple[Watch, "asyncio.Task[None]"]] = field(default_factory=dict)
    telling: tuple["asyncio.Task[None]", ...] = ()
    news: Broadcast = field(default_factory=Broadcast)
    is_closed: bool = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For a request that lasts: the session is not idle meanwhile, and from its end on."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            self.use()

    @contextmanager
    def being_read(self, limits: Limits) -> Iterator[None]:
        """Count a request that only reads: that alone keeps the session for long, and not for ever.

        :raises RequestError: there are as many as may be, each of which has copies of events that wait for it.
        """
        if self.num_readers >= limits.max_readers:
            what = f"the events of a session have at most {limits.max_readers} readers"
            raise RequestError(what, status=429, code="too_many_readers")
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            self.use()

    def use(self) -> None:
        """It is used now."""
        self.used_s = time.monotonic()
        self.was_used = True

    def is_idle(self, limits: Limits) -> bool:
        """Whether nobody has used it for too long."""
        if self.num_users:
            return False
        idle_s = limits.session_idle_s if self.was_used else min(limits.session_idle_s, limits.session_unused_s)
        if self.num_readers:
            idle_s = max(idle_s, limits.session_read_s)
        return self.used_s < time.monotonic() - idle_s

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Something happened."""
        self.num_events = self.num_events + 1 if self.log is None else self.log.next_event()
        self.events.append(SessionEvent(self.num_events, name, values))
        self.news.wake()

    async def read(self, after: int, caller: Caller) -> AsyncGenerator[SessionEvent, None]:
        """Events behind the one of this id, or all, as they come, until the session is closed.

        In place of those that are not kept any more, or were told before a restart, stands one, "gap". An id that no
        event has had yet is of another session: all are read.

        :raises RequestError: the caller's key no longer counts.
        """
        after = after if after <= self.num_events else 0
        while True:
            if not caller.has_key():
                raise RequestError("this API key is no longer valid", status=401, code="invalid_api_key")
            first = self.events[0].id if self.events else self.num_events + 1
            if 0 < after < first - 1:
                gap = SessionEvent(first - 1, "gap", {"after": after, "next": first})
                after = gap.id
                yield gap
            for event in [each for each in self.events if each.id > after]:
                after = event.id
                yield event
            if self.is_closed:
                return
            if not self.events or self.events[-1].id <= after:
                await self.news.wait()


class SessionStore:
    """All sessions of a service. Closed with it.

    :raises ConfigurationError: the folder for their logs cannot be used.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held: dict[str, Held] = {}
        limits = service.limits
        self._books = SessionBooks(
            SessionLimits(
                limits.max_sessions,
                limits.max_sessions_per_client,
                limits.max_session_tokens,
                limits.max_session_tokens_per_client,
            )
        )
        self._looking: asyncio.Task[None] | None = None
        self._folder = None if service.session_log_dir is None else SessionFolder(service.session_log_dir)
        for id, header, idle_s in self._folder.found() if self._folder else ():
            of_log = {"window_tokens": header.window_tokens, "slide_share": header.slide_share}
            held = self._add(id, header.owner, header.window_tokens, of_log)
            # Nobody could use it while the service was down; and the wall clock may have been set meanwhile.
            idle_s = min(idle_s, max(limits.session_idle_s - limits.session_unused_s, 0.0))
            held.used_s = held.touched_s = time.monotonic() - idle_s
            held.was_used = held.is_of_before = True
        service.closers.append(self.aclose)
        with suppress(RuntimeError):  # there is no event loop yet: the first request begins it
            self._begin_to_look()

    async def open(self, client: str, **options: Any) -> Held:
        """A new session.

        :raises RefusedError: there are as many as may be, or their windows hold as much, of this client or of all.
        :raises ConfigurationError, PromptTooLongError: options that cannot work.
        """
        self._check_not_draining()
        self._begin_to_look()
        most = self._service.model.max_model_len  # of more the session says itself that it cannot be
        num_tokens = min(options["window_tokens"] or most * 3 // 4, most)
        try:  # the log of a session may say anything: no window is longer than the model
            self._books.check(client, num_tokens, longest_window=most)
        except TooManySessionsError as error:
            raise RefusedError(str(error), cast(Refusal, error.limit), RETRY_S) from None
        held = self._add(f"sess_{uuid.uuid4().hex}", client, num_tokens, options)  # counted before the first await
        try:
            async with held.starting:
                await self._start(held)
        except BaseException:
            await self.close(held)
            raise
        return held

    async def find(self, id: str, client: str, *, starts: bool = True) -> Held:
        """The session of this id; one of before a restart is resumed, unless `starts` is False.

        :raises RequestError: this client has none, or it cannot be resumed.
        :raises RefusedError: the service is stopping.
        """
        held = self._held.get(id)
        if held is None or held.client != client:
            self._check_not_draining()  # it may be there again after a restart
            raise gone(NO_SESSION)
        held.use()
        self._begin_to_look()
        if starts and not held.is_started:
            async with held.starting:
                if held.is_closed:
                    raise gone(NO_SESSION)
                if not held.is_started:
                    self._check_not_draining()
                    await self._start(held)
        return held

    def _add(self, id: str, client: str, num_tokens: int, options: dict[str, Any]) -> Held:
        text = None
        if self._folder is not None:
            text = SessionLog(
                self._folder.path_of(id),
                owner=client,
                on_failure=lambda why: held.note("log_failed", {"reason": why}),
                max_watches=self._service.limits.max_watches,
            )
        session = Session(self._service.backend, log=text, admit=partial(self._admit, client), **options)
        held = self._held[id] = Held(id, client, session, text, time.monotonic())
        self._books.put(id, client, num_tokens)
        return held

    async def _start(self, held: Held) -> None:
        if held.log is not None and held.is_of_before and not await asyncio.to_thread(held.log.path.exists):
            self._forget(held)  # somebody else has ended it
            raise gone(NO_SESSION)
        try:
            await held.session.start()
        except SessionLogInUseError as error:
            raise _in_use() from error
        except SessionLogError as error:  # says where it is, which is nobody else's business
            if str(error) != held.log_error:
                held.log_error = str(error)
                log.error("a session cannot have its text: %s", error)
            what = "the text of this session cannot be read or written: the log of the service says why"
            raise RequestError(what, status=500, code="session_log_failed") from error
        self._books.put(held.id, held.client, held.session.state.window_tokens)
        held.is_started = True
        held.num_events = 0 if held.log is None else held.log.num_events
        for name, watch in held.session.watches.items():
            self._tell_of(held, name, watch)
        held.telling = (
            asyncio.create_task(_tell_versions(held), name="streamrag session's versions"),
            asyncio.create_task(_tell_drops(held), name="streamrag session's drops"),
        )

    def _admit(self, client: str, asked: Asked) -> Callable[[], None]:
        """Claim a place for a watched question, as for any other of its client."""
        admission, began_s = self._service.admission, time.monotonic()
        max_tokens, num_prompt_tokens = asked.params.max_tokens, len(asked.question)
        place = admission.enter(client, max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens, is_ahead=True)
        return lambda: admission.leave(place, stayed_s=time.monotonic() - began_s)

    def _check_not_draining(self) -> None:
        if self._service.admission.is_draining:
            raise RefusedError("the service is stopping", "draining", 5.0)

    def watch(self, held: Held, name: str, question: str, **options: Any) -> None:
        """Have a question answered ahead; another one of the same name goes.

        :raises RequestError: there are as many as may be, or it is too long.
        :raises ConfigurationError: it cannot work.
        """
        if len(name) > MAX_ID:
            raise RequestError(f"the name of a watch has at most {MAX_ID} characters")
        if len(question) + sum(map(len, options["answers"])) > MAX_WATCHED:
            raise RequestError(f"a watched question and its answers have at most {MAX_WATCHED:,} characters")
        if name not in held.watches and len(held.watches) >= self._service.limits.max_watches:
            raise RequestError(f"a session has at most {self._service.limits.max_watches} watches", status=429)
        self._tell_of(held, name, held.session.watch(question, name=name, **options))

    @staticmethod
    def _tell_of(held: Held, name: str, watch: Watch) -> None:
        held.watches[name] = (watch, asyncio.create_task(_tell(held, name, watch), name="streamrag watch"))

    def unwatch(self, held: Held, name: str) -> None:
        """It is no longer answered.

        :raises RequestError: there is no watch of this name.
        """
        if name not in held.watches:
            raise RequestError(f"there is no watch {name!r:.80}", status=404, code="watch_not_found")
        held.watches.pop(name)[0].end()

    async def close(self, held: Held) -> None:
        """End it, with all that is asked of it, and with its text.

        :raises RequestError: it is the session of another service, which has its text: nothing is ended.
        """
        if held.log is not None and not held.is_started:
            try:
                async with held.starting:
                    if not held.is_started:
                        await held.log.aclose(removes=True)
            except SessionLogInUseError as error:
                raise _in_use() from error
        await self._close(held, forgets=True)

    async def aclose(self) -> None:
        """End all; their texts stay."""
        if self._looking is not None:
            await cancel_regardless([self._looking])
        held = list(self._held.values())
        await asyncio.gather(*(self._close(each, forgets=False) for each in held))
        await asyncio.gather(*map(_touch, held))

    async def _close(self, held: Held, *, forgets: bool) -> None:
        self._forget(held)
        await run_regardless(_end(held, forgets), "streamrag session closes")

    def _forget(self, held: Held) -> None:
        self._held.pop(held.id, None)
        self._books.remove(held.id)
        held.is_closed = True

    def _begin_to_look(self) -> None:
        if self._looking is None and asyncio.get_running_loop():
            self._looking = asyncio.create_task(self._look(), name="streamrag sessions' expiry")

    async def _look(self) -> None:
        limits = self._service.limits
        while True:
            await asyncio.sleep(LOOK_S)
            for held in list(self._held.values()):
                if held.is_idle(limits):
                    try:
                        await self.close(held)
                    except RequestError:  # another service has it, and knows when it was used
                        self._forget(held)
                    continue
                if held.num_readers or held.num_users:
                    held.news.wake()
                if held.used_s - held.touched_s > TOUCH_SHARE * limits.session_idle_s:
                    await _touch(held)


NO_SESSION = "there is no such session; it may have been idle for too long"


def gone(why: str) -> RequestError:
    """For a client whose session is not there, or not any more."""
    return RequestError(why, status=404, code="session_not_found")


def _in_use() -> RequestError:
    return RequestError("another service has this session: ask that one", status=409, code="session_in_use")


async def _end(held: Held, forgets: bool) -> None:
    async with held.starting:
        await held.session.aclose(forgets=forgets)
    await cancel_regardless([*(task for _, task in held.watches.values()), *held.telling])
    held.news.wake()


async def _touch(held: Held) -> None:
    if held.log is not None and held.used_s > held.touched_s:
        held.touched_s = held.used_s
        await held.log.touch(time.time() - (time.monotonic() - held.used_s))


async def _tell(held: Held, name: str, watch: Watch) -> None:
    try:
        async for answered in watch:
            values = {"name": name, "question": answered.question[:MAX_SHOWN], "answer": answered.text}
            of = {"version": answered.version, "took_s": answered.took_s, "gap": answered.gap}
            held.note("flash_ready", {**values, **of})
    except StreamRagError as error:
        held.note("flash_failed", {"name": name, "question": watch.question[:MAX_SHOWN], **failure_of(error).body()})


async def _tell_versions(held: Held) -> None:
    with suppress(StreamRagError):  # the session was closed
        async for _ in held.session.versions():
            held.note("data_updated", asdict(held.session.state))
            await asyncio.sleep(TOGETHER_S)


async def _tell_drops(held: Held) -> None:
    with suppress(StreamRagError):
        async for dropped in held.session.drops():
            held.note("data_dropped", asdict(dropped))
