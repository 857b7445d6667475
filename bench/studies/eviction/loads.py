"""Loads whose streams are idle most of the time, and what they ask of an engine."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedUpdate
from streamrag_bench.workload import NUM_TAIL_TOKENS, num_tokens_after

NUM_PAGES, PAGE_TOKENS, PAGE_S = 6, (50, 250), 2.0
NUM_UPDATES, NUM_PASSAGES, PASSAGE_TOKENS, UPDATE_S = 4, 5, (40, 140), 3.0


def growing(num_queries: int) -> Trace:
    """A crawl: pages, one after the other."""
    rng = random.Random("append")

    def events(number: int) -> list[TracedEvent]:
        sizes = [rng.randrange(*PAGE_TOKENS) for _ in range(NUM_PAGES)]
        chunks = [TracedChunk(f"a{number}.{index}", size) for index, size in enumerate(sizes)]
        return [TracedAppend(at_s, chunk) for at_s, chunk in zip(_times(rng, NUM_PAGES, PAGE_S), chunks, strict=True)]

    return _trace("append", [events(number) for number in range(num_queries)])


def replaced(num_queries: int) -> Trace:
    """A search that finds better passages while it runs: the first ones stay, and those behind them are others."""
    rng = random.Random("update")

    def events(number: int) -> list[TracedEvent]:
        chunks: list[TracedChunk] = []
        found: list[TracedEvent] = []
        for index, at_s in enumerate(_times(rng, NUM_UPDATES, UPDATE_S)):
            num_kept = rng.randrange(1, NUM_PASSAGES) if chunks else 0
            keys = [f"u{number}.{index}.{rank}" for rank in range(num_kept, NUM_PASSAGES)]
            chunks = [*chunks[:num_kept], *(TracedChunk(key, rng.randrange(*PASSAGE_TOKENS)) for key in keys)]
            found.append(TracedUpdate(at_s, tuple(chunks)))
        return found

    return _trace("update", [events(number) for number in range(num_queries)])


def _times(rng: random.Random, num: int, mean_gap_s: float) -> list[float]:
    """From 0 on."""
    return list(accumulate((rng.uniform(0.4, 1.6) * mean_gap_s for _ in range(num - 1)), initial=0.0))


def _trace(name: str, events: Sequence[Sequence[TracedEvent]]) -> Trace:
    return Trace(tuple(TracedQuery(f"{name}-{i}", float(i), "", tuple(e), e[-1].at_s) for i, e in enumerate(events)))


def busy_s(query: TracedQuery, num_output_tokens: int, profile: StepProfile) -> float:
    """What a query takes of the engine if its chunks come one by one and nothing is computed twice."""
    seconds, num_before = 0.0, 0
    before: tuple[TracedChunk, ...] = ()
    for event in query.events:
        num_tokens, num_kept = num_tokens_after(event, num_before), num_before
        if isinstance(event, TracedUpdate):
            num_kept = sum(a.num_tokens for a, b in zip(event.chunks, before, strict=False) if a == b)
            before = event.chunks
        seconds += profile.step_s([(num_tokens - num_kept, num_kept)])
        num_before = num_tokens
    seconds += profile.step_s([(NUM_TAIL_TOKENS, num_before)])
    return seconds + (num_output_tokens - 1) * profile.step_s([(1, num_before)])


def token_seconds(query: TracedQuery) -> float:
    """How many tokens its stream holds, times for how long."""
    total, num_tokens = 0.0, 0
    for event, after in pairwise(query.events):
        num_tokens = num_tokens_after(event, num_tokens)
        total += num_tokens * (after.at_s - event.at_s)
    return total
