"""The interface of observers, and the queries that they see, each with its progress."""

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from streamrag.telemetry import (
    Answer,
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    OverlapChoice,
    PrefillProgressed,
    QueryEvent,
    RetrievalStarted,
    TokensGenerated,
)

Interface: TypeAlias = Literal[
    "chat", "responses", "websocket", "retrieve", "streams", "ask", "listen", "mcp", "sessions"
]

QueryOutcome: TypeAlias = Literal[
    "answered",
    "left",  # the client left or cancelled
    "deadline",
    "too_long",  # the prompt
    "invalid",  # invalid options
    "source_error",
    "backend_error",
    "engine_dead",
    "shut_down",  # the service stopped during the query
    "internal_error",
]

Refusal: TypeAlias = Literal[
    "queries", "tokens", "client_queries", "client_rate", "client_tokens",
    "sessions", "client_sessions", "session_tokens", "client_session_tokens", "draining", "not_ready",
]  # fmt: skip

Phase: TypeAlias = Literal["queued", "retrieving", "prefilling", "answering"]

log = logging.getLogger("streamrag.serve")


@dataclass(slots=True)
class QueryProgress:
    """The progress of one query of any protocol. Times are seconds since its admission, or None until known.

    Numbers of tokens are None where they are unknown: those of prompts, if their lengths are in characters, and those
    of answers without token ids; at the end of an answer, its `usage` may have both.
    """

    phase: Phase = "queued"
    """Queued: admitted but not started. Prefilling: the context is complete, and the answer has no token yet."""
    queued_s: float | None = None  # time at which retrieval began, or at which the first prompt was sent to the engine
    first_chunk_s: float | None = None
    retrieval_s: float | None = None  # time at which the context was complete
    ttft_s: float | None = None
    num_chunks: int = 0
    num_skipped: int = 0  # number of documents that the source could not use
    num_prompts: int = 0  # number of prompts that were sent to the engine
    num_updates: int = 0  # number of prompts that invalidated part of the previous prompt
    num_prompt_tokens: int | None = 0  # length of the newest prompt
    num_shared: int | None = 0  # number of tokens shared with the previous prompt, over all prompts
    num_invalidated: int | None = 0  # number of tokens invalidated by the next prompt, over all prompts
    num_prefilled: int | None = 0  # number of leading tokens of the newest prompt whose KV is known to be computed
    num_output_tokens: int | None = 0
    overlap: OverlapChoice | None = None

    def follow(self, event: QueryEvent) -> None:
        """Update phase, times and numbers from an event; other kinds of events change nothing.

        Of chunks and tokens, only the first sets a time. A prompt that is not counted in tokens sets its numbers of
        tokens to None. With the first token, the whole prompt counts as prefilled.
        """
        match event:
            case TokensGenerated():
                if event.token_ids or event.text:
                    self.num_output_tokens = (self.num_output_tokens or 0) + len(event.token_ids) or None
                if self.ttft_s is None and (event.token_ids or event.text):
                    self.ttft_s = event.at_s
                    self.phase = "answering"
                    self.num_prefilled = self.num_prompt_tokens
            case PrefillProgressed() if self.num_prefilled is not None:
                self.num_prefilled = event.num_tokens
            case ContextChanged():
                self._begin(event.at_s)
                self.num_prompts += 1
                self.num_updates += event.num_invalidated > 0
                if event.unit != "tokens":
                    self.num_prompt_tokens = self.num_shared = self.num_invalidated = self.num_prefilled = None
                    return
                self.num_prompt_tokens = event.num_tokens
                self.num_shared = (self.num_shared or 0) + event.num_shared
                self.num_invalidated = (self.num_invalidated or 0) + event.num_invalidated
                self.num_prefilled = min(self.num_prefilled or 0, event.num_shared)
            case ChunkArrived():
                self.num_chunks += 1
                if self.first_chunk_s is None:
                    self.first_chunk_s = event.at_s
            case ContextComplete():
                self._begin(event.at_s)
                self.retrieval_s = event.at_s
                self.phase = "prefilling"
            case RetrievalStarted():
                self._begin(event.at_s)
                self.overlap = event.overlap
            case DocumentSkipped():
                self.num_skipped += 1

    def end(self, answer: Answer | None) -> None:
        """Replace times and token counts by those of the answer, which are more precise; None changes nothing."""
        if answer is not None:
            self.num_prompt_tokens = answer.usage.num_prompt_tokens
            self.num_output_tokens = answer.usage.num_output_tokens
            timings = answer.timings
            self.queued_s, self.first_chunk_s = timings.queued_s, timings.first_chunk_s
            self.retrieval_s, self.ttft_s = timings.retrieval_s, timings.ttft_s

    @property
    def ttft_after_retrieval_s(self) -> float | None:
        """Seconds from the end of retrieval to the first token."""
        return None if self.ttft_s is None or self.retrieval_s is None else self.ttft_s - self.retrieval_s

    def _begin(self, at_s: float) -> None:
        """Set `queued_s` and the phase "retrieving" when retrieval, or the first prompt, begins; later, do nothing."""
        if self.queued_s is None:
            self.queued_s = at_s
            self.phase = "retrieving"


