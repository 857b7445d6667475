"""Observers of the queries that a service answers: metrics, traces, logs, the live view."""

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from streamrag.serve.observe.progress import QueryProgress
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
    """A query of one client, from its admission to its end."""

    id: str
    """The request's id, which its answer's headers and every line of the log have."""
    interface: Interface
    client: str
    """Name of the key that it came with; "anonymous" without keys."""
    started_s: float
    """Time of its admission, on `time.monotonic`. `at_s` of its events counts from a moment that is hardly later."""
    text: str = field(repr=False)
    """The question. Not to be logged unless that is switched on."""
    traceparent: str | None = None
    """W3C trace context, as the caller sent it: untrusted text."""
    tracestate: str | None = None
    progress: QueryProgress = field(default_factory=QueryProgress, repr=False, compare=False)
    """The query's progress, with the event that observers are notified of."""

    @property
    def age_s(self) -> float:
        """Seconds since it was admitted."""
        return time.monotonic() - self.started_s


class Observer(Protocol):
    """An object that is notified of every query; a subclass overrides what it needs.

    Called in the event loop: must be quick. What it raises is logged, and harms no query.
    """

    def query_started(self, query: ServedQuery) -> None:
        """React to a query that was admitted.

        Called in the query's own task, so a context variable that is set here is set in its source and its backend too.
        """
        return

    def query_event(self, query: ServedQuery, event: Event) -> None:
        """React to an event of a query, before it goes to the client."""
        return

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """React to a query's end, which comes once. There is an answer if it was answered, else perhaps an error."""
        return

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        """React to a query that was not admitted."""
        return


class Observers(Observer):
    """Several observers as one, which also updates the query's progress before they are notified.

    An observer that fails is logged, once for each of its methods; the query goes on.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._has_failed: set[tuple[int, str]] = set()

    def query_started(self, query: ServedQuery) -> None:
        self._notify("query_started", query)

    def query_event(self, query: ServedQuery, event: Event) -> None:
        query.progress.follow(event)
        self._notify("query_event", query, event)

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        query.progress.end(answer)
        self._notify("query_ended", query, outcome, answer, error)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self._notify("query_refused", client, interface, why)

    def _notify(self, method: str, *values: Any) -> None:
        for observer in self._observers:
            try:
                getattr(observer, method)(*values)
            except Exception:  # a query is worth more than what observes it
                if (id(observer), method) not in self._has_failed:
                    self._has_failed.add((id(observer), method))
                    log.exception("%s.%s failed; this is logged once", type(observer).__name__, method)


current_query: ContextVar[ServedQuery | None] = ContextVar("streamrag_current_query", default=None)
"""The query that this task works for, for logs and traces."""
