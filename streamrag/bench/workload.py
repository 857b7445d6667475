"""The load of a cell: queries with their arrivals, and the tokens of what they retrieve."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from streamrag.bench.cell import CellSettings
from streamrag.core import Hint
from streamrag.errors import ConfigurationError
from streamrag.trace.generate import LongWindow, WorkloadName, generate
from streamrag.trace.generate.hints import HintKind, with_hints
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedUpdate

BUDGETS = {"crawler": 2_048, "anns": 8_192, "anns-last": 8_192}
"""Tokens per step as published for the workloads that are generated. "anns-last" has its long window last."""
HINTS: Mapping[str, HintKind] = {"-hints": "estimated", "-oracle": "exact"}
"""Endings of the names of generated workloads whose chunks tell what is still to come; see `trace.generate_hints`."""
NUM_TAIL_TOKENS = 32
"""End of the template and the question, which stand last in every prompt. The paper does not tell how many."""


def token_budget(settings: CellSettings) -> int:
    """Return the most tokens in a step: as set, or as published for the workload; for other traces the crawler's."""
    return settings.max_num_batched_tokens or BUDGETS.get(without_hints(settings.workload), BUDGETS["crawler"])


def without_hints(workload: str) -> str:
    """Return the name of the same workload without hints."""
    for ending in HINTS:
        if workload.removesuffix(ending) in BUDGETS:
            return workload.removesuffix(ending)
    return workload


def check_workload(workload: str, *, has_rate: bool) -> None:
    """Look at whether there is such a workload, and whether a generated one has a rate of arrivals.

    :raises ConfigurationError: there is none, or it has none.
    """
    if without_hints(workload) in BUDGETS:
        if not has_rate:
            raise ConfigurationError(
                f"workload {workload!r} is generated, and has no arrivals of its own; give --qps, e.g. 1,2,4"
            )
    elif not Path(workload).exists():
        raise ConfigurationError(f"workload {workload!r} is none of {', '.join(BUDGETS)}, nor a trace that is there")


def load_trace(settings: CellSettings) -> Trace:
    """Generate or read the trace that a cell is about.

    :raises ConfigurationError: there is no such trace, or a generated one without a rate of arrivals.
    """
    check_workload(settings.workload, has_rate=settings.qps is not None)
    workload = without_hints(settings.workload)
    if workload not in BUDGETS:
        return read_trace(settings.workload)
    assert settings.qps is not None
    name: WorkloadName = "crawler" if workload == "crawler" else "anns"
    long_window: LongWindow = "last" if workload == "anns-last" else "first"
    trace = generate(name, settings.num_queries, settings.seed, settings.qps, long_window=long_window)
    kind = HINTS.get(settings.workload.removeprefix(workload))
    return with_hints(trace, kind) if kind else trace


def make_load(settings: CellSettings, trace: Trace) -> tuple[TracedQuery, ...]:
    """Return the queries of a cell, in order of arrival, from 0 on.

    With `qps` they arrive as in a Poisson process of the cell's seed, else as the trace says. `delay` stretches the
    gaps between chunks; the first comes as it came, and so does the end after the last.

    :raises ConfigurationError: the trace has no queries, two of the same id, or updates that the arm cannot send.
    """
    queries = trace.queries[: settings.num_queries]
    if not queries:
        raise ConfigurationError(
            f"the trace has {len(trace.queries)} queries, of which {settings.num_queries} are asked"
        )
    if settings.qps is None:
        first_s = queries[0].arrival_s
        arrivals = [query.arrival_s - first_s for query in queries]
    else:
        rng = random.Random(f"arrivals {settings.seed}")
        arrivals = list(accumulate(rng.expovariate(settings.qps) for _ in queries))
    if settings.arm == "stock-sessions":
        _check_appends_only(queries)
    if len({query.query_id for query in queries}) != len(queries):
        raise ConfigurationError("the trace has queries of the same id; give each its own")
    return tuple(_stretched(q, at_s, settings.delay) for q, at_s in zip(queries, arrivals, strict=True))


def _check_appends_only(queries: Sequence[TracedQuery]) -> None:
    for query in queries:
        if not all(isinstance(event, TracedAppend) for event in query.events):
            raise ConfigurationError(
                f"arm 'stock-sessions': query {query.query_id!r} has an update, and vLLM's own sessions can only "
                "append; leave this arm out for this workload"
            )


def _stretched(query: TracedQuery, arrival_s: float, delay: float) -> TracedQuery:
    if delay == 1.0 or not query.events:
        return replace(query, arrival_s=arrival_s)
    first_s, last_s = query.events[0].at_s, query.events[-1].at_s
    events = tuple(
        replace(event, at_s=first_s + (event.at_s - first_s) * delay, hint=_stretched_hint(event.hint, delay))
        for event in query.events
    )
    return replace(query, arrival_s=arrival_s, events=events, end_s=events[-1].at_s + query.end_s - last_s)


