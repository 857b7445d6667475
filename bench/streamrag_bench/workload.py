"""The load of a cell: queries, their arrival times, and the tokens of the chunks that they retrieve."""

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from streamrag.core import Hint
from streamrag.errors import ConfigurationError
from streamrag.trace.read import read_trace
from streamrag.trace.values import (
    Trace,
    TracedAppend,
    TracedChunk,
    TracedEvent,
    TracedQuery,
    TracedUpdate,
    chunks_of,
    stretched_hint,
)
from streamrag_bench.cell import CellSettings
from streamrag_bench.trace.generate import LongWindow, WorkloadName, generate
from streamrag_bench.trace.generate.hints import HintKind, with_hints

BUDGETS = {"crawler": 2_048, "anns": 8_192, "anns-last": 8_192}
"""Published token budgets of a step, by generated workload. "anns-last" has its long window last."""
HINTS: Mapping[str, HintKind] = {"-hints": "estimated", "-oracle": "exact"}
"""Suffixes of generated workloads whose chunks have hints; see `streamrag_bench.trace.generate.hints`."""
NUM_TAIL_TOKENS = 32
"""Tokens after the chunks of every prompt: the template's end and the question. An assumption of ours."""


def token_budget(settings: CellSettings) -> int:
    """Return the token budget of a step: the setting, else the workload's published budget, else the crawler's."""
    return settings.max_num_batched_tokens or BUDGETS.get(without_hints(settings.workload), BUDGETS["crawler"])


def without_hints(workload: str) -> str:
    """Return a generated workload's name without the suffix for hints; another name is unchanged."""
    for ending in HINTS:
        if workload.removesuffix(ending) in BUDGETS:
            return workload.removesuffix(ending)
    return workload


def check_workload(workload: str, *, has_rate: bool) -> None:
    """Raise ConfigurationError if the workload does not exist, or is generated and has no rate of arrivals."""
    if without_hints(workload) in BUDGETS:
        if not has_rate:
            raise ConfigurationError(
                f"workload {workload!r} is generated, and has no arrivals of its own; give --qps, e.g. 1,2,4"
            )
    elif not Path(workload).exists():
        raise ConfigurationError(f"workload {workload!r} is none of {', '.join(BUDGETS)}, nor a trace that exists")


def load_trace(settings: CellSettings) -> Trace:
    """Generate a cell's trace, with hints if its name says so, or read a trace file. Raises as `check_workload`."""
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
    """Return the first `num_queries` queries of the trace with the cell's arrivals and gaps, in order.

    With `qps`, arrivals are a Poisson process seeded by the cell, else those of the trace, from 0 on. `delay` scales
    the gaps between chunks, but neither the time before the first chunk nor that from the last chunk to the end.

    :raises ConfigurationError: there are no queries, two have the same id, or one has an update that the arm cannot
        send.
    """
    queries = trace.queries[: settings.num_queries]
    if not queries:
        raise ConfigurationError(
            f"nothing to replay: the trace has {len(trace.queries)} queries, and num_queries={settings.num_queries}"
        )
    if settings.qps is None:
        first_s = queries[0].arrival_s
        arrivals = [query.arrival_s - first_s for query in queries]
    else:
        rng = random.Random(f"arrivals {settings.seed}")
        arrivals = list(accumulate(rng.expovariate(settings.qps) for _ in queries))
    for query in queries if settings.arm == "stock-sessions" else ():
        if not all(isinstance(event, TracedAppend) for event in query.events):
            raise ConfigurationError(
                f"arm 'stock-sessions': query {query.query_id!r} has an update, and vLLM's own sessions can only "
                "append; leave this arm out for this workload"
            )
    if len({query.query_id for query in queries}) != len(queries):
        raise ConfigurationError("two queries of the trace have the same id; make the ids unique")
    return tuple(_stretched(q, at_s, settings.delay) for q, at_s in zip(queries, arrivals, strict=True))


def _stretched(query: TracedQuery, arrival_s: float, delay: float) -> TracedQuery:
    """Return the query at this arrival; gaps between events and hints grow by `delay`, but not the gap to the end."""
    if delay == 1.0 or not query.events:
        return replace(query, arrival_s=arrival_s)
    first_s, last_s = query.events[0].at_s, query.events[-1].at_s
    events = tuple(
        replace(event, at_s=first_s + (event.at_s - first_s) * delay, hint=stretched_hint(event.hint, delay))
        for event in query.events
    )
    return replace(query, arrival_s=arrival_s, events=events, end_s=events[-1].at_s + query.end_s - last_s)


@dataclass(frozen=True, slots=True)
class FittedLoad:
    """Queries whose contexts fit into a token budget."""

    queries: tuple[TracedQuery, ...]
    max_context_tokens: int | None
    """The budget; None if no limit is known."""
    num_cut: int
    """Number of contexts that lost chunks."""

    def provenance(self) -> dict[str, int]:
        """Return the budget and the number of cut contexts; {} without a limit."""
        if self.max_context_tokens is None:
            return {}
        return {"max_context_tokens": self.max_context_tokens, "num_contexts_cut": self.num_cut}


