"""Measure the time to copy scattered KV blocks to host memory and back, with the copier that engines use."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from streamrag.backends.vllm.copy_wire import HostCopies
from streamrag.backends.vllm.facts import EngineFacts
from streamrag.backends.vllm.worker.host_copier import HostCopier
from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag_bench.profile.curve_fit import fit_copies

NUM_WARM_UPS, NUM_REPEATS = 1, 5
MAX_BYTES_CPU, MAX_BYTES_CUDA = 256 << 20, 2 << 30
"""Maximum bytes per copy; larger copies take proportionally longer."""


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """The seconds of each repetition, by number of blocks."""

    block_bytes: int
    is_overlapped: bool
    out: dict[int, list[float]] = field(default_factory=dict)
    into: dict[int, list[float]] = field(default_factory=dict)

    def costs(self) -> CopyCosts:
        """Fit monotone lines to the times."""
        return CopyCosts(fit_copies(self.out), fit_copies(self.into), self.block_bytes, self.is_overlapped)


def block_counts(facts: EngineFacts) -> list[int]:
    """Return the numbers of blocks to measure: powers of 2, up to the longest prompt or the maximum bytes."""
    max_bytes = MAX_BYTES_CUDA if facts.is_cuda else MAX_BYTES_CPU
    most = max(min(facts.max_model_len // facts.block_size, max_bytes // facts.block_bytes), 2)
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def measure_copies(facts: EngineFacts, progress: Callable[[int], None] = lambda num_blocks: None) -> CopyTimes:
    """Return the times of `NUM_REPEATS` copies out and in for each of `block_counts`, on KV allocated here.

    The KV is one rank's. Blocks and slots are chosen at random, alike at each call. No engine should run meanwhile.

    progress: called with each number of blocks before it is measured.
    """
    counts, rng = block_counts(facts), random.Random(0)
    num_blocks = 2 * counts[-1]
    copier = HostCopier(num_blocks, num_blocks)
    copier.register(dict(_kv(facts, num_blocks)))
    times = CopyTimes(facts.block_bytes, is_overlapped=facts.is_cuda)

    def timed(copy: Callable[[], None]) -> float:
        start_s = time.perf_counter()
        copy()
        copier.end_step()
        if facts.is_cuda:
            torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - start_s
        copier.take_report()
        return elapsed_s

    try:
        whole = HostCopies(saves=[(block, block) for block in range(num_blocks)])
        timed(partial(copier.save, whole))  # the first write maps the memory
        for num in counts:
            progress(num)
            for repeat in range(-NUM_WARM_UPS, NUM_REPEATS):
                blocks, slots = rng.sample(range(num_blocks), num), rng.sample(range(num_blocks), num)
                saves = HostCopies(saves=list(zip(blocks, slots, strict=True)))
                loads = HostCopies(loads=list(zip(slots, blocks, strict=True)))
                out_s = timed(partial(copier.save, saves))
                in_s = timed(partial(copier.load, loads, by_layer=False))
                if repeat >= 0:
                    times.out.setdefault(num, []).append(out_s)
                    times.into.setdefault(num, []).append(in_s)
    finally:
        copier.close()
    return times


def _kv(facts: EngineFacts, num_blocks: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a newly allocated KV tensor of each layer, in the model's shape."""
    shape = (num_blocks, 2, facts.num_kv_heads, facts.block_size, facts.head_dim)
    dtype, device = getattr(torch, facts.kv_dtype), "cuda" if facts.is_cuda else "cpu"
    for layer in range(facts.num_layers):
        yield f"layers.{layer}", torch.ones(shape, dtype=dtype, device=device)
