"""Measure a table profile of a running engine: the duration of its steps, and a request's overhead beside them.

    blocker  [─────────────]                       While the blocker computes, all requests of the batch arrive, so
    batch      ▲▲▲▲        [─ n x m tokens ─][─ n decodes ─][─ n decodes ─]       that the next step has all of them.

A step's duration is from the end of the step before to its own end: it includes the engine's work between steps.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from streamrag.engine.costs.step_profiles import StepPart, TableProfile
from streamrag.errors import BackendError
from streamrag.trace.values import TracedChunk
from streamrag_bench.measured_engine import EngineClient, MeasuredStep
from streamrag_bench.profile.curve_fit import fit_table
from streamrag_bench.provenance import versions
from streamrag_bench.workload import Tokens

NUM_IN_VOCABULARY = 512  # upper bound of token ids; every model's vocabulary is larger
NUM_BLOCKER_TOKENS = 128
HEAD_START_S = 0.002
"""Seconds between the blocker and the batch, so that the blocker's step has begun when the batch arrives."""
SIZES = (16, 50, 100, 200, 400, 700, 1_000, 2_000, 4_000)
"""Tokens of measured steps. Most are not multiples of a block, as chunks are not."""
LONE_SIZES = (16, 100, 200)
NUM_DECODES = 3
NUM_PASSES = 3
PASSES_S = 10.0
NUM_TRIES = 4  # attempts to have a batch in one step, which is harder on a fast engine; then the batch is left out


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that arrive together, each with `num_tokens` new tokens after a shared prefix."""

    num_requests: int
    num_tokens: int
    num_context: int
    num_output_tokens: int = 1

    def step_parts(self) -> Iterator[tuple[StepPart, ...]]:
        """Yield the parts of each step of the batch: its prefill, then its decodes."""
        yield ((self.num_tokens, self.num_context),) * self.num_requests
        num_before = self.num_context + self.num_tokens
        for index in range(self.num_output_tokens - 1):
            yield ((1, num_before + index),) * self.num_requests


@dataclass(frozen=True, slots=True)
class StepTime:
    """The duration of a step (`step_s`), and the model's share of it (`elapsed_s`)."""

    parts: tuple[StepPart, ...]
    step_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class MeasurementPass:
    steps: tuple[StepTime, ...]
    beside_s: tuple[float, ...]
    """For each lone request: the seconds to its first token, minus the model's seconds."""


class KvFacts(Protocol):
    """The properties of an engine that a profile records. An `EngineClient` has them."""

    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def is_async(self) -> bool: ...


async def measure_profile(
    client: EngineClient, name: str, budget: int, max_model_len: int, max_num_seqs: int = 1
) -> TableProfile:
    """Measure an idle engine's steps and a request's overhead, and return the fit: a few seconds for a small model.

    No pass begins after `PASSES_S`. Steps have at most `max_num_seqs` requests; with 1, the cost per request is part
    of the base cost.
    """
    await warm_up(client, budget, max_model_len)
    clock = asyncio.get_running_loop().time
    passes: list[MeasurementPass] = []
    start_s = clock()
    while not passes or (len(passes) < NUM_PASSES and clock() - start_s < PASSES_S):
        passes.append(await measure(client, budget, max_model_len, max_num_seqs))
    return table_profile(passes, client, name)


def table_profile(passes: Sequence[MeasurementPass], engine: KvFacts, name: str) -> TableProfile:
    """Return a profile fitted to the median times of all passes, with their slowdowns and the facts of `engine`."""
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


def usual_step_s(passes: Sequence[MeasurementPass]) -> dict[tuple[StepPart, ...], float]:
    """Return the median seconds over all passes of each kind of step, by its parts."""
    steps_s: dict[tuple[StepPart, ...], list[float]] = {}
    for step in (step for one in passes for step in one.steps):
        steps_s.setdefault(step.parts, []).append(step.step_s)
    return {parts: median(of_one) for parts, of_one in steps_s.items()}


