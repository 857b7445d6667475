"""Messages between the scheduler's process and the workers: copies to be made, and reports of them."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class HostCopies(KVConnectorMetadata):
    """The copies of one step, in whole KV blocks. Saves come before loads; no slot is in two of them."""

    saves: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot) of blocks that this step may overwrite: done before its forward."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block): done before this step's forward reads them."""
    held_saves: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot) of blocks that this step only reads: done before the next step's forward."""


@dataclass(slots=True)
class CopyReport(KVConnectorWorkerMetadata):
    """Outcome of the copies of a step on one worker, or on all of them."""

    saved: list[int] = field(default_factory=list)
    """Slots that can be loaded by any later step."""
    failed: list[int] = field(default_factory=list)
    """Slots whose save failed on some worker."""
    num_blocks_out: int = 0
    num_blocks_in: int = 0
    """Blocks whose copies `out_s` and `in_s` have measured: those that ended. On CUDA they may be of earlier steps."""
    num_bytes_out: int = 0
    num_bytes_in: int = 0
    """Bytes of the same blocks, over all workers."""
    out_s: float = 0.0
    in_s: float = 0.0
    """Measured, of the slowest worker."""
    num_slots: int | None = None
    """Number of slots, where there are fewer than the scheduler was promised."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReport":
        """Join the reports of two workers that were given the same copies: what one has not saved is not saved."""
        assert isinstance(other, CopyReport)
        saved = set(self.saved) & set(other.saved)
        failed = (set(self.saved) | set(other.saved) | set(self.failed) | set(other.failed)) - saved
        return CopyReport(
            saved=sorted(saved),
            failed=sorted(failed),
            num_blocks_out=max(self.num_blocks_out, other.num_blocks_out),
            num_blocks_in=max(self.num_blocks_in, other.num_blocks_in),
            num_bytes_out=self.num_bytes_out + other.num_bytes_out,
            num_bytes_in=self.num_bytes_in + other.num_bytes_in,
            out_s=max(self.out_s, other.out_s),
            in_s=max(self.in_s, other.in_s),
            num_slots=min((r.num_slots for r in (self, other) if r.num_slots is not None), default=None),
        )