def _stretched_hint(hint: Hint | None, delay: float) -> Hint | None:
    return hint and replace(hint, end_s=None if hint.end_s is None else hint.end_s * delay)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Queries whose contexts keep to a budget."""

    queries: tuple[TracedQuery, ...]
    max_context_tokens: int | None
    """None if no limit is known."""
    num_cut: int
    """Number of contexts of which something was left out."""

    def provenance(self) -> dict[str, int]:
        """Return the provenance that a result keeps of the budget."""
        if self.max_context_tokens is None:
            return {}
        return {"max_context_tokens": self.max_context_tokens, "num_contexts_cut": self.num_cut}


def fitted(settings: CellSettings, queries: Sequence[TracedQuery], max_model_len: int | None) -> Fitted:
    """Return the queries with the budget of a pipeline: the model's length less the question and the answer, or less.

    :raises ConfigurationError: the model has no room for any context.
    """
    budget = settings.max_context_tokens
    if max_model_len is not None:
        room = max_model_len - NUM_TAIL_TOKENS - settings.num_output_tokens - 1
        if room < 1:
            raise ConfigurationError(
                f"the model's length of {max_model_len} tokens has no room for a context beside {NUM_TAIL_TOKENS} of "
                f"the question and {settings.num_output_tokens} of the answer: ask for fewer output tokens"
            )
        budget = room if budget is None else min(budget, room)
    if budget is None:
        return Fitted(tuple(queries), None, 0)
    kept = tuple(_within(query, budget) for query in queries)
    num_cut = sum(after.events != before.events for before, after in zip(queries, kept, strict=True))
    return Fitted(kept, budget, num_cut)


def _within(query: TracedQuery, budget: int) -> TracedQuery:
    """Leave out what does not fit. The earlier chunk goes first, as in a pipeline's prompt."""
    events: list[TracedEvent] = []
    room = budget
    for event in query.events:
        chunks = chunks_of(event)
        kept, left = _that_fit(chunks, room if isinstance(event, TracedAppend) else budget)
        if len(kept) == len(chunks):
            events.append(event)
        elif kept and isinstance(event, TracedUpdate):
            events.append(replace(event, chunks=kept))
        if kept:  # an update of which nothing fits leaves the context as it was
            room = left
    return replace(query, events=tuple(events))


def _that_fit(chunks: Sequence[TracedChunk], room: int) -> tuple[tuple[TracedChunk, ...], int]:
    """Return the chunks that fit, and the room that is left."""
    kept = []
    for chunk in chunks:
        if chunk.num_tokens <= room:
            room -= chunk.num_tokens
            kept.append(chunk)
    return tuple(kept), room


def longest_prompt(queries: Sequence[TracedQuery]) -> int:
    """Return the tokens of the longest prompt that any query has at any time."""
    longest = 0
    for query in queries:
        num_tokens = 0
        for event in query.events:
            num_tokens = num_tokens_after(event, num_tokens)
            longest = max(longest, num_tokens)
    return longest + NUM_TAIL_TOKENS


def chunks_of(event: TracedEvent) -> tuple[TracedChunk, ...]:
    """Return the chunks that an event brings."""
    return (event.chunk,) if isinstance(event, TracedAppend) else event.chunks


def num_tokens_after(event: TracedEvent, num_before: int) -> int:
    """Return the length of the context after an event."""
    num_new = sum(chunk.num_tokens for chunk in chunks_of(event))
    return num_before + num_new if isinstance(event, TracedAppend) else num_new


class Moment(NamedTuple):
    """A change of a query's context, or the end of its retrieval, which may come with the last change."""

    at_s: float
    event: TracedEvent | None
    is_end: bool


def moments_of(query: TracedQuery) -> Iterator[Moment]:
    """Yield the moments of a query, the last of which is its end."""
    has_late_end = not query.events or query.end_s > query.events[-1].at_s
    for index, event in enumerate(query.events, start=1):
        yield Moment(event.at_s, event, is_end=index == len(query.events) and not has_late_end)
    if has_late_end:
        yield Moment(query.end_s, None, is_end=True)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A source of token ids: the same for chunks of the same key, others for others. No text is tokenised."""

    num_in_vocabulary: int = 128_256

    def of_chunk(self, chunk: TracedChunk) -> list[int]:
        return self._of(chunk.key, chunk.num_tokens)

    def of_tail(self, query: TracedQuery) -> list[int]:
        """Return the tokens of the question, which stands behind the chunks."""
        return self._of(f"tail {query.query_id}", NUM_TAIL_TOKENS)

    def _of(self, key: str, num_tokens: int) -> list[int]:
        # Random bytes are made far quicker than random integers. Ids above 65,535 do not occur.
        ids = array("H", random.Random(key).randbytes(2 * num_tokens)).tolist()
        if self.num_in_vocabulary > 1 << 16:
            return ids
        return [token % self.num_in_vocabulary for token in ids]


@dataclass(frozen=True, slots=True)
class Piece:
    """A change of a prompt at one moment."""

    token_ids: list[int]
    is_append: bool
    """Whether the tokens come behind the prompt so far; otherwise they are the new prompt."""
    is_complete: bool
    """Whether the prompt is complete with it."""
    hint: Hint | None = None


class Arriving:
    """The pieces of one query's prompt, each yielded when it arrives. To be iterated once.

    Times are those of the running event loop, be it virtual or not.
    """

    def __init__(self, query: TracedQuery, tokens: Tokens, start_s: float) -> None:
        self.query = query
        self.end_s: float | None = None
        """When the last piece was there."""
        self._tokens = tokens
        self._arrival_s = start_s + query.arrival_s

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for at_s, event, is_end in moments_of(self.query):
            await self._sleep_until(at_s)
            token_ids: list[int] = []
            for chunk in chunks_of(event) if event else ():
                token_ids += self._tokens.of_chunk(chunk)
            if is_end:
                token_ids += self._tokens.of_tail(self.query)
                self.end_s = asyncio.get_running_loop().time()
            if token_ids:
                is_append = event is None or isinstance(event, TracedAppend)
                yield Piece(token_ids, is_append, is_end, event.hint if event else None)

    async def _sleep_until(self, at_s: float) -> None:
        delay_s = self._arrival_s + at_s - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
