"""Measure the time to recompute whole prompts on a running engine, alone and beside a running batch.

alone    [── chunk ──][── chunk ──][─ rest + 1 ─][ decode ]        the chunks' steps, minus the decode step, which is
                                                                   needed in any case
beside   [d][d][─ chunk + d ─][─ chunk + d ─][─ rest + d ─][d]     the chunks' steps, minus as many decode steps [d]
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from streamrag.engine.costs.step_profiles import StepPart
from streamrag.errors import BackendError
from streamrag.support.tasks import cancel_and_wait
from streamrag_bench.measured_engine import EngineClient, MeasuredStep
from streamrag_bench.profile.step_times import FreshTokens, MeasurementPass, StepTime, answer, steps_since

FIRST_SIZE = 64
NUM_REPEATS, NUM_REPEATS_SMALL = 3, 9
SMALL = 1_024
"""Prompts of up to this many tokens are repeated more often, because noise is a larger share of their time."""
NUM_TRIES = 5  # attempts to have a prompt computed in the expected steps
NUM_WAITS = 1_000  # maximum number of 1 ms waits until the engine has reported all steps
NUM_IDLE = 5  # number of steps that only decode, as the reference for the others
NUM_CONTEXT_BESIDE = 32  # prompt tokens of each request in the running batch
GROWTH = 3.0  # assumed growth of the time when the tokens double: attention grows faster than linearly


@dataclass(frozen=True, slots=True)
class RecomputeTimes:
    """The seconds that a prompt added to the steps, in each repetition, by number of tokens."""

    num_beside: int
    """Number of requests in the running batch."""
    alone: dict[int, list[float]] = field(default_factory=dict)
    beside: dict[int, list[float]] = field(default_factory=dict)
    steps: list[StepTime] = field(default_factory=list)
    """All measured steps."""

    def as_pass(self) -> MeasurementPass:
        """Return the steps, for the fit of a profile."""
        return MeasurementPass(tuple(self.steps), ())


def prompt_sizes(max_model_len: int) -> list[int]:
    """Return the numbers of tokens to measure: doubling from `FIRST_SIZE`; the last is `max_model_len - 4`."""
    most = max_model_len - 4
    sizes = [min(FIRST_SIZE, most)]
    while 2 * sizes[-1] < 0.75 * most:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] == most else [*sizes, most]


async def measure_recompute(
    client: EngineClient,
    budget: int,
    max_model_len: int,
    num_beside: int,
    *,
    max_s: float,
    progress: Callable[[int], None] = lambda size: None,
) -> RecomputeTimes:
    """Return repeated times of prompts, alone and beside a batch, with all their steps.

    Prompts grow up to `max_model_len`, or until the next length would probably exceed `max_s` in total.

    num_beside: requests of the running batch; fewer if more than half the budget, but at least one.
    progress: called with each length before it is measured.

    :raises BackendError: the engine does not compute the prompts in the expected steps.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + max_s
    times = RecomputeTimes(max(min(num_beside, budget // 2), 1))
    meter = _Meter(client, budget, max_model_len, times.num_beside)
    last_s = 0.0
    for size in prompt_sizes(max_model_len):
        start_s = clock()
        if start_s + GROWTH * last_s > until_s:
            break
        progress(size)
        for by_size, measure in ((times.alone, meter.alone), (times.beside, meter.beside)):
            for _ in range(NUM_REPEATS_SMALL if size <= SMALL else NUM_REPEATS):
                seconds, steps = await measure(size)
                by_size.setdefault(size, []).append(seconds)
                times.steps.extend(steps)
        last_s = clock() - start_s
    return times


class _Meter:
    """A meter of one prefill on a running engine, alone or beside a batch of decoding requests."""

    def __init__(self, client: EngineClient, budget: int, max_model_len: int, num_beside: int) -> None:
        self._client = client
        self._budget = budget
        self._max_model_len = max_model_len
        self._num_beside = num_beside
        self._tokens = FreshTokens(f"recomputed {len(client.steps)}")

    async def alone(self, size: int) -> tuple[float, list[StepTime]]:
        """Return the seconds to prefill `size + 1` tokens, less those of a decode step, and all steps except the first.

        Raises BackendError if the steps were not as planned in any of `NUM_TRIES`.
        """
        parts: list[StepPart] = [*_chunks(size + 1, self._budget), (1, size + 1)]
        for _ in range(NUM_TRIES):
            num_before = len(self._client.steps)
            await answer(self._client, "recomputed", self._tokens.take(size + 1), 2)
            steps = await steps_since(self._client, num_before, size + 2)
            if [step.num_tokens for step in steps] == [num_new for num_new, _ in parts]:
                # The engine was idle before the first step.
                steps_s = [steps[0].elapsed_s, *(b.end_s - a.end_s for a, b in pairwise(steps))]
                timed = [StepTime((p,), s, step.elapsed_s) for p, s, step in zip(parts, steps_s, steps, strict=True)]
                return sum(steps_s[:-1]) - steps_s[-1], timed[1:]
        raise BackendError(f"{size + 1} tokens are not computed in {len(parts) - 1} steps of {self._budget}")

    async def beside(self, size: int) -> tuple[float, list[StepTime]]:
        """Return the seconds that a prefill of `size` tokens adds to the steps of the batch, and those steps.

        Noise can make the seconds negative. Tries again if the chunks were not as planned.

        :raises BackendError: after `NUM_TRIES`.
        """
        num_beside = self._num_beside
        chunks = list(_chunks(size, self._budget - num_beside))
        decodes = ((1, NUM_CONTEXT_BESIDE),) * num_beside
        for _ in range(NUM_TRIES):
            mixed, idle_s = await self._computed_beside(size)
            if [b.num_tokens - num_beside for _, b in mixed] == [num_new for num_new, _ in chunks] and idle_s:
                timed = [
                    StepTime((chunk, *decodes), step.end_s - before.end_s, step.elapsed_s)
                    for chunk, (before, step) in zip(chunks, mixed, strict=True)
                ]
                return sum(step.step_s for step in timed) - len(timed) * median(idle_s), timed
        raise BackendError(f"{size} tokens beside {num_beside} decodes are not computed in {len(chunks)} steps")

    async def _computed_beside(self, size: int) -> tuple[list[tuple[MeasuredStep, MeasuredStep]], list[float]]:
        """Prefill beside the batch; return `_mixed_and_idle` of the steps reported, too few after `NUM_WAITS`."""
        num_before = len(self._client.steps)
        async with self._decoding():
            await answer(self._client, "recomputed", self._tokens.take(size), 1)
            for _ in range(NUM_WAITS):
                mixed, idle_s = _mixed_and_idle(self._client.steps[num_before:], self._num_beside)
                if sum(b.num_tokens - self._num_beside for _, b in mixed) >= size and len(idle_s) >= NUM_IDLE:
                    break
                await asyncio.sleep(0.001)
        return mixed, idle_s

    @asynccontextmanager
    async def _decoding(self) -> AsyncIterator[None]:
        """Enter the block when each request of a batch has a token or has failed; cancel the requests after the block.

        Each decodes up to the model's length. No error of a request is raised.
        """
        started = [asyncio.Event() for _ in range(self._num_beside)]

        async def decode(index: int, event: asyncio.Event) -> None:
            prompt = self._tokens.take(NUM_CONTEXT_BESIDE)
            num_output_tokens = self._max_model_len - NUM_CONTEXT_BESIDE - 1
            try:
                async with aclosing(self._client.generate(f"beside {index}", prompt, num_output_tokens)) as outputs:
                    async for _ in outputs:
                        event.set()
            finally:
                event.set()  # so that a failed request does not block the others

        tasks = [asyncio.create_task(decode(index, event)) for index, event in enumerate(started)]
        try:
            for event in started:
                await event.wait()
            yield
        finally:
            await cancel_and_wait(tasks)


def _mixed_and_idle(
    steps: Sequence[MeasuredStep], num_beside: int
) -> tuple[list[tuple[MeasuredStep, MeasuredStep]], list[float]]:
    """Return the steps with prefill, each with its predecessor, and the seconds of the steps that only decode."""
    pairs = list(pairwise(steps))
    mixed = [(a, b) for a, b in pairs if b.num_requests == num_beside + 1]
    return mixed, [b.end_s - a.end_s for a, b in pairs if b.num_requests == b.num_tokens == num_beside]


def _chunks(num_tokens: int, size: int) -> Iterator[StepPart]:
    """Yield the parts of a prefill in steps of at most `size`: new tokens, and tokens before them."""
    for num_before in range(0, num_tokens, size):
        yield min(size, num_tokens - num_before), num_before
