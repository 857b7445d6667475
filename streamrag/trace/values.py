"""What retrieval did, as values: queries, their chunk events and when those came."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from streamrag.core import Hint

Outcome: TypeAlias = Literal["complete", "failed", "cancelled"]
"""How a retrieval ended."""


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """A passage. Two with the same `key` have the same tokens."""

    key: str
    """Hash of its text, or any name that is as good."""
    num_tokens: int
    text: str | None = None
    """None where only its hash and length were recorded."""
    source: str = ""
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
    """What the retriever expected then."""


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """The context was replaced by these chunks, in prompt order (their rank)."""

    at_s: float
    """Seconds since the query's arrival."""
    chunks: tuple[TracedChunk, ...]
    hint: Hint | None = None
    """What the retriever expected then."""


@dataclass(frozen=True, slots=True)
class TracedSkip:
    """Something that retrieval could not use."""

    at_s: float
    """Seconds since the query's arrival."""
    source: str
    reason: str


TracedEvent: TypeAlias = TracedAppend | TracedUpdate


@dataclass(frozen=True, slots=True)
class TracedQuery:
    """One query and its retrieval."""

    query_id: str
    arrival_s: float
    """Seconds since the trace began."""
    text: str
    events: tuple[TracedEvent, ...]
    """In order of time."""
    end_s: float
    """When retrieval ended, in seconds since the query's arrival; not before the last event."""
    num_output_tokens: int | None = None
    """Length of the answer, where the trace tells."""
    skipped: tuple[TracedSkip, ...] = ()
    outcome: Outcome = "complete"
    error: str = ""
    """Why retrieval failed, if it did."""
    cut_short: str | None = None
    """Why retrieval ended before it was done, if it did."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Queries in order of arrival, and how they came about."""

    queries: tuple[TracedQuery, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
