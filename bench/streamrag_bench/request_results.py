"""The results of a cell's queries: times, the merged engine record, and the floor.

The floor of a query is its `ttft_after_retrieval_s` if it is streamed into an otherwise idle engine.

    chunks      c0       c1   c2 = last                 Without queue and eviction, only two waits remain: for the step
    steps       [───] [──][──]│ [────][─]▲ first token  that runs when the last chunk arrives, and for the prefill of
                              └── floor ─┘              that chunk.

Steps use the full token budget. Prefixes shared with other queries are not counted. All arms have the same floor.
A measured time can be slightly below the floor: steps of partial prompts are shorter by default, and under load the
last chunks may arrive within one step.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.records import RequestRecord
from streamrag.trace.values import TracedAppend, TracedChunk, TracedQuery
from streamrag_bench.arms import QueryTiming
from streamrag_bench.cell import CellSettings, RequestResult
from streamrag_bench.trace.statistics import num_common_tokens
from streamrag_bench.workload import NUM_TAIL_TOKENS, moments_of, num_tokens_after, token_budget

TIMES = ("arrival_s", "queued_s", "scheduled_s", "first_kv_s", "last_kv_s", "finished_s")
SUMMED = (
    "num_computed",
    "num_recomputed",
    "num_invalidated",
    "num_from_cache",
    "num_loaded",
    "num_written_through",
)
"""Counts of a record that are summed over the requests of one query."""


def request_results(
    settings: CellSettings,
    queries: Sequence[TracedQuery],
    timings: Mapping[str, QueryTiming],
    profile: StepProfile,
    records: Mapping[str, Sequence[RequestRecord]],
    start_s: float = 0.0,
) -> tuple[RequestResult, ...]:
    """Return the result of each query that has a timing, in order, with its floor and its merged engine record.

    start_s: the time at which the cell began, on the clock of `timings` and `records`; it is subtracted from them.
    """
    return tuple(
        RequestResult(
            query_id=query.query_id,
            arrival_s=query.arrival_s,
            retrieval_end_s=timing.retrieval_end_s - start_s,
            first_token_s=timing.first_token_s - start_s,
            finished_s=timing.finished_s - start_s,
            num_chunks=len(query.events),
            floor_s=floor_s(query, profile, token_budget(settings)),
            record=_merge(records.get(query.query_id, ()), -start_s),
        )
        for query in queries
        if (timing := timings.get(query.query_id)) is not None
    )


def _merge(records: Sequence[RequestRecord], shift_s: float) -> RequestRecord | None:
    """Return the last record with times shifted by `shift_s`, and the counts, preemptions and restores of all.

    The warming arm sends several requests for one query. Returns None without records.
    """
    if not records:
        return None
    last = records[-1]
    changes: dict[str, Any] = {name: sum(getattr(record, name) for record in records) for name in SUMMED}
    for name in TIMES:
        at_s = getattr(last, name)
        changes[name] = None if at_s is None else at_s + shift_s
    return replace(
        last,
        **changes,
        chunks=tuple(replace(c, arrival_s=c.arrival_s + shift_s) for c in last.chunks),
        preemptions=tuple(replace(p, at_s=p.at_s + shift_s) for record in records for p in record.preemptions),
        restores=tuple(replace(r, at_s=r.at_s + shift_s) for record in records for r in record.restores),
    )


def floor_s(query: TracedQuery, profile: StepProfile, budget: int) -> float:
    """Return the seconds from the end of retrieval to the first token on an otherwise idle engine.

    Simulates the prefill of the query's prompts as they arrive, in steps of `budget` tokens with the profile's times.
    """
    inputs = deque(_prompts(query))
    depth = 2 if profile.is_async else 1
    in_flight: deque[float] = deque()
    cache = _Cache(profile.block_size)
    now_s = device_free_s = 0.0
    num_computed, num_wanted, is_complete = 0, 0, False
    while True:
        while inputs and inputs[0].at_s + profile.delivery_s <= now_s:
            prompt = inputs.popleft()
            is_complete = prompt.is_complete
            num_wanted = prompt.num_tokens - (not is_complete)  # the last token of a partial prompt is not computed yet
            num_computed = cache.num_kept(prompt, num_computed)
        # Steps of partial prompts are not scheduled ahead.
        while num_computed < num_wanted and len(in_flight) < (depth if is_complete else 1):
            num_new = min(budget, num_wanted - num_computed)
            device_free_s = max(now_s, device_free_s) + profile.step_s([(num_new, num_computed)])
            num_computed += num_new
            in_flight.append(device_free_s)
        if in_flight:
            now_s = in_flight.popleft()
            if is_complete and num_computed == num_wanted and not in_flight:
                return now_s - query.end_s
        else:
            now_s = inputs[0].at_s + profile.delivery_s


class _Prompt(NamedTuple):
    at_s: float
    chunks: tuple[TracedChunk, ...]
    num_tokens: int
    is_complete: bool


class _Cache:
    """The prefix cache, with the KV of the successive prompts of one query."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._before: list[tuple[tuple[TracedChunk, ...], int]] = []  # contexts, and the computed tokens of each
        self._newest: tuple[TracedChunk, ...] = ()

    def num_kept(self, prompt: _Prompt, num_computed: int) -> int:
        """Return the number of tokens of `prompt` that have KV, and remember `prompt` for the next call.

        num_computed: number of tokens of the previous prompt with KV. If the prompts share fewer, whole blocks of the
            shared ones remain; if there are none, whole blocks of the longest prefix of any previous prompt.
        """
        self._before.append((self._newest, num_computed))
        num_shared = min(num_common_tokens(self._newest, prompt.chunks), prompt.num_tokens - 1)
        self._newest = prompt.chunks
        num_kept = num_computed if num_computed <= num_shared else self._whole(num_shared)
        # A request with KV of its own does not search the prefix cache.
        return num_kept or max(
            self._whole(min(num_common_tokens(chunks, prompt.chunks), num, prompt.num_tokens - 1))
            for chunks, num in self._before
        )

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._block_size


def _prompts(query: TracedQuery) -> Iterator[_Prompt]:
    """Yield the prompt after each event, unless empty, and always the complete one, with `NUM_TAIL_TOKENS` more."""
    chunks: tuple[TracedChunk, ...] = ()
    num_tokens = 0
    for at_s, event, is_end in moments_of(query):
        if event:
            chunks = (*chunks, event.chunk) if isinstance(event, TracedAppend) else event.chunks
            num_tokens = num_tokens_after(event, num_tokens)
        if num_tokens or is_end:
            yield _Prompt(at_s, chunks, num_tokens + (NUM_TAIL_TOKENS if is_end else 0), is_end)
