"""What streaming costs the scheduler: time per step, stock and ours, and time of one update.

    python experiments/engine_step.py

vLLM's real scheduler and KV cache manager, no model. Each figure is the median over the steps of a run.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.hooks import StreamingScheduler

NUM_PROMPT_TOKENS = 7_000
BLOCK_SIZE = 16
NUM_BLOCKS = 250_000


def engine(
    num_seqs: int, make: Callable[..., Any], policy: str = "fcfs", num_blocks: int = NUM_BLOCKS, **options: Any
) -> SimulatedEngine:
    streamrag = {"policy": policy, **options}
    shape = EngineShape(num_blocks, BLOCK_SIZE, max_model_len=32_768, max_num_seqs=num_seqs, streamrag=streamrag)
    return SimulatedEngine(shape, BlindRunner(), always(0.05), make)


def prompt(rng: random.Random, num: int = NUM_PROMPT_TOKENS) -> list[int]:
    return rng.choices(range(1_000), k=num)


@contextmanager
def timed(
    owner: Any, name: str, times_s: list[float], clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Note how long each call of a method of `owner` takes."""
    method = getattr(owner, name)

    def wrapper(*arguments: Any) -> Any:
        start_s = clock()
        result = method(*arguments)
        times_s.append(clock() - start_s)
        return result

    setattr(owner, name, wrapper)
    yield
    delattr(owner, name)


@contextmanager
def no_collections() -> Iterator[None]:
    """What is there is not looked at for garbage, as in `EngineCore`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def step_times(engine: SimulatedEngine, num_steps: int) -> tuple[float, float]:
    """Median milliseconds of `schedule` and of `update_from_output`."""
    schedule_s: list[float] = []
    update_s: list[float] = []
    scheduler = engine.scheduler
    with no_collections(), timed(scheduler, "schedule", schedule_s), timed(scheduler, "update_from_output", update_s):
        for _ in range(num_steps):
            engine.step()
    return statistics.median(schedule_s) * 1e3, statistics.median(update_s) * 1e3


def decode(made: SimulatedEngine, num: int, chunk: PromptMessage | None = None) -> None:
    """So many requests decode."""
    rng = random.Random(0)
    for i in range(num):
        made.add(f"d{i}", prompt(rng, 200), SamplingParams(max_tokens=500), chunk)
    while any(not made.scheduler.requests[f"d{i}"].num_output_tokens for i in range(num)):
        made.step()


def prefill(made: SimulatedEngine, num: int) -> None:
    """All wait for their prefill, a budget after another."""
    rng = random.Random(0)
    for i in range(num):
        made.add(f"p{i}", prompt(rng, 1_000 if num > 100 else NUM_PROMPT_TOKENS), SamplingParams(max_tokens=500))


def half_and_half(made: SimulatedEngine, num: int) -> None:
    """Half decode, half wait for their prefill."""
    decode(made, num // 2)
    rng = random.Random(0)
    for i in range(num - num // 2):
        made.add(f"p{i}", prompt(rng, NUM_PROMPT_TOKENS), SamplingParams(max_tokens=500))


def loaded(
    load: Callable[[SimulatedEngine, int], None],
    num: int,
    make: Callable[..., Any],
    policy: str = "fcfs",
    **options: Any,
) -> SimulatedEngine:
    made = engine(num, make, policy, **options)
    load(made, num)
    return made


def short_of_memory(num: int, policy: str) -> tuple[float, float]:
    """Streams in all states, memory for a third of them."""
    made = engine(num, StreamingScheduler, policy, num_blocks=max(num * 63 // 3, 2_100))
    rng = random.Random(0)
    for i in range(num):
        made.add(f"s{i}", prompt(rng, 1_000), SamplingParams(max_tokens=500), PromptMessage(0, 0, i % 3 == 0))
    return step_times(made, 100)


def update_time(num_shared: int, num_kept: int) -> float:
    """Milliseconds to replace the prompt of a stream of 7,000 tokens that share the first `num_shared`."""
    made = engine(64, StreamingScheduler)
    rng = random.Random(0)
    first = prompt(rng)
    times_s = []
    for i in range(30):
        made.add(f"s{i}", first, SamplingParams(max_tokens=1), PromptMessage(0, 0, False))
        while made.has_work:
            made.step()
        second = first[:num_shared] + prompt(rng, NUM_PROMPT_TOKENS - num_shared)
        add_s: list[float] = []
        with timed(made.scheduler, "add_request", add_s):
            made.add(f"s{i}", second[num_kept:], SamplingParams(max_tokens=1), PromptMessage(1, num_kept, False))
        times_s += add_s
        made.abort(f"s{i}")
        made.step()
    return statistics.median(times_s) * 1e3


def main() -> None:
    print(f"{'ms per step, median':<34}{'stock schedule':>15}{'ours':>9}{'more':>8}{'stock update':>14}{'ours':>9}")
    for name, load in (("decode", decode), ("prefill", prefill), ("half and half", half_and_half)):
        for num in (50, 500):
            stock, stock_update = step_times(loaded(load, num, Scheduler), 60)
            ours, our_update = step_times(loaded(load, num, StreamingScheduler), 60)
            label = f"{name}, {num} requests"
            print(f"{label:<34}{stock:>15.3f}{ours:>9.3f}{ours - stock:>8.3f}{stock_update:>14.3f}{our_update:>9.3f}")
    for policy in ("srpf", "mcps", "k_lpm(4)"):
        ours, our_update = step_times(loaded(half_and_half, 500, StreamingScheduler, policy), 60)
        print(f"{f'half and half, 500, {policy}':<34}{'':>15}{ours:>9.3f}{'':>8}{'':>14}{our_update:>9.3f}")
    for num in (50, 500):
        ours, our_update = short_of_memory(num, "fcfs")
        print(f"{f'short of memory, {num} streams':<34}{'':>15}{ours:>9.3f}{'':>8}{'':>14}{our_update:>9.3f}")
    print()
    for num_shared, num_kept in ((6_500, 6_500), (3_500, 3_500), (3_500, 0), (0, 0)):
        label = f"update of 7,000 tokens, {num_shared} shared, {num_kept} not sent"
        print(f"{label:<58}{update_time(num_shared, num_kept):>9.3f} ms")


if __name__ == "__main__":
    main()
