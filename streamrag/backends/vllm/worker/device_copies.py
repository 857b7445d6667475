"""Copies of whole KV blocks between a device and host memory, on a CPU and on CUDA."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

Pairs: TypeAlias = Sequence[tuple[int, int]]  # (from, to) of the blocks to copy


class Layer(NamedTuple):
    """The KV of one layer as bytes: a row per block."""

    cache: torch.Tensor  # [num_blocks, bytes of a block], on the device
    pool: torch.Tensor  # [num_slots, bytes of a block], in host memory


class Measured(NamedTuple):
    """The number of copied blocks in one direction, and the time that their copies took."""

    num_blocks: int = 0
    seconds: float = 0.0

    def plus(self, num_blocks: int, seconds: float) -> "Measured":
        return Measured(self.num_blocks + num_blocks, self.seconds + seconds)


class CpuCopies:
    """Copies immediately, row by row. With torch's thread pool, a copy would wait for other computations."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._rows = [(layer.cache.numpy(), layer.pool.numpy()) for layer in layers.values()]
        self._out = self._in = Measured()

    def start_step(self) -> None: ...

    def save(self, pairs: Pairs, *, is_held: bool) -> None:
        """Copy device blocks to host slots at once, and add their number and the time to the measurements.
        `is_held`, whether requests hold the blocks during the step, makes no difference here."""
        began_s = time.perf_counter()
        for cache, pool in self._rows:
            for block, slot in pairs:
                pool[slot] = cache[block]
        self._out = self._out.plus(len(pairs), time.perf_counter() - began_s)

    def load(self, pairs: Pairs, *, by_layer: bool) -> None:
        """Copy host slots to device blocks at once, and add their number and the time to the measurements."""
        began_s = time.perf_counter()
        for cache, pool in self._rows:
            for slot, block in pairs:
                cache[block] = pool[slot]
        self._in = self._in.plus(len(pairs), time.perf_counter() - began_s)

    def wait_for_layer(self, name: str) -> None: ...

    def end_step(self) -> None: ...

    def take_measured(self) -> tuple[Measured, Measured]:
        """Return and reset the measurements since the last call, out and in."""
        measured = self._out, self._in
        self._out = self._in = Measured()
        return measured

    def close(self) -> None: ...


class CudaCopies:
    """Copies concurrently with the computation, on one CUDA stream per direction.

        compute   step before ─┐     ┌─▶ layer 0 ─▶ layer 1 ─▶ …  ─▶ the next step, which waits for `held`
        out                    ├─ saves ─┬─ held saves ─────────────┘
        in                     │         └─ loads of layer 0, of layer 1, …: each layer waits for its own
                               └─ copies wait for the previous step

    The computation waits for all that precedes it, so waiting for the computation includes those copies.

    vLLM's `swap_blocks` calls `cudaMemcpyAsync` for each block. One `cuMemcpyBatchAsync` for all of them would be
    faster, but drivers of the 580 series crash in it, or at the next allocation (vLLM's issue 49276; seen on an H200).
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        from vllm import _custom_ops

        self._swap_blocks = _custom_ops.swap_blocks
        lowest, _ = torch.cuda.Stream.priority_range()
        self._out, self._in = torch.cuda.Stream(priority=lowest), torch.cuda.Stream(priority=lowest)
        self._layers = layers
        self._held: torch.cuda.Event | None = None
        self._loaded: dict[str, torch.cuda.Event] = {}
        self._timers: deque[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start_step(self) -> None:
        """Forget the last step's loads, and let the computation wait for its held saves."""
        self._loaded.clear()
        if self._held is not None:
            torch.cuda.current_stream().wait_event(self._held)
            self._held = None

    def save(self, pairs: Pairs, *, is_held: bool) -> None:
        """Queue copies of device blocks to host slots, behind the computation so far. Later computation waits for them;
        if they are held, only that of the next step."""
        compute = torch.cuda.current_stream()
        self._out.wait_stream(compute)
        began = _event(self._out)
        mapping = torch.tensor(pairs)
        with torch.cuda.stream(self._out):
            for cache, pool in self._layers.values():
                self._swap_blocks(cache, pool, cache.shape[1], mapping)
        ended = _event(self._out)
        self._timers.append((True, len(pairs), began, ended))
        if is_held:
            self._held = ended
        else:
            compute.wait_event(ended)

    def load(self, pairs: Pairs, *, by_layer: bool) -> None:
        """Queue copies of host slots to device blocks, behind the computation so far. Later computation waits for all
        of them, or if `by_layer` only in `wait_for_layer`."""
        compute = torch.cuda.current_stream()
        self._in.wait_stream(compute)
        began = _event(self._in)
        mapping = torch.tensor(pairs)
        with torch.cuda.stream(self._in):
            for name, (cache, pool) in self._layers.items():
                self._swap_blocks(pool, cache, cache.shape[1], mapping)
                self._loaded[name] = self._in.record_event()
        ended = _event(self._in)
        self._timers.append((False, len(pairs), began, ended))
        if not by_layer:
            compute.wait_event(ended)

    def wait_for_layer(self, name: str) -> None:
        # A layer that shares the KV of another runs after it.
        if name in self._loaded:
            torch.cuda.current_stream().wait_event(self._loaded[name])

    def end_step(self) -> None:
        torch.cuda.current_stream().wait_stream(self._in)  # includes layers that the forward left out

    def take_measured(self) -> tuple[Measured, Measured]:
        """Return and reset blocks and seconds, out and in, of copies that have ended; leave the others."""
        out, into = Measured(), Measured()
        while self._timers and self._timers[0][3].query():
            is_out, num_blocks, began, ended = self._timers.popleft()
            seconds = began.elapsed_time(ended) / 1_000
            if is_out:
                out = out.plus(num_blocks, seconds)
            else:
                into = into.plus(num_blocks, seconds)
        return out, into

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