def fit_contexts(settings: CellSettings, queries: Sequence[TracedQuery], max_model_len: int | None) -> FittedLoad:
    """Return the load without the chunks that exceed a pipeline's budget for the context.

    The budget is `max_context_tokens`, or less if the model's length less question and answer is less. If neither is
    known, all chunks are kept.

    :raises ConfigurationError: the model's length leaves no room for a context.
    """
    budget = settings.max_context_tokens
    if max_model_len is not None:
        room = max_model_len - NUM_TAIL_TOKENS - settings.num_output_tokens - 1
        if room < 1:
            raise ConfigurationError(
                f"the model's length of {max_model_len} tokens has no room for a context beside {NUM_TAIL_TOKENS} of "
                f"the question and {settings.num_output_tokens} of the answer: set fewer output tokens"
            )
        budget = room if budget is None else min(budget, room)
    if budget is None:
        return FittedLoad(tuple(queries), None, 0)
    cut = tuple(_cut(query, budget) for query in queries)
    num_cut = sum(after.events != before.events for before, after in zip(queries, cut, strict=True))
    return FittedLoad(cut, budget, num_cut)


def _cut(query: TracedQuery, budget: int) -> TracedQuery:
    """Drop each chunk that does not fit with those kept before, as in a pipeline, and events that lose all chunks."""
    events: list[TracedEvent] = []
    room = budget
    for event in query.events:
        chunks = chunks_of(event)
        num_left = room if isinstance(event, TracedAppend) else budget
        fitting = []
        for chunk in chunks:
            if chunk.num_tokens <= num_left:
                num_left -= chunk.num_tokens
                fitting.append(chunk)
        if len(fitting) == len(chunks):
            events.append(event)
        elif fitting and isinstance(event, TracedUpdate):
            events.append(replace(event, chunks=tuple(fitting)))
        if fitting or not chunks:  # an update whose chunks are all too large leaves the context unchanged
            room = num_left
    return replace(query, events=tuple(events))


def longest_prompt(queries: Sequence[TracedQuery]) -> int:
    """Return the number of tokens of the longest prompt that any query has at any time, with its question."""
    longest = 0
    for query in queries:
        num_tokens = 0
        for event in query.events:
            num_tokens = num_tokens_after(event, num_tokens)
            longest = max(longest, num_tokens)
    return longest + NUM_TAIL_TOKENS


def num_tokens_after(event: TracedEvent, num_before: int) -> int:
    """Return the context's tokens after an event: an append adds to `num_before`, an update replaces it."""
    num_new = sum(chunk.num_tokens for chunk in chunks_of(event))
    return num_before + num_new if isinstance(event, TracedAppend) else num_new


class Moment(NamedTuple):
    """A change of a query's context, the end of its retrieval, or both."""

    at_s: float
    event: TracedEvent | None
    is_end: bool


def moments_of(query: TracedQuery) -> Iterator[Moment]:
    """Yield the query's events as moments; the last is the end of retrieval, without an event if later than all."""
    has_late_end = not query.events or query.end_s > query.events[-1].at_s
    for index, event in enumerate(query.events, start=1):
        yield Moment(event.at_s, event, is_end=index == len(query.events) and not has_late_end)
    if has_late_end:
        yield Moment(query.end_s, None, is_end=True)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A generator of pseudo-random token ids, seeded by the chunk's key. No text is tokenised."""

    num_in_vocabulary: int = 128_256

    def of_chunk(self, chunk: TracedChunk) -> list[int]:
        """Return `num_tokens` ids that depend only on the chunk's key."""
        return self._of(chunk.key, chunk.num_tokens)

    def of_tail(self, query: TracedQuery) -> list[int]:
        """Return the tokens after the chunks: the question's."""
        return self._of(f"tail {query.query_id}", NUM_TAIL_TOKENS)

    def _of(self, key: str, num_tokens: int) -> list[int]:
        """Return pseudo-random ids that depend only on `key`, below the size of the vocabulary."""
        # Random bytes are far faster than random integers. Ids above 65,535 do not occur.
        ids = array("H", random.Random(key).randbytes(2 * num_tokens)).tolist()
        if self.num_in_vocabulary > 1 << 16:
            return ids
        return [token % self.num_in_vocabulary for token in ids]


@dataclass(frozen=True, slots=True)
class PromptChange:
    token_ids: list[int]
    is_append: bool
    """Whether the tokens are appended to the prompt; otherwise they replace it."""
    is_complete: bool
    """Whether this change completes the prompt."""
    hint: Hint | None = None


class Arriving:
    """An async iterable, for one iteration, of the pieces of a query's prompt at the times of the trace.

    Times are on the running event loop's clock, virtual or not.
    """

    def __init__(self, query: TracedQuery, tokens: Tokens, start_s: float) -> None:
        self.query = query
        self.end_s: float | None = None
        """Time at which the last piece arrived."""
        self._tokens = tokens
        self._arrival_s = start_s + query.arrival_s

    async def __aiter__(self) -> AsyncIterator[PromptChange]:
        """Yield the pieces when they are due; sets `end_s` before the last. Moments without tokens yield none: after an
        empty update, the next piece replaces the prompt."""
        is_append = True
        for at_s, event, is_end in moments_of(self.query):
            delay_s = self._arrival_s + at_s - asyncio.get_running_loop().time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            token_ids: list[int] = []
            for chunk in chunks_of(event) if event else ():
                token_ids += self._tokens.of_chunk(chunk)
            if is_end:
                token_ids += self._tokens.of_tail(self.query)
                self.end_s = asyncio.get_running_loop().time()
            is_append = is_append and (event is None or isinstance(event, TracedAppend))
            if token_ids:
                yield PromptChange(token_ids, is_append, is_end, event.hint if event else None)
                is_append = True
