"""One session of a service, with its events for readers, its watches, and its time of last use."""

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
from streamrag.support.tasks import Broadcast, cancel_and_wait

MAX_KEPT_EVENTS = 256  # events that are kept for readers that reconnect with the id of the last event they got
MAX_SHOWN = 200  # characters of a watched question in events, because every reader gets all questions repeatedly
MAX_WATCHED = 2_000  # characters of a watched question and its answers, which are kept as long as the session
UPDATE_GAP_S = 0.25  # minimum seconds between two `data_updated` events, because each goes to all readers


@dataclass(frozen=True, slots=True)
class SessionEvent:
    id: int
    name: str
    """"flash_ready": a watched answer changed; "flash_failed": it could not be computed; "data_updated": the version
    changed; "data_dropped": the session could not keep up; "log_failed": the session's log cannot be written;
    "gap": earlier events are no longer kept."""
    values: dict[str, Any]
    at_s: float = field(default_factory=time.monotonic)  # time of the event, on the monotonic clock

    @property
    def age_s(self) -> float:
        """Seconds since the event."""
        return time.monotonic() - self.at_s


@dataclass(eq=False)
class ServedSession:
    """A client's session with its log, its watches, and its newest events, which are kept for readers."""

    id: str
    client: str
    session: Session
    log: SessionLog | None
    used_s: float  # time of the last use, on the monotonic clock
    touched_s: float = 0.0  # time of the last use that was written to the log
    log_error: str = ""  # the last error of opening the log
    was_used: bool = False  # whether there was a request after the one that opened the session
    is_from_before: bool = False  # whether the session is older than this service process
    is_started: bool = False
    is_closed: bool = False
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0  # number of open questions
    num_readers: int = 0  # number of requests that only read events
    events: deque[SessionEvent] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_EVENTS))
    num_events: int = 0
    watches: dict[str, tuple[Watch, "asyncio.Task[None]"]] = field(default_factory=dict)
    """Watches by name, each with the task that reports its answers."""
    reporters: tuple["asyncio.Task[None]", ...] = ()  # tasks that report versions and drops
    news: Broadcast = field(default_factory=Broadcast)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the session from becoming idle during the block, whose end is its last use."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            self.use()

    @contextmanager
    def being_read(self, limits: Limits) -> Iterator[None]:
        """Count a reader during the block, whose end is a use of the session. Raises RequestError if there are too
        many: each buffers events."""
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
        """Set the time of last use to now."""
        self.used_s = time.monotonic()
        self.was_used = True

    def is_idle(self, limits: Limits) -> bool:
        """Whether the session has no question and is unused for its timeout: longer with readers, shorter if new."""
        if self.num_users:
            return False
        idle_s = limits.session_idle_s if self.was_used else min(limits.session_idle_s, limits.session_unused_s)
        if self.num_readers:
            idle_s = max(idle_s, limits.session_read_s)
        return self.used_s < time.monotonic() - idle_s

    async def touch(self) -> None:
        """Write the time of last use to the log, if there is one and the time has changed."""
        if self.log is not None and self.used_s > self.touched_s:
            self.touched_s = self.used_s
            await self.log.touch(time.time() - (time.monotonic() - self.used_s))

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Append an event, and wake the readers."""
        self.num_events = self.num_events + 1 if self.log is None else self.log.next_event()
        self.events.append(SessionEvent(self.num_events, name, values))
        self.news.wake()

    async def read(self, after: int, caller: Caller) -> AsyncGenerator[SessionEvent, None]:
        """Yield the events after the id `after` as they occur, until the session is closed.

        If some of these events are no longer kept, a "gap" event replaces them, unless `after` is 0. If `after` is
        greater than the id of any event, it is from another session, and all kept events are yielded.

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
        """Mark the session, which was just started, as started, and begin to report its watches, versions and drops.
        Event ids continue those of the log."""
        self.is_started = True
        self.num_events = 0 if self.log is None else self.log.num_events
        for name, watch in self.session.watches.items():
            self._report(name, watch)
        self.reporters = (
            asyncio.create_task(self._report_versions(), name="streamrag session's versions"),
            asyncio.create_task(self._report_drops(), name="streamrag session's drops"),
        )

    async def end(self, *, forgets: bool) -> None:
        """Close the session once it is started, stop its tasks, wake its readers; with `forgets`, remove its log."""
        async with self.starting:
            await self.session.aclose(forgets=forgets)
        await cancel_and_wait([*(task for _, task in self.watches.values()), *self.reporters])
        self.news.wake()

    def watch(self, name: str, question: str, limits: Limits, **options: Any) -> None:
        """Watch a question, with the options of `Session.watch`, in place of the watch of this name, if any.

        :raises RequestError: the name or the question is too long, or there are too many watches.
        """
        if len(name) > MAX_ID:
            raise RequestError(f"the name of a watch has at most {MAX_ID} characters")
        if len(question) + sum(map(len, options["answers"])) > MAX_WATCHED:
            raise RequestError(f"a watched question and its answers have at most {MAX_WATCHED:,} characters")
        if name not in self.watches and len(self.watches) >= limits.max_watches:
            raise RequestError(f"a session has at most {limits.max_watches} watches", status=429)
        self._report(name, self.session.watch(question, name=name, **options))

    def unwatch(self, name: str) -> None:
        """End the watch with this name. Raises RequestError if there is no such watch."""
        if name not in self.watches:
            raise RequestError(f"there is no watch {name!r:.80}", status=404, code="watch_not_found")
        self.watches.pop(name)[0].end()

    def _report(self, name: str, watch: Watch) -> None:
        """Start the task that reports the watch's answers, and keep both under `name`."""
        task = asyncio.create_task(self._report_answers(name, watch), name="streamrag watch")
        self.watches[name] = watch, task

    async def _report_answers(self, name: str, watch: Watch) -> None:
        """Note each answer as "flash_ready", until the watch ends; its error, as "flash_failed", is the last."""
        common = {"name": name, "question": watch.question[:MAX_SHOWN]}
        try:
            async for answer in watch:
                version = {"version": answer.version, "took_s": answer.took_s, "gap": answer.gap}
                self.note("flash_ready", {**common, "answer": answer.text, **version})
        except StreamRagError as error:
            self.note("flash_failed", {**common, **failure_of(error).body()})

    async def _report_versions(self) -> None:
        """Note "data_updated" when the version changes, at most every `UPDATE_GAP_S`, until the session is closed."""
        with suppress(StreamRagError):  # the session was closed
            async for _ in self.session.versions():
                self.note("data_updated", asdict(self.session.state))
                await asyncio.sleep(UPDATE_GAP_S)

    async def _report_drops(self) -> None:
        with suppress(StreamRagError):
            async for dropped in self.session.drops():
                self.note("data_dropped", asdict(dropped))