def slow_factors(one: MeasurementPass, usual_s: Mapping[tuple[StepPart, ...], float]) -> list[float]:
    """Return the slowdown factors of the longer half of the steps.

    Shorter steps are left out, because noise is a larger share of their time.
    """
    usually_s = median(usual_s.values())
    return [step.step_s / usual_s[step.parts] for step in one.steps if usual_s[step.parts] >= usually_s]


async def warm_up(client: EngineClient, budget: int, max_model_len: int) -> None:
    """Run an engine's first steps, a largest and a smallest one, which take seconds."""
    for num_tokens in (min(budget, max_model_len - 2), 1):
        await answer(client, "warm-up", FreshTokens("warm-up").take(num_tokens), 1)


async def measure(client: EngineClient, budget: int, max_model_len: int, max_num_seqs: int) -> MeasurementPass:
    """Measure prefill and decode steps with no, half and nearly the longest context, then lone requests: one pass.

    Steps have one or several requests. Batches that would exceed the model's length are left out. Several passes,
    spread over time, show how the machine's speed varies.
    """
    tokens = FreshTokens(f"measured {len(client.steps)}")
    most = min(budget, max_model_len - 2)
    steps: list[StepTime] = []
    contexts = {num - num % client.block_size for num in (0, max_model_len // 2, max_model_len * 7 // 8)}
    for num_context in sorted(contexts):
        prefix = tokens.take(num_context)
        if prefix:
            await answer(client, "prefix", prefix + tokens.take(1), 1)  # fills the prefix cache
        for batch in _batches(most, num_context, max_num_seqs):
            if num_context + batch.num_tokens + batch.num_output_tokens < max_model_len:
                steps += await _steps_of(client, batch, prefix, tokens, min(NUM_BLOCKER_TOKENS, most))
    sizes = [size for size in LONE_SIZES if size <= most]
    return MeasurementPass(tuple(steps), tuple([await _beside_s(client, tokens.take(size)) for size in sizes]))


def _sizes(most: int) -> list[int]:
    """Return the numbers of tokens for steps of one request: the `SIZES` well below `most`, and `most`."""
    return [*(size for size in SIZES if size <= 0.75 * most), most]


def _batches(most: int, num_context: int, max_num_seqs: int) -> Iterator[_Batch]:
    """Yield the batches to measure at this context: single ones, and up to ten requests, prefilling and decoding."""
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
    """Send a batch behind a blocker, and return its steps' times; [] if in `NUM_TRIES` no step had all its requests."""
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
    """Send one request to the idle engine, and return the seconds to its first token, less the seconds of its steps.
    Raises BackendError if the engine does not report the steps soon."""
    clock, num_before = asyncio.get_running_loop().time, len(client.steps)
    start_s = clock()
    await answer(client, "alone", token_ids, 1)
    elapsed_s = clock() - start_s
    return elapsed_s - sum(step.elapsed_s for step in await steps_since(client, num_before, len(token_ids)))


async def steps_since(client: EngineClient, num_before: int, num_tokens: int) -> Sequence[MeasuredStep]:
    """Return steps from index `num_before` on, once they sum up to `num_tokens`; raise BackendError after 0.1 s."""
    for _ in range(100):
        steps = client.steps[num_before:]
        if sum(step.num_tokens for step in steps) >= num_tokens:
            return steps
        await asyncio.sleep(0.001)
    num_reported = sum(step.num_tokens for step in steps)
    raise BackendError(f"the engine reported steps of {num_reported} tokens instead of {num_tokens}")


class FreshTokens:
    """A source of tokens that differ from those of all earlier requests."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_taken = 0

    def take(self, num_tokens: int) -> list[int]:
        """Return pseudo-random token ids, other ones at each call."""
        self._num_taken += 1
        return Tokens(NUM_IN_VOCABULARY).of_chunk(TracedChunk(f"{self._name} {self._num_taken}", num_tokens))


async def answer(client: EngineClient, query_id: str, token_ids: list[int], num_output_tokens: int) -> None:
    """Send a request, and wait for the end of its answer."""
    async with aclosing(client.generate(query_id, token_ids, num_output_tokens)) as answer:
        async for _ in answer:
            pass
