"""The values of a trace: queries, their chunk events, and the times of the events."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from streamrag.core import Hint
from streamrag.support.validation import Positive, validated

RetrievalOutcome: TypeAlias = Literal["complete", "failed", "cancelled"]
"""The outcome of a retrieval."""


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """A chunk of a trace. Chunks with the same `key` have the same tokens."""

    key: str
    """A hash of its text, or another identifier that is unique to its tokens."""
    num_tokens: int
    """Tokens of the passage in the prompt, by the trace's tokenizer."""
    text: str | None = None
    """The text; None if only hash and length were recorded."""
    uri: str = ""
    """URL or path of the document; "" in generated traces."""
    title: str = ""
    passage: int = 0
    """Number of the passage within its document, from 0."""
    score: float | None = None
    """The retriever's own score at this event."""
    num_chars: int | None = None
    """Length of a text that was not recorded."""


@dataclass(frozen=True, slots=True)
class TracedAppend:
    """An append of one chunk to the context."""

    at_s: float
    """Seconds since the query's arrival."""
    chunk: TracedChunk
    hint: Hint | None = None
    """The retriever's expectation at that time."""


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """An update that replaced the context by these chunks, in prompt order (by rank)."""

    at_s: float
    """Seconds since the query's arrival."""
    chunks: tuple[TracedChunk, ...]
    hint: Hint | None = None
    """The retriever's expectation at that time."""


@dataclass(frozen=True, slots=True)
class TracedSkip:
    """A place that retrieval could not use."""

    at_s: float
    """Seconds since the query's arrival."""
    uri: str
    reason: str


TracedEvent: TypeAlias = TracedAppend | TracedUpdate


@dataclass(frozen=True, slots=True)
class TracedQuery:
    """A query and its retrieval."""

    query_id: str
    """Id that is unique in the trace."""
    arrival_s: float
    """Seconds since the start of the trace."""
    text: str
    """The question."""
    events: tuple[TracedEvent, ...]
    """Events in order of time."""
    end_s: float
    """End of retrieval, in seconds since the query's arrival; not before the last event."""
    num_output_tokens: int | None = None
    """Length of the answer, if known."""
    skipped: tuple[TracedSkip, ...] = ()
    """Places that retrieval could not use."""
    outcome: RetrievalOutcome = "complete"
    """"failed" has an `error`; "cancelled" ended when its caller left."""
    error: str = ""
    """Reason why retrieval failed, if it did."""
    cut_short: str | None = None
    """Reason why retrieval ended early, if it did."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Queries in order of arrival, with their provenance."""

    queries: tuple[TracedQuery, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """JSON values on the trace's origin; `read_trace` adds some."""


@validated
def stretched(trace: Trace, delay: Positive) -> Trace:
    """Return the trace with all times within its queries, also of hints, multiplied by `delay`; arrivals are unchanged.

    :raises ConfigurationError: `delay` is not a positive number.
    """

    queries = tuple(
        replace(
            query,
            events=tuple(
                replace(event, at_s=event.at_s * delay, hint=stretched_hint(event.hint, delay))
                for event in query.events
            ),
            skipped=tuple(replace(skip, at_s=skip.at_s * delay) for skip in query.skipped),
            end_s=query.end_s * delay,
        )
        for query in trace.queries
    )
    return replace(trace, queries=queries)


def stretched_hint(hint: Hint | None, delay: float) -> Hint | None:
    return hint and replace(hint, end_s=None if hint.end_s is None else hint.end_s * delay)


def chunks_of(event: TracedEvent) -> tuple[TracedChunk, ...]:
    """Return the chunks of an append or an update."""
    return (event.chunk,) if isinstance(event, TracedAppend) else event.chunks
