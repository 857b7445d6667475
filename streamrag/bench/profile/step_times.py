"""Measures a table profile of a running engine: the time of its steps, and of a request beside them.

    blocker  [─────────────]                       While it computes, the requests of the batch arrive, so that the
    batch      ▲▲▲▲        [─ n x m tokens ─][─ n decodes ─][─ n decodes ─]       next step holds all of them.

A step lasts from the end of the one before it to its own: what the engine does between two steps is part of it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from streamrag.backends.vllm.client.measured import EngineClient, MeasuredStep
from streamrag.bench.provenance import versions
from streamrag.bench.workload import Tokens
from streamrag.engine.costs.curve_fit import fit_table
from streamrag.engine.costs.step_parts import Part
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.errors import BackendError
from streamrag.trace.values import TracedChunk

NUM_IN_VOCABULARY = 512
"""Token ids are below this, which every model has."""
NUM_BLOCKER_TOKENS = 128
HEAD_START_S = 0.002
"""Seconds for the blocker to reach the engine: its step has begun then, and the batch arrives before it ends."""
SIZES = (16, 50, 100, 200, 400, 700, 1_000, 2_000, 4_000)
"""Most are no multiples of anything, as chunks are not."""
LONE_SIZES = (16, 100, 200)
NUM_DECODES = 3
NUM_PASSES = 3
PASSES_S = 10.0
NUM_TRIES = 4
"""Attempts to have a batch in one step, before it is left out. The quicker the engine, the harder it is."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that arrive together, each with so many new tokens after a prefix that all share."""

    num_requests: int
    num_tokens: int
    num_context: int
    num_output_tokens: int = 1

    def step_parts(self) -> Iterator[tuple[Part, ...]]:
        """Yield the parts of each of its steps."""
        yield ((self.num_tokens, self.num_context),) * self.num_requests
        num_before = self.num_context + self.num_tokens
        for index in range(self.num_output_tokens - 1):
            yield ((1, num_before + index),) * self.num_requests


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step, and its time: from the end of the one before, and of this the model's part."""

    parts: tuple[Part, ...]
    step_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A turn of measurements on one engine."""

    steps: tuple[StepTime, ...]
    beside_s: tuple[float, ...]
    """For each request that was alone: the time from asking to the first token, less the time of the model."""


class KvFacts(Protocol):
    """The facts of an engine that a profile has beside times. An `EngineClient` has them."""

    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def is_async(self) -> bool: ...


async def measure_profile(
    client: EngineClient, name: str, budget: int, max_model_len: int, max_num_seqs: int = 1
) -> TableProfile:
    """Measure the steps of an idle engine, and a request beside them. A few seconds on a small model.

    On a slow one there are fewer passes: none begins after `PASSES_S`. Steps hold `max_num_seqs` requests at most; with
    one, the cost of a request goes to the base line.
    """
    await warm_up(client, budget, max_model_len)
    clock = asyncio.get_running_loop().time
    passes: list[Pass] = []
    start_s = clock()
    while not passes or (len(passes) < NUM_PASSES and clock() - start_s < PASSES_S):
        passes.append(await measure(client, budget, max_model_len, max_num_seqs))
    return table_profile(passes, client, name)


def table_profile(passes: Sequence[Pass], engine: KvFacts, name: str) -> TableProfile:
    """Return the profile that fits the medians of all passes best; what is no matter of time is that of `engine`."""
    usual_s = usual_step_s(passes)
    most = max(sum(new for new, _ in parts) for parts in usual_s)
    fitted = fit_table(list(usual_s.items()), [1, *_sizes(most)])
    between_s = median(step.step_s - step.elapsed_s for one in passes for step in one.steps)
    beside_s = median(seconds for one in passes for seconds in one.beside_s)
    return TableProfile(
        name=name,
        device="this machine",
        points=fitted.points,
        pair_s=fitted.pair_s,
        own_pair_s=fitted.own_pair_s,
        request_s=fitted.request_s,
        kv_tokens=engine.kv_tokens,
        block_size=engine.block_size,
        is_async=engine.is_async,
        delivery_s=max(beside_s - between_s, 0.0),
        unsteadiness=tuple(factor for one in passes for factor in slow_factors(one, usual_s)),
        provenance={"measured": f"{len(usual_s)} kinds of steps in {len(passes)} passes", **versions()},
    )


def usual_step_s(passes: Sequence[Pass]) -> dict[tuple[Part, ...], float]:
    """Return the median seconds of each kind of step."""
    steps_s: dict[tuple[Part, ...], list[float]] = {}
    for step in (step for one in passes for step in one.steps):
        steps_s.setdefault(step.parts, []).append(step.step_s)
    return {parts: median(of_one) for parts, of_one in steps_s.items()}


def slow_factors(one: Pass, usual_s: Mapping[tuple[Part, ...], float]) -> list[float]:
    """Return how many times as long as usual each step took, of those that are longer than most.

    Disturbances are a larger share of shorter ones.
    """
    usually_s = median(usual_s.values())
    return [step.step_s / usual_s[step.parts] for step in one.steps if usual_s[step.parts] >= usually_s]


async def warm_up(client: EngineClient, budget: int, max_model_len: int) -> None:
    """Run the very first steps of an engine, which take seconds."""
    for num_tokens in (min(budget, max_model_len - 2), 1):
        await answer(client, "warm-up", FreshTokens("warm-up").take(num_tokens), 1)


async def measure(client: EngineClient, budget: int, max_model_len: int, max_num_seqs: int) -> Pass:
    """Measure steps of one request and of several, prefill and decode, without context and with as much as fits.

    A pass measures everything once. Several, far apart, tell what a machine does that is not always equally fast.
    """
    tokens = FreshTokens(f"measured {len(client.steps)}")
    most = min(budget, max_model_len - 2)
    steps: list[StepTime] = []
    for num_context in _contexts(client.block_size, max_model_len):
        prefix = tokens.take(num_context)
        if prefix:
            await answer(client, "prefix", prefix + tokens.take(1), 1)  # from now on in the prefix cache
        for batch in _batches(most, num_context, max_num_seqs):
            if num_context + batch.num_tokens + batch.num_output_tokens < max_model_len:
                steps += await _steps_of(client, batch, prefix, tokens, min(NUM_BLOCKER_TOKENS, most))
    sizes = [size for size in LONE_SIZES if size <= most]
    return Pass(tuple(steps), tuple([await _beside_s(client, tokens.take(size)) for size in sizes]))


def _sizes(most: int) -> list[int]:
    """Return the tokens of steps of one request, the largest last and not too close to the one before."""
    return [*(size for size in SIZES if size <= 0.75 * most), most]


def _contexts(block_size: int, max_model_len: int) -> list[int]:
    """Return no context, half of the longest and nearly the longest, in whole blocks."""
    return sorted({num - num % block_size for num in (0, max_model_len // 2, max_model_len * 7 // 8)})


def _batches(most: int, num_context: int, max_num_seqs: int) -> Iterator[_Batch]:
    for num_tokens in _sizes(most):
        yield _Batch(1, num_tokens, num_context)
    for num_requests in (n for n in (1, 3, 10) if n <= max_num_seqs):
        for num_tokens in (20, 90, 250):
            if num_requests > 1 and num_requests * num_tokens <= most:
                yield _Batch(num_requests, num_tokens, num_context)
        yield _Batch(num_requests, 4, num_context, 1 + NUM_DECODES)


async def _steps_of(
    client: EngineClient, batch: _Batch, prefix: list[int], tokens: "FreshTokens", num_blocker_tokens: int
) -> list[StepTime]:
    """Measure the steps of a batch; none if it did not come together in one."""
    all_parts = list(batch.step_parts())
    expected = [(len(parts), sum(new for new, _ in parts)) for parts in all_parts]
    num_tokens = num_blocker_tokens + sum(num for _, num in expected)
    for _ in range(NUM_TRIES):
        num_before = len(client.steps)
        prompts = [prefix + tokens.take(batch.num_tokens) for _ in range(batch.num_requests)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer(client, "blocker", tokens.take(num_blocker_tokens), 1))
            await asyncio.sleep(HEAD_START_S)
            for index, prompt in enumerate(prompts):
                tasks.create_task(answer(client, f"together {index}", prompt, batch.num_output_tokens))
        steps = await steps_since(client, num_before, num_tokens)
        if [(step.num_requests, step.num_tokens) for step in steps[1:]] == expected:
            return [
                StepTime(parts, after.end_s - before.end_s, after.elapsed_s)
                for parts, (before, after) in zip(all_parts, pairwise(steps), strict=True)
            ]
    return []


async def _beside_s(client: EngineClient, token_ids: list[int]) -> float:
    """Measure the seconds that the first token of a request takes beside the model, if the request is alone."""
    clock, num_before = asyncio.get_running_loop().time, len(client.steps)
    start_s = clock()
    await answer(client, "alone", token_ids, 1)
    took_s = clock() - start_s
    return took_s - sum(step.elapsed_s for step in await steps_since(client, num_before, len(token_ids)))


async def steps_since(client: EngineClient, num_before: int, num_tokens: int) -> Sequence[MeasuredStep]:
    """Wait for the steps of so many tokens, of which the engine tells a moment after the tokens themselves."""
    for _ in range(100):
        steps = client.steps[num_before:]
        if sum(step.num_tokens for step in steps) >= num_tokens:
            return steps
        await asyncio.sleep(0.001)
    raise BackendError(f"the engine told of {sum(step.num_tokens for step in steps)} tokens' steps, not {num_tokens}")


class FreshTokens:
    """A source of tokens that no request has had before."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_taken = 0

    def take(self, num_tokens: int) -> list[int]:
        self._num_taken += 1
        return Tokens(NUM_IN_VOCABULARY).of_chunk(TracedChunk(f"{self._name} {self._num_taken}", num_tokens))


async def answer(client: EngineClient, query_id: str, token_ids: list[int], num_output_tokens: int) -> None:
    """Send a request, and wait for the whole answer."""
    async with aclosing(client.generate(query_id, token_ids, num_output_tokens)) as answer:
        async for _ in answer:
            pass
