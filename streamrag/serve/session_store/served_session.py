"""One session of a service: its events for readers, its watches, and when it was last used."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from streamrag.errors import StreamRagError
from streamrag.serve.connections.json_socket import MAX_ID
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.limits import Limits
from streamrag.serve.open_queries import Caller
from streamrag.sessions import Session, Watch
from streamrag.sessions.log import SessionLog
from streamrag.support.tasks import Broadcast, cancel_regardless

MAX_KEPT_EVENTS = 256
"""Events of a session that are kept for readers that come back with the id of the last event that they saw."""

MAX_SHOWN = 200
"""Characters of a watched question that are shown to readers: each of them gets all questions, again and again."""

MAX_WATCHED = 2_000
"""Characters of a watched question and its answers, which are kept as long as the session."""

UPDATE_GAP_S = 0.25
"""Seconds between two events that say which version is current: each goes to all readers."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """An event of a session."""

    id: int
    name: str
    """"flash_ready": a watched answer changed; "flash_failed"; "data_updated": another version is current;
    "data_dropped": more came than could be taken in; "log_failed": the session's text cannot be written at the moment;
    "gap": events before this one are not kept any more."""
    values: dict[str, Any]
    at_s: float = field(default_factory=time.monotonic)
    """Time of the event, on the monotonic clock."""

    @property
    def age_s(self) -> float:
        """Seconds since the event."""
        return time.monotonic() - self.at_s


@dataclass(eq=False)
class ServedSession:
    """A session of one client."""

    id: str
    client: str
    session: Session
    log: SessionLog | None
    used_s: float
    """Time of the last use, on the monotonic clock."""
    touched_s: float = 0.0
    """Time of the last use that the log knows."""
    log_error: str = ""
    """The last reason for which the log could not be had."""
    was_used: bool = False
    """Whether a request came for it after the one that made it."""
    is_from_before: bool = False
    """Whether it was there before this service started."""
    is_started: bool = False
    is_closed: bool = False
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0
    """Requests that last."""
    num_readers: int = 0
    """Requests that only read events."""
    events: deque[SessionEvent] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_EVENTS))
    num_events: int = 0
    watches: dict[str, tuple[Watch, "asyncio.Task[None]"]] = field(default_factory=dict)
    """Watches by name, each with the task that reports its answers."""
    reporters: tuple["asyncio.Task[None]", ...] = ()
    """Tasks that report versions and drops."""
    news: Broadcast = field(default_factory=Broadcast)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request that lasts: the session is not idle until it ends."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            self.use()

    @contextmanager
    def being_read(self, limits: Limits) -> Iterator[None]:
        """Count a request that only reads events: readers alone keep the session for a limited time.

        :raises RequestError: there are too many readers; each has copies of events that wait for it.
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
        """Record that the session is used now."""
        self.used_s = time.monotonic()
        self.was_used = True

    def is_idle(self, limits: Limits) -> bool:
        """Whether the session has not been used for too long."""
        if self.num_users:
            return False
        idle_s = limits.session_idle_s if self.was_used else min(limits.session_idle_s, limits.session_unused_s)
        if self.num_readers:
            idle_s = max(idle_s, limits.session_read_s)
        return self.used_s < time.monotonic() - idle_s

    async def touch(self) -> None:
        """Tell the log when the session was last used."""
        if self.log is not None and self.used_s > self.touched_s:
            self.touched_s = self.used_s
            await self.log.touch(time.time() - (time.monotonic() - self.used_s))

    # --------------------------------------------------------------------------------------------------------- events

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Record an event, and wake the readers."""
        self.num_events = self.num_events + 1 if self.log is None else self.log.next_event()
        self.events.append(SessionEvent(self.num_events, name, values))
        self.news.wake()

    async def read(self, after: int, caller: Caller) -> AsyncGenerator[SessionEvent, None]:
        """Yield the events behind the one of this id, or all, as they come, until the session is closed.

        An event "gap" stands for those that are not kept any more, or came before a restart. If no event has this id
        yet, it is of another session, and all events are read.

        :raises RequestError: the caller's key is no longer valid.
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

    def begin(self) -> None:
        """Begin to report what happens in the session, which has been started."""
        self.is_started = True
        self.num_events = 0 if self.log is None else self.log.num_events
        for name, watch in self.session.watches.items():
            self._report(name, watch)
        self.reporters = (
            asyncio.create_task(self._report_versions(), name="streamrag session's versions"),
            asyncio.create_task(self._report_drops(), name="streamrag session's drops"),
        )

    async def end(self, *, forgets: bool) -> None:
        """Close the session, and with `forgets` remove its log."""
        async with self.starting:
            await self.session.aclose(forgets=forgets)
        await cancel_regardless([*(task for _, task in self.watches.values()), *self.reporters])
        self.news.wake()

    def watch(self, name: str, question: str, limits: Limits, **options: Any) -> None:
        """Have a question answered ahead, in place of another one of the same name.

        :raises RequestError: there are too many, or it is too long.
        :raises ConfigurationError: it cannot work.
        """
        if len(name) > MAX_ID:
            raise RequestError(f"the name of a watch has at most {MAX_ID} characters")
        if len(question) + sum(map(len, options["answers"])) > MAX_WATCHED:
            raise RequestError(f"a watched question and its answers have at most {MAX_WATCHED:,} characters")
        if name not in self.watches and len(self.watches) >= limits.max_watches:
            raise RequestError(f"a session has at most {limits.max_watches} watches", status=429)
        self._report(name, self.session.watch(question, name=name, **options))

    def unwatch(self, name: str) -> None:
        """End the watch of this name.

        :raises RequestError: there is no watch of this name.
        """
        if name not in self.watches:
            raise RequestError(f"there is no watch {name!r:.80}", status=404, code="watch_not_found")
        self.watches.pop(name)[0].end()

    def _report(self, name: str, watch: Watch) -> None:
        task = asyncio.create_task(self._report_answers(name, watch), name="streamrag watch")
        self.watches[name] = watch, task

    async def _report_answers(self, name: str, watch: Watch) -> None:
        about = {"name": name, "question": watch.question[:MAX_SHOWN]}
        try:
            async for answer in watch:
                of_version = {"version": answer.version, "took_s": answer.took_s, "gap": answer.gap}
                self.note("flash_ready", {**about, "answer": answer.text, **of_version})
        except StreamRagError as error:
            self.note("flash_failed", {**about, **failure_of(error).body()})

    async def _report_versions(self) -> None:
        with suppress(StreamRagError):  # the session was closed
            async for _ in self.session.versions():
                self.note("data_updated", asdict(self.session.state))
                await asyncio.sleep(UPDATE_GAP_S)

    async def _report_drops(self) -> None:
        with suppress(StreamRagError):
            async for dropped in self.session.drops():
                self.note("data_dropped", asdict(dropped))
