"""A worker's side of host memory: copies whole KV blocks out of the cache and back into it.

    cache   per layer [num_blocks, bytes of a block]     on the device
    pool    per layer [num_slots,  bytes of a block]     one allocation in host memory, pinned if the device is a GPU

A failure here fails no request: failed saves and loads are reported, and their tokens are computed again.
"""

import importlib
import logging
from collections.abc import Mapping
from contextlib import suppress

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from streamrag.backends.vllm.copy_wire import CopyReport, HostCopies
from streamrag.backends.vllm.worker.device_copies import CpuCopies, CudaCopies, Layer, Pairs
from streamrag.errors import ConfigurationError

logger = logging.getLogger(__name__)


class HostCopier:
    """Makes the `HostCopies` of each step. Call `save`, then `load`, `wait_for_layer` for each layer, `end_step`.

    `num_slots` is the number that the scheduler expects, `num_blocks` the number of blocks in the cache.
    """

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = 0  # bytes of a block, over all layers
        self._num_blocks = num_blocks
        self._num_slots_promised = num_slots
        self._copies: CpuCopies | CudaCopies | None = None
        self._report = CopyReport()
        self._failed_loads: set[int] = set()

    def has_slot(self, slot: int, *, is_load: bool) -> bool:
        """Whether a slot exists: there may be fewer than the scheduler expects."""
        return slot < self.num_slots

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Make the pool and the copies for the KV of each layer, once where layers share one, and set `block_bytes`. If
        host memory is short, lower `num_slots`, even to 0, and log a warning. vLLM calls this method once.

        :raises ConfigurationError: the bytes of a block are not contiguous.
        """
        first_at: dict[int, str] = {}
        for name, cache in caches.items():
            first_at.setdefault(cache.data_ptr(), name)
        rows = {name: _rows(name, caches[name], self._num_blocks) for name in first_at.values()}
        self.block_bytes = sum(cache.shape[1] for cache in rows.values())
        is_cuda = any(cache.is_cuda for cache in rows.values())
        pool = self._make_pool(is_pinned=is_cuda)
        layers: dict[str, Layer] = {}
        start = 0
        for name, cache in rows.items():
            end = start + self.num_slots * cache.shape[1]
            layers[name] = Layer(cache, pool[start:end].view(self.num_slots, cache.shape[1]))
            start = end
        self._copies = CudaCopies(layers) if is_cuda else CpuCopies(layers)

    def _make_pool(self, *, is_pinned: bool) -> torch.Tensor:
        """Return host memory for `num_slots` blocks. While that fails, halve `num_slots`, even to 0; then warn once."""
        reason = None
        while True:
            try:
                pool = _host_memory(self.num_slots * self.block_bytes, is_pinned=is_pinned)
                break
            except (RuntimeError, MemoryError) as error:
                reason = error
                self.num_slots //= 2
        if reason:
            logger.warning(
                "Host memory has room for %d KV blocks of %d bytes instead of %d; lower host_kv_bytes: %s",
                self.num_slots,
                self.block_bytes,
                self._num_slots_promised,
                reason,
            )
        return pool

    def save(self, copies: HostCopies) -> None:
        """Save the blocks that the step may overwrite, then the held ones. Failures are reported, not raised."""
        if self._copies is not None:
            self._copies.start_step()
        if copies.saves:
            self._save(copies.saves, is_held=False)
        if copies.held_saves:
            self._save(copies.held_saves, is_held=True)

    def _save(self, pairs: Pairs, *, is_held: bool) -> None:
        """Save blocks whose slots exist. Report each slot as saved or failed; an error is logged, and fails all."""
        good = [(block, slot) for block, slot in pairs if self.has_slot(slot, is_load=False)]
        try:
            if good:
                assert self._copies is not None
                self._copies.save(good, is_held=is_held)
        except Exception:  # any failure: the request does not depend on the copy
            logger.exception("%d KV blocks were not saved to host memory", len(good))
            good = []
        saved = {slot for _, slot in good}
        self._report.saved += [slot for _, slot in pairs if slot in saved]
        self._report.failed += [slot for _, slot in pairs if slot not in saved]

    def load(self, copies: HostCopies, *, by_layer: bool) -> None:
        """Load blocks before the forward, which waits per layer if `by_layer`. An error is logged, and fails all; the
        failed blocks, and those without a slot, are for `take_failed_loads`."""
        good = [(slot, block) for slot, block in copies.loads if self.has_slot(slot, is_load=True)]
        try:
            if good:
                assert self._copies is not None
                self._copies.load(good, by_layer=by_layer)
        except Exception:  # any failure: the tokens are recomputed
            logger.exception("%d KV blocks were not loaded from host memory", len(good))
            good = []
        self._failed_loads |= {block for _, block in copies.loads} - {block for _, block in good}

    def wait_for_layer(self, name: str) -> None:
        if self._copies is not None:
            self._copies.wait_for_layer(name)

    def end_step(self) -> None:
        """Have the next step wait for loads. Called after the forward."""
        if self._copies is not None:
            self._copies.end_step()

    def take_failed_loads(self) -> set[int]:
        """Return and reset the device blocks whose loads failed."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_report(self) -> CopyReport | None:
        """Return and reset the report, with the times of ended copies, and `num_slots` if that was reduced.

        None if no save was made or failed, and no copy has ended.
        """
        report, self._report = self._report, CopyReport()
        if self._copies is not None:
            out, into = self._copies.take_measured()
            report.num_blocks_out, report.out_s = out
            report.num_blocks_in, report.in_s = into
            report.num_bytes_out = out.num_blocks * self.block_bytes
            report.num_bytes_in = into.num_blocks * self.block_bytes
        if report == CopyReport():
            return None
        if self.num_slots < self._num_slots_promised:
            report.num_slots = self.num_slots
        return report

    def close(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()


def _rows(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a layer's KV as bytes, one row per block. The KV is [blocks, heads, tokens, content], in any stride order.

    A block may be several blocks of the attention kernel. Raises ConfigurationError if its bytes are not contiguous.
    """
    blocks = group_kernel_blocks(cache, num_blocks)
    size = blocks[0].numel()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    if not blocks.stride(0) == extent == size:
        raise ConfigurationError(
            f"KV in host memory needs the bytes of a block to be contiguous, but {name} has {tuple(cache.shape)} "
            f"with strides {cache.stride()}; set VLLM_KV_CACHE_LAYOUT=LBNHC, or eviction='recompute'"
        )
    return blocks.as_strided((num_blocks, size), (size, 1)).view(torch.uint8)


def _host_memory(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Allocate host memory, pinned if `is_pinned`. Raise MemoryError if less is available, RuntimeError on failure."""
    available = importlib.import_module("psutil").virtual_memory().available
    if num_bytes > available:
        raise MemoryError(f"{num_bytes:,} bytes of {available:,} available")
    memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if is_pinned and num_bytes:
        _pin(memory)
    return memory


def _pin(memory: torch.Tensor) -> None:
    """Pin host memory for copies; if CUDA cannot, raise RuntimeError, and clear the error that CUDA would repeat."""
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    try:
        pin_tensor(memory)
    except RuntimeError:
        with suppress(RuntimeError):  # CUDA reports the error once more, at the next kernel: let it be this one
            torch.zeros(1, device="cuda").add_(1)
        raise
