"""Measures a table profile of a running engine: how long its steps take, and what a request takes beside them.

    blocker  [─────────────]                       While it computes, the requests of the batch arrive, so that the
    batch      ▲▲▲▲        [─ n x m tokens ─][─ n decodes ─][─ n decodes ─]       next step holds all of them.

A step lasts from the end of the one before it to its own: what the engine does between two steps is part of it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from streamrag.bench.provenance import versions
from streamrag.bench.workload import Tokens
from streamrag.engine.costs import Part, TableProfile, fit_table
from streamrag.errors import BackendError
from streamrag.trace.values import TracedChunk

if TYPE_CHECKING:
    from streamrag.backends.engine_client import EngineClient, MeasuredStep

__all__ = ["NUM_IN_VOCABULARY", "Measurement", "Measurements", "measure", "measure_profile", "table_profile"]

NUM_IN_VOCABULARY = 512
"""Token ids are below this, which every model has."""
NUM_BLOCKER_TOKENS = 128
HEAD_START_S = 0.002
"""For the blocker to reach the engine: its step has begun then, and the batch arrives before it ends."""
SIZES = (16, 64, 128, 256, 512, 1_024, 2_048, 4_096)
NUM_DECODES = 3
NUM_REPETITIONS = 3
NUM_TRIES = 4
"""To have a batch in one step, before it is left out. The quicker the engine, the harder it is."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """So many requests that arrive together, each with so many new tokens after a prefix that all share."""

    num_requests: int
    num_tokens: int
    num_context: int
    num_output_tokens: int = 1

    @property
    def num_most_tokens(self) -> int:
        """Of one of its requests, answer included."""
        return self.num_context + self.num_tokens + self.num_output_tokens

    def parts(self) -> Iterator[tuple[Part, ...]]:
        """Of each of its steps."""
        yield ((self.num_tokens, self.num_context),) * self.num_requests
        num_before = self.num_context + self.num_tokens
        for index in range(self.num_output_tokens - 1):
            yield ((1, num_before + index),) * self.num_requests


@dataclass(frozen=True, slots=True)
class Measurement:
    """A step, and how long it took."""

    parts: tuple[Part, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Of one engine."""

    steps: tuple[Measurement, ...]
    """Medians of repetitions."""
    lone: tuple[Measurement, ...]
    """Requests that were alone on the engine: from the client's asking to its first token."""


async def measure_profile(
    client: "EngineClient", name: str, budget: int, max_model_len: int, max_num_seqs: int = 1
) -> TableProfile:
    """What steps of an idle engine take, and what a request takes beside them. A few seconds on a small model.

    Steps hold `max_num_seqs` requests at most; with one, the cost of a request goes to the base line.
    """
    return table_profile([await measure(client, budget, max_model_len, max_num_seqs)], client, name)


def table_profile(found: Sequence[Measurements], client: "EngineClient", name: str) -> TableProfile:
    """The profile that fits all these best; what is no matter of time is that of `client`."""
    steps = [(step.parts, step.step_s) for of_one in found for step in of_one.steps]
    knots = [1, *sorted({sum(new for new, _ in parts) for parts, _ in steps} & set(SIZES))]
    points, pair_s, request_s = fit_table(steps, knots)
    bare = TableProfile(
        name=name,
        device="this machine",
        points=points,
        pair_s=pair_s,
        request_s=request_s,
        kv_tokens=client.kv_tokens,
        block_size=client.block_size,
        is_async=client.is_async,
        provenance={"measured": f"{len(steps)} kinds of steps, each {NUM_REPETITIONS} times", **versions()},
    )
    beside_s = [lone.step_s - bare.step_s(lone.parts) for of_one in found for lone in of_one.lone]
    return replace(bare, delivery_s=max(median(beside_s), 0.0))


async def measure(client: "EngineClient", budget: int, max_model_len: int, max_num_seqs: int) -> Measurements:
    """Steps of one request and of several, prefill and decode, without context and with as much as there may be."""
    tokens = _Fresh()
    most = min(budget, max_model_len - 2)
    await _first_token_s(client, tokens.take(most))  # the very first step takes seconds
    steps: list[Measurement] = []
    for num_context in _contexts(client.block_size, max_model_len):
        batches = [b for b in _batches(most, num_context, max_num_seqs) if b.num_most_tokens < max_model_len]
        steps += await _measure_batches(client, batches, tokens, min(NUM_BLOCKER_TOKENS, most))
    sizes = [size for size in SIZES if size <= min(most, 256)]
    took_s = [[await _first_token_s(client, tokens.take(size)) for size in sizes] for _ in range(NUM_REPETITIONS)]
    lone = [
        Measurement(((size, 0),), median(of_one)) for size, of_one in zip(sizes, zip(*took_s, strict=True), strict=True)
    ]
    return Measurements(tuple(steps), tuple(lone))