@dataclass(eq=False, slots=True)
class ServedQuery:
    """A query of one client, from its admission to its end."""

    id: str  # the request's id, which is in the response's headers and in every log line
    interface: Interface
    client: str  # name of the client's key; "anonymous" without keys
    started_s: float
    """Time of admission, on `time.monotonic`. `at_s` of its events counts from this time, within microseconds.

    For a question that is still being asked, the beginning of its newest retrieval, once there is one."""
    text: str = field(repr=False)  # The question, or what is retrieved for. Logged only if the operator enables that.
    traceparent: str | None = None  # W3C trace context, as the caller sent it: untrusted text
    tracestate: str | None = None
    progress: QueryProgress = field(default_factory=QueryProgress, repr=False)
    """The query's progress, including the event that observers are being notified of."""

    @property
    def age_s(self) -> float:
        """Seconds since admission."""
        return time.monotonic() - self.started_s


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request, or a frame of a WebSocket, that got an error."""

    id: str | None  # the request's id; None if its head was not parsed
    client: str  # name of the client's key; "anonymous" without a valid one
    route: str  # path of the route, such as "/v1/sessions/{id}"; "other" without one
    status: int
    code: str | None = None  # the error's code; None for responses of other code
    param: str | None = None  # the invalid field: text of the client
    is_logged: bool = False  # whether the error has a line in the log already


class Observer(Protocol):
    """An object that is notified of every query; a subclass overrides the methods it needs.

    Called in the event loop, so it must be quick. Exceptions are logged and do not affect the query.
    """

    def query_started(self, query: ServedQuery) -> None:
        """React to the admission of a query.

        Called in the query's own task: a context variable set here is visible to its source and its backend.
        """
        return

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None:
        """React to an event of a query, before the client gets it."""
        return

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """React to the end of a query; called once. `answer` is set if it was answered; otherwise `error` may be."""
        return

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        """React to a query that was not admitted."""
        return

    def request_failed(self, request: FailedRequest) -> None:
        """React to a request, or a frame, that got an error: as a query, not admitted, or before it was a query."""
        return


class Observers(Observer):
    """A fan-out to several observers, which first updates the query's progress.

    An observer's exceptions are logged once per method.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._has_failed: set[tuple[int, str]] = set()

    def query_started(self, query: ServedQuery) -> None:
        self._notify("query_started", query)

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None:
        query.progress.follow(event)
        self._notify("query_event", query, event)

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        query.progress.end(answer)
        self._notify("query_ended", query, outcome, answer, error)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self._notify("query_refused", client, interface, why)

    def request_failed(self, request: FailedRequest) -> None:
        self._notify("request_failed", request)

    def _notify(self, method: str, *values: Any) -> None:
        """Call this method of each observer. Exceptions are logged, once for each observer and method."""
        for observer in self._observers:
            try:
                getattr(observer, method)(*values)
            except Exception:  # observers must not fail queries
                if (id(observer), method) not in self._has_failed:
                    self._has_failed.add((id(observer), method))
                    log.exception("%s.%s failed; this is logged once", type(observer).__name__, method)


current_query: ContextVar[ServedQuery | None] = ContextVar("streamrag_current_query", default=None)
"""The query that the current task works for, for logs and traces."""
