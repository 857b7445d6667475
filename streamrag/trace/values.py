"""A trace as values: queries, their chunk events, and the times of the events."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from streamrag.core import Hint
from streamrag.support.validation import Positive, validated

Outcome: TypeAlias = Literal["complete", "failed", "cancelled"]
"""The ways in which a retrieval ends."""


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """A passage of a trace. Two with the same `key` have the same tokens."""

    key: str
    """A hash of its text, or another name that is unique to its tokens."""
    num_tokens: int
    text: str | None = None
    """None where only its hash and length were recorded."""
    uri: str = ""
    title: str = ""
    passage: int = 0
    score: float | None = None
    num_chars: int | None = None
    """Length of a text of which only this was recorded."""


@dataclass(frozen=True, slots=True)
class TracedAppend:
    """The context grew by one chunk."""

    at_s: float
    """Seconds since the query's arrival."""
    chunk: TracedChunk
    hint: Hint | None = None
    """The retriever's expectation at that time."""


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """The context was replaced by these chunks, in prompt order (their rank)."""

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
    arrival_s: float
    """Seconds since the trace began."""
    text: str
    events: tuple[TracedEvent, ...]
    """Events in order of time."""
    end_s: float
    """When retrieval ended, in seconds since the query's arrival; not before the last event."""
    num_output_tokens: int | None = None
    """Length of the answer, where the trace tells."""
    skipped: tuple[TracedSkip, ...] = ()
    outcome: Outcome = "complete"
    error: str = ""
    """The reason for which retrieval failed, if it did."""
    cut_short: str | None = None
    """The reason for which retrieval ended early, if it did."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Queries in order of arrival, and where they come from."""

    queries: tuple[TracedQuery, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)


@validated
def stretched(trace: Trace, delay: Positive) -> Trace:
    """Return the trace with all times within its queries multiplied by `delay`; arrivals stay.

    :raises ConfigurationError: the delay is not a positive number.
    """

    def with_delay(event: TracedEvent) -> TracedEvent:
        hint = event.hint
        if hint and hint.end_s is not None:
            hint = Hint(hint.num_chunks, hint.end_s * delay)
        return replace(event, at_s=event.at_s * delay, hint=hint)

    return replace(
        trace,
        queries=tuple(
            replace(
                query,
                events=tuple(map(with_delay, query.events)),
                skipped=tuple(replace(skip, at_s=skip.at_s * delay) for skip in query.skipped),
                end_s=query.end_s * delay,
            )
            for query in trace.queries
        ),
    )
