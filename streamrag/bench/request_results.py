"""The result of each query of a cell: its times, one record out of those of its requests, and its floor.

The floor of a request is its `ttft_after_retrieval_s` if it were streamed into an engine that does nothing else.

    chunks      c0       c1   c2 = last                 No queue, no eviction: what is left to wait for is what the last
    steps       [───] [──][──]│ [────][─]▲ first token  chunk brings, and the step that was under way when it came.
                              └── floor ─┘

A step takes what the budget allows. Prefixes shared with other queries are not counted. All arms have the same floor.
A request may come out a little below: its step under way may be shorter, as steps of partial prompts are by default,
and under load its last chunks may share one.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from streamrag.bench.arms import Timing
from streamrag.bench.cell import CellSettings, RequestResult
from streamrag.bench.workload import NUM_TAIL_TOKENS, moments_of, num_tokens_after, token_budget
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.records import RequestRecord
from streamrag.trace.values import TracedAppend, TracedChunk, TracedQuery

SUMMED = (
    "num_computed",
    "num_recomputed",
    "num_invalidated",
    "num_from_cache",
    "num_loaded",
    "num_written_through",
)
"""Counts of a record that add up over the requests of one query."""


def request_results(
    settings: CellSettings,
    queries: Sequence[TracedQuery],
    timings: Mapping[str, Timing],
    profile: StepProfile,
    records: Mapping[str, Sequence[RequestRecord]],
    start_s: float = 0.0,
) -> tuple[RequestResult, ...]:
    """Return the results of the queries that were answered.

    `start_s` is when the cell began, on the clock of timings and records.
    """
    results = []
    for query in queries:
        timing, record = timings.get(query.query_id), merged(records.get(query.query_id, ()))
        if timing is not None:
            result = RequestResult(
                query_id=query.query_id,
                arrival_s=query.arrival_s,
                retrieval_end_s=timing.retrieval_end_s - start_s,
                first_token_s=timing.first_token_s - start_s,
                finished_s=timing.finished_s - start_s,
                num_chunks=len(query.events),
                floor_s=floor_s(query, profile, token_budget(settings)),
                record=record and shifted(record, -start_s),
            )
            results.append(result)
    return tuple(results)


def merged(records: Sequence[RequestRecord]) -> RequestRecord | None:
    """Return the last record, with the counts and preemptions of all. Warming sends several requests for one query."""
    if len(records) <= 1:
        return records[0] if records else None
    return replace(
        records[-1],
        **{name: sum(getattr(record, name) for record in records) for name in SUMMED},
        preemptions=tuple(p for r in records for p in r.preemptions),
        restores=tuple(restore for r in records for restore in r.restores),
    )


def shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """Return the same record on a clock that shows `by_s` more."""

    def moved(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        record,
        arrival_s=record.arrival_s + by_s,
        queued_s=record.queued_s + by_s,
        scheduled_s=moved(record.scheduled_s),
        first_kv_s=moved(record.first_kv_s),
        last_kv_s=moved(record.last_kv_s),
        finished_s=record.finished_s + by_s,
        chunks=tuple(replace(c, arrival_s=c.arrival_s + by_s) for c in record.chunks),
        preemptions=tuple(replace(p, at_s=p.at_s + by_s) for p in record.preemptions),
        restores=tuple(replace(r, at_s=r.at_s + by_s) for r in record.restores),
    )


def floor_s(query: TracedQuery, profile: StepProfile, budget: int) -> float:
    """Return the seconds from the end of retrieval to the first token."""
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
            num_wanted = prompt.num_tokens if is_complete else prompt.num_tokens - 1  # the last of a partial one waits
            num_computed = cache.num_kept(prompt, num_computed)
        # What nobody waits for yet is not planned ahead.
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
    """The KV of the prompts of one query."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._before: list[tuple[tuple[TracedChunk, ...], int]] = []  # chunks, tokens computed of them
        self._newest: tuple[TracedChunk, ...] = ()

    def num_kept(self, prompt: _Prompt, num_computed: int) -> int:
        """Return how many tokens of `prompt` need not be computed, given those computed of the one before it."""
        self._before.append((self._newest, num_computed))
        num_shared = min(_common(self._newest, prompt.chunks), prompt.num_tokens - 1)
        self._newest = prompt.chunks
        num_kept = num_computed if num_computed <= num_shared else self._whole(num_shared)
        # A request that has KV of its own does not look for more in the prefix cache.
        return num_kept or max(
            self._whole(min(_common(chunks, prompt.chunks), num, prompt.num_tokens - 1)) for chunks, num in self._before
        )

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._block_size


def _prompts(query: TracedQuery) -> Iterator[_Prompt]:
    chunks: tuple[TracedChunk, ...] = ()
    num_tokens = 0
    for at_s, event, is_end in moments_of(query):
        if event:
            chunks = (*chunks, event.chunk) if isinstance(event, TracedAppend) else event.chunks
            num_tokens = num_tokens_after(event, num_tokens)
        if num_tokens or is_end:
            yield _Prompt(at_s, chunks, num_tokens + (NUM_TAIL_TOKENS if is_end else 0), is_end)


def _common(a: tuple[TracedChunk, ...], b: tuple[TracedChunk, ...]) -> int:
    num_tokens = 0
    for one, other in zip(a, b, strict=False):
        if one.key != other.key:
            break
        num_tokens += one.num_tokens
    return num_tokens
