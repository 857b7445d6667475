"""Who watches the queries that a service answers: metrics, traces, logs, the live view."""

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from streamrag.serve.observe.progress import Course
from streamrag.telemetry import Answer, Event

Interface: TypeAlias = Literal["chat", "responses", "websocket", "retrieve", "streams", "ask", "mcp", "sessions"]

Outcome: TypeAlias = Literal[
    "answered",
    "left",  # the client went away, or cancelled
    "deadline",
    "too_long",  # the prompt
    "invalid",  # options that cannot work
    "source_error",
    "backend_error",
    "engine_dead",
    "shut_down",  # the service was stopped meanwhile
    "internal_error",
]

Refusal: TypeAlias = Literal[
    "queries",
    "tokens",
    "client_queries",
    "client_rate",
    "client_tokens",
    "sessions",
    "client_sessions",
    "session_tokens",
    "client_session_tokens",
    "draining",
    "not_ready",
]

log = logging.getLogger("streamrag.serve")


@dataclass(frozen=True, slots=True)
class ServedQuery:
    """One query of one client, from its admission to its end."""

    id: str
    """The request's id, which stands in its answer's headers and in every line of the log."""
    interface: Interface
    client: str
    """Name of the key that it came with; "anonymous" without keys."""
    started_s: float
    """When it was admitted, on `time.monotonic`. `at_s` of its events counts from a moment that is hardly later."""
    text: str = field(repr=False)
    """The question. Not to be logged unless that is switched on."""
    traceparent: str | None = None
    """W3C trace context, as the caller sent it. Anybody's text."""
    tracestate: str | None = None
    course: Course = field(default_factory=Course, repr=False, compare=False)
    """What has happened in it so far: of an event before observers are told of that."""

    @property
    def age_s(self) -> float:
        """Seconds since it was admitted."""
        return time.monotonic() - self.started_s


class Observer(Protocol):
    """Told of every query. Called in the event loop: must be quick. What it raises is logged, and hurts nobody."""

    def query_started(self, query: ServedQuery) -> None:
        """It was admitted. Called in the query's own task, so a context variable that is set here is set in its
        source and its backend too."""

    def query_event(self, query: ServedQuery, event: Event) -> None:
        """Something happened in it; an event comes here before it goes to the client."""

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """It ended, once, whatever happened. There is an answer if it was answered, else perhaps an error."""

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        """It was not admitted."""


class AllOf:
    """Tells several observers, and keeps the query's course. One that fails is logged, once for each of its methods;
    the query goes on."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._has_failed: set[tuple[int, str]] = set()

    def query_started(self, query: ServedQuery) -> None:
        self._tell("query_started", lambda observer: observer.query_started(query))

    def query_event(self, query: ServedQuery, event: Event) -> None:
        query.course.follow(event)
        self._tell("query_event", lambda observer: observer.query_event(query, event))

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        query.course.end(answer)
        self._tell("query_ended", lambda observer: observer.query_ended(query, outcome, answer, error))

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self._tell("query_refused", lambda observer: observer.query_refused(client, interface, why))

    def _tell(self, what: str, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:  # whatever goes wrong in watching a query, the query is worth more
                if (id(observer), what) not in self._has_failed:
                    self._has_failed.add((id(observer), what))
                    log.exception("%s.%s failed; this is logged once", type(observer).__name__, what)


current_query: ContextVar[ServedQuery | None] = ContextVar("streamrag_current_query", default=None)
"""The query that this task works for, for whatever logs or traces."""
