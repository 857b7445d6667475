"""The sessions of a service: who has which, what happened in them, and when they have been idle for too long."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from streamrag.errors import StreamRagError
from streamrag.serve.failures import RefusedError, RequestError, failure_of
from streamrag.serve.service import Service
from streamrag.sessions import Session, Watch
from streamrag.tasks import cancel_regardless, run_regardless

MAX_KEPT_EVENTS = 256
"""Of a session, for readers that come back with the id of the last event that they saw."""

LOOK_S = 5.0
"""Between looks for sessions that nobody uses."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened in a session."""

    id: int
    name: str
    """"flash_ready": a watched answer changed; "flash_failed"; "data_updated": another version stands."""
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
    used_s: float
    num_users: int = 0
    events: deque[SessionEvent] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_EVENTS))
    num_events: int = 0
    watches: dict[str, tuple[Watch, "asyncio.Task[None]"]] = field(default_factory=dict)
    telling: "asyncio.Task[None] | None" = None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For a request that lasts: the session is not idle meanwhile, and from its end on."""
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1
            self.used_s = time.monotonic()

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Something happened."""
        self.num_events += 1
        self.events.append(SessionEvent(self.num_events, name, values))
        self.wake()

    def wake(self) -> None:
        """Whoever reads events looks again."""
        self.has_news.set()
        self.has_news = asyncio.Event()

    async def read(self, after: int) -> AsyncGenerator[SessionEvent, None]:
        """Events behind the one of this id, as they come, until the session is closed. Those that are too old to be
        kept are left out: the ids tell. An id that no event has had yet is of another session: all are read."""
        after = after if after <= self.num_events else 0
        while True:
            for event in [each for each in self.events if each.id > after]:
                after = event.id
                yield event
            if self.is_closed:
                return
            if not self.events or self.events[-1].id <= after:
                await self.has_news.wait()


class SessionStore:
    """All sessions of a service. Closed with it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._held: dict[str, Held] = {}
        self._looking: asyncio.Task[None] | None = None
        service.closers.append(self.aclose)

    def __len__(self) -> int:
        return len(self._held)

    async def open(self, client: str, **options: Any) -> Held:
        """A new session.

        :raises RefusedError: there are as many as may be, of this client or of all.
        :raises ConfigurationError, PromptTooLongError: options that cannot work.
        """
        limits = self._service.limits
        if self._service.admission.is_draining:
            raise RefusedError("the service is stopping", "draining", 5.0)
        of_client = sum(held.client == client for held in self._held.values())
        if len(self._held) >= limits.max_sessions or of_client >= limits.max_sessions_per_client:
            raise RefusedError("as many sessions are open as may be: close one", "queries", 60.0)
        session = Session(self._service.backend, **options)
        held = Held(f"sess_{uuid.uuid4().hex}", client, session, time.monotonic())
        self._held[held.id] = held  # counted before the first await
        try:
            await session.start()
        except BaseException:
            self._held.pop(held.id, None)
            raise
        held.telling = asyncio.create_task(_tell_versions(held), name="streamrag session's versions")
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="streamrag sessions' expiry")
        return held

    def find(self, id: str, client: str) -> Held:
        """The session of this id.

        :raises RequestError: this client has none.
        """
        held = self._held.get(id)
        if held is None or held.client != client:
            raise gone("there is no such session; it may have been idle for too long")
        held.used_s = time.monotonic()
        return held

    def watch(self, held: Held, name: str, question: str, **options: Any) -> None:
        """Have a question answered ahead; another one of the same name goes.

        :raises RequestError: there are as many as may be.
        :raises ConfigurationError: it cannot work.
        """
        if name not in held.watches and len(held.watches) >= self._service.limits.max_watches:
            raise RequestError(f"a session has at most {self._service.limits.max_watches} watches", status=429)
        watch = held.session.watch(question, **options)
        before = held.watches.get(name)
        held.watches[name] = (watch, asyncio.create_task(_tell(held, name, watch), name="streamrag watch"))
        if before is not None:
            before[0].end()

    def unwatch(self, held: Held, name: str) -> None:
        """It is no longer answered.

        :raises RequestError: there is no watch of this name.
        """
        if name not in held.watches:
            raise RequestError(f"there is no watch {name!r:.80}", status=404, code="watch_not_found")
        held.watches.pop(name)[0].end()

    async def close(self, held: Held) -> None:
        """End it, with all that is asked of it."""
        self._held.pop(held.id, None)
        held.is_closed = True
        await run_regardless(_close(held), "streamrag session closes")

    async def aclose(self) -> None:
        """End all."""
        if self._looking is not None:
            await cancel_regardless([self._looking])
        await asyncio.gather(*(self.close(held) for held in list(self._held.values())))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            oldest_s = time.monotonic() - self._service.limits.session_idle_s
            for held in [each for each in self._held.values() if each.used_s < oldest_s and not each.num_users]:
                await self.close(held)


def gone(why: str) -> RequestError:
    """For a client whose session is not there, or not any more."""
    return RequestError(why, status=404, code="session_not_found")


async def _close(held: Held) -> None:
    await held.session.aclose()
    await cancel_regardless([*(task for _, task in held.watches.values()), *([held.telling] if held.telling else [])])
    held.wake()


async def _tell(held: Held, name: str, watch: Watch) -> None:
    try:
        async for answered in watch:
            values = {"name": name, "question": answered.question, "answer": answered.text}
            of = {"version": answered.version, "took_s": answered.took_s, "gap": answered.gap}
            held.note("flash_ready", {**values, **of})
    except StreamRagError as error:
        held.note("flash_failed", {"name": name, **failure_of(error).body()})


async def _tell_versions(held: Held) -> None:
    with suppress(StreamRagError):  # the session was closed
        async for _ in held.session.versions():
            held.note("data_updated", asdict(held.session.state))
