"""Schedulers with requests, vLLM's real one and its KV cache manager, no model; and how long their calls take."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.sampling_params import SamplingParams

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import PromptMessage

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