def _contexts(block_size: int, max_model_len: int) -> list[int]:
    """None, half of the longest and nearly the longest, in whole blocks."""
    return sorted({num - num % block_size for num in (0, max_model_len // 2, max_model_len * 7 // 8)})


def _batches(most: int, num_context: int, max_num_seqs: int) -> Iterator[_Batch]:
    for num_tokens in sorted({*(size for size in SIZES if size < most), most}):
        yield _Batch(1, num_tokens, num_context)
    for num_requests in (n for n in (1, 4, 16) if n <= max_num_seqs):
        for num_tokens in (16, 64, 256):
            if num_requests > 1 and num_requests * num_tokens <= most:
                yield _Batch(num_requests, num_tokens, num_context)
        yield _Batch(num_requests, 4, num_context, 1 + NUM_DECODES)


async def _measure_batches(
    client: "EngineClient", batches: Sequence[_Batch], tokens: "_Fresh", num_blocker_tokens: int
) -> list[Measurement]:
    """Medians of their steps. Repetitions are far apart, so that a disturbance spoils one of them only."""
    prefix = tokens.take(batches[0].num_context)
    if prefix:
        await _first_token_s(client, prefix + tokens.take(1))  # from now on in the prefix cache
    took_s: list[list[list[float]]] = [[] for _ in batches]
    for _ in range(NUM_REPETITIONS):
        for batch, of_batch in zip(batches, took_s, strict=True):
            if steps_s := await _steps_of(client, batch, prefix, tokens, num_blocker_tokens):
                of_batch.append(steps_s)
    return [
        Measurement(parts, median(of_step))
        for batch, of_batch in zip(batches, took_s, strict=True)
        for parts, of_step in zip(batch.parts(), zip(*of_batch, strict=True), strict=False)
    ]


async def _steps_of(
    client: "EngineClient", batch: _Batch, prefix: list[int], tokens: "_Fresh", num_blocker_tokens: int
) -> list[float]:
    """Seconds of each of its steps; none if it did not come together in one."""
    expected = [(len(parts), sum(new for new, _ in parts)) for parts in batch.parts()]
    num_tokens = num_blocker_tokens + sum(num for _, num in expected)
    for _ in range(NUM_TRIES):
        num_before = len(client.steps)
        prompts = [prefix + tokens.take(batch.num_tokens) for _ in range(batch.num_requests)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_first_token_s(client, tokens.take(num_blocker_tokens)))
            await asyncio.sleep(HEAD_START_S)
            for index, prompt in enumerate(prompts):
                tasks.create_task(_answer(client, f"together {index}", prompt, batch.num_output_tokens))
        steps = await _steps_since(client, num_before, num_tokens)
        if [(step.num_requests, step.num_tokens) for step in steps[1:]] == expected:
            return [after.end_s - before.end_s for before, after in pairwise(steps)]
    return []


async def _steps_since(client: "EngineClient", num_before: int, num_tokens: int) -> Sequence["MeasuredStep"]:
    """The steps of so many tokens, of which the engine tells a moment after the tokens themselves."""
    for _ in range(100):
        steps = client.steps[num_before:]
        if sum(step.num_tokens for step in steps) >= num_tokens:
            return steps
        await asyncio.sleep(0.001)
    raise BackendError(f"the engine told of {sum(step.num_tokens for step in steps)} tokens' steps, not {num_tokens}")


class _Fresh:
    """Tokens that no request has had before."""

    def __init__(self) -> None:
        self._num_taken = 0

    def take(self, num_tokens: int) -> list[int]:
        self._num_taken += 1
        return Tokens(NUM_IN_VOCABULARY).of_chunk(TracedChunk(f"measured {self._num_taken}", num_tokens))


async def _first_token_s(client: "EngineClient", token_ids: list[int]) -> float:
    clock = asyncio.get_running_loop().time
    start_s = clock()
    await _answer(client, "alone", token_ids, 1)
    return clock() - start_s


async def _answer(client: "EngineClient", query_id: str, token_ids: list[int], num_output_tokens: int) -> None:
    async with aclosing(client.generate(query_id, token_ids, num_output_tokens)) as answer:
        async for _ in answer:
            pass
