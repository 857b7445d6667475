"""The floor of a request: its `ttft_after_retrieval_s` if it were streamed into an engine that does nothing else.

    chunks      c0       c1   c2 = last                 No queue, no eviction: what is left to wait for is what the last
    steps       [───] [──][──]│ [────][─]▲ first token  chunk brings, and the step that was under way when it came.
                              └── floor ─┘

A step takes what the budget allows. Prefixes shared with other queries are not counted. All arms have the same floor.
A request may come out a little below: its step under way may be shorter, as steps of partial prompts are by default,
and under load its last chunks may share one.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from streamrag.bench.workload import NUM_TAIL_TOKENS
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.trace.values import TracedAppend, TracedChunk, TracedQuery


def floor_s(query: TracedQuery, profile: StepProfile, budget: int, num_tail_tokens: int = NUM_TAIL_TOKENS) -> float:
    """In seconds, from the end of retrieval to the first token."""
    inputs = deque(_prompts(query, num_tail_tokens))
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
        """Tokens of `prompt` that need not be computed, given those computed of the one before it."""
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


def _prompts(query: TracedQuery, num_tail_tokens: int) -> Iterator[_Prompt]:
    chunks: tuple[TracedChunk, ...] = ()
    has_late_end = not query.events or query.end_s > query.events[-1].at_s
    num_tokens = 0
    for index, event in enumerate(query.events):
        chunks = (*chunks, event.chunk) if isinstance(event, TracedAppend) else event.chunks
        is_complete = not has_late_end and index == len(query.events) - 1
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens or is_complete:
            yield _Prompt(event.at_s, chunks, num_tokens + (num_tail_tokens if is_complete else 0), is_complete)
    if has_late_end:
        yield _Prompt(query.end_s, chunks, num_tokens + num_tail_tokens, True)


def _common(a: tuple[TracedChunk, ...], b: tuple[TracedChunk, ...]) -> int:
    num_tokens = 0
    for one, other in zip(a, b, strict=False):
        if one.key != other.key:
            break
        num_tokens += one.num_tokens
    return num_tokens
