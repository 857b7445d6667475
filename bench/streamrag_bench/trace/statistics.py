"""Statistics of a trace: sizes, times, and the share of a context that updates change."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import ceil, floor
from typing import Any, Literal, TypeAlias

from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, chunks_of

TraceMode: TypeAlias = Literal["plain", "append", "update", "mixed"]
"""The kind of the chunk events; "plain" if no query has more than one."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution, as values in ascending order. Without values, every figure is 0."""

    values: tuple[float, ...]
    """The values in ascending order."""

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """Return the distribution of the values, given in any order."""
        return cls(tuple(sorted(values)))

    @property
    def num(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0

    @property
    def max(self) -> float:
        return self.values[-1] if self.values else 0.0

    @property
    def min(self) -> float:
        return self.values[0] if self.values else 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile, interpolated linearly between neighbouring values; 0 without values.

        >>> Distribution.of([4, 1, 2, 3]).percentile(50)
        2.5
        """
        assert 0 <= percent <= 100
        if not self.values:
            return 0.0
        position = (len(self.values) - 1) * percent / 100
        below, above = self.values[floor(position)], self.values[ceil(position)]
        return below + (above - below) * (position - floor(position))

    def share_over(self, limit: float) -> float:
        """Return the share of the values that are greater than `limit`; 0 without values."""
        return sum(value > limit for value in self.values) / len(self.values) if self.values else 0.0

    def summary(self) -> dict[str, float]:
        """Return the usual figures of a distribution, by name."""
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 75, 95, 99)}
        return {"num": self.num, "mean": self.mean, **percentiles, "min": self.min, "max": self.max}


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """The statistics of a trace."""

    num_queries: int
    num_incomplete: int
    """Number of queries whose retrieval failed or was cancelled; all other figures include them."""
    num_skipped: int
    """Places that retrieval could not use."""
    mode: TraceMode
    """Kind of the chunk events; "plain" if no query has more than one."""
    has_text: bool
    """Whether every chunk has its text."""
    qps: float
    """Arrivals per second between the first and the last; 0 if all arrive at once."""
    prefix_seen_share: float
    """Share of the tokens of all final contexts in prefixes that an earlier query's final context has too."""
    interarrival_s: Distribution
    """Seconds between consecutive arrivals."""
    tokens_per_query: Distribution
    """Tokens of the final context."""
    chunks_per_query: Distribution
    """Number of chunk events."""
    passages_per_query: Distribution
    """Number of chunks in the final context."""
    tokens_per_chunk: Distribution
    """Tokens of each distinct chunk of a query."""
    retrieval_s: Distribution
    """Seconds from the query's arrival to the end of its retrieval."""
    first_chunk_s: Distribution
    """Seconds from the query's arrival to its first chunk event."""
    first_chunk_to_end_s: Distribution
    """Seconds from the first chunk event to the end of retrieval."""
    gap_ms: Distribution
    """Milliseconds between consecutive chunk events of a query."""
    changed_share: Distribution
    """Share of an update's tokens past the LCP with the previous context, for updates after a query's first event."""
    num_invalidated: Distribution
    """Tokens of each context past its LCP with the next one, summed per query: the invalidated tokens if every context
    is computed completely."""
    num_output_tokens: Distribution
    """Tokens of the answers, where known."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; distributions become their summaries."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value.summary() if isinstance(value, Distribution) else value for name, value in values.items()}


def describe(trace: Trace) -> TraceStatistics:
    """Return the statistics of a trace, of all its queries: failed and cancelled ones count too."""
    queries = trace.queries
    with_events = [query for query in queries if query.events]
    folded = [tuple(contexts(query.events)) for query in queries]
    final = [states[-1] if states else () for states in folded]
    arrivals = Distribution.of(query.arrival_s for query in queries).values
    span_s = arrivals[-1] - arrivals[0] if arrivals else 0.0
    return TraceStatistics(
        num_queries=len(queries),
        num_incomplete=sum(query.outcome != "complete" for query in queries),
        num_skipped=sum(len(query.skipped) for query in queries),
        mode=_mode(queries),
        has_text=all(chunk.text is not None for query in queries for chunk in _distinct_chunks(query)),
        qps=(len(queries) - 1) / span_s if span_s > 0 else 0.0,
        prefix_seen_share=_prefix_seen_share(final),
        interarrival_s=Distribution.of(b - a for a, b in pairwise(arrivals)),
        tokens_per_query=Distribution.of(map(_num_tokens, final)),
        chunks_per_query=Distribution.of(len(query.events) for query in queries),
        passages_per_query=Distribution.of(map(len, final)),
        tokens_per_chunk=Distribution.of(chunk.num_tokens for query in queries for chunk in _distinct_chunks(query)),
        retrieval_s=Distribution.of(query.end_s for query in queries),
        first_chunk_s=Distribution.of(query.events[0].at_s for query in with_events),
        first_chunk_to_end_s=Distribution.of(query.end_s - query.events[0].at_s for query in with_events),
        gap_ms=Distribution.of(1e3 * (b.at_s - a.at_s) for query in queries for a, b in pairwise(query.events)),
        changed_share=Distribution.of(
            share for query, states in zip(queries, folded, strict=True) for share in _changed_shares(query, states)
        ),
        num_invalidated=Distribution.of(
            sum(_num_tokens(old) - num_common_tokens(old, new) for old, new in pairwise(states)) for states in folded
        ),
        num_output_tokens=Distribution.of(
            query.num_output_tokens for query in queries if query.num_output_tokens is not None
        ),
    )


def contexts(events: Iterable[TracedEvent]) -> Iterator[tuple[TracedChunk, ...]]:
    """Yield the context after each event, as chunks in prompt order: appends extend it, updates replace it."""
    chunks: tuple[TracedChunk, ...] = ()
    for event in events:
        chunks = (*chunks, event.chunk) if isinstance(event, TracedAppend) else event.chunks
        yield chunks


def num_common_tokens(a: Sequence[TracedChunk], b: Sequence[TracedChunk]) -> int:
    """Return the number of tokens in the chunks that both contexts begin with, compared by key."""
    num_tokens = 0
    for old, new in zip(a, b, strict=False):
        if old.key != new.key:
            break
        num_tokens += old.num_tokens
    return num_tokens


def _num_tokens(chunks: Iterable[TracedChunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)


def _distinct_chunks(query: TracedQuery) -> Iterable[TracedChunk]:
    return {chunk.key: chunk for event in query.events for chunk in chunks_of(event)}.values()


def _changed_shares(query: TracedQuery, states: Sequence[tuple[TracedChunk, ...]]) -> Iterator[float]:
    """Yield the share of tokens past the LCP for each update, but not the first event or one to an empty context."""
    for event, (old, new) in zip(query.events[1:], pairwise(states), strict=True):
        num_tokens = _num_tokens(new)
        if num_tokens and not isinstance(event, TracedAppend):
            yield 1 - num_common_tokens(old, new) / num_tokens


def _mode(queries: Iterable[TracedQuery]) -> TraceMode:
    """Return the kind of the events of the queries with more than one, "mixed" for both, and "plain" without any."""
    kinds = {type(event) for query in queries if len(query.events) > 1 for event in query.events}
    if not kinds:
        return "plain"
    if len(kinds) > 1:
        return "mixed"
    return "append" if kinds == {TracedAppend} else "update"


def _prefix_seen_share(final: Iterable[tuple[TracedChunk, ...]]) -> float:
    """Return the share of all tokens that are in a prefix, by keys, of an earlier context; 0 without tokens."""
    nodes: dict[tuple[int, str], int] = {}  # a prefix tree: (node, key) -> child node
    num_seen = num_all = 0
    for chunks in final:
        node = 0
        for chunk in chunks:
            num_all += chunk.num_tokens
            edge = (node, chunk.key)
            if edge in nodes:
                num_seen += chunk.num_tokens
            node = nodes.setdefault(edge, len(nodes) + 1)
    return num_seen / num_all if num_all else 0.0
