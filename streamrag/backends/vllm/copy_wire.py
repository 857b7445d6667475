"""Messages between the scheduler's process and the workers: copies to make, and reports of them."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class HostCopies(KVConnectorMetadata):
    """The copies of one step, in whole KV blocks. Saves precede loads; no slot is in two copies."""

    saves: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot) of blocks that this step may overwrite: copied before its forward."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, device block): copied before this step's forward reads them."""
    held_saves: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host slot) of blocks that this step only reads: copied before the next step's forward."""


@dataclass(slots=True)
class CopyReport(KVConnectorWorkerMetadata):
    """The outcome of the copies of a step on one worker, or on all workers."""

    saved: list[int] = field(default_factory=list)  # slots that any later step may load
    failed: list[int] = field(default_factory=list)  # slots whose save failed on a worker
    num_blocks_out: int = 0
    num_blocks_in: int = 0
    """Blocks whose copies have ended, measured by `out_s` and `in_s`. On CUDA they may be of earlier steps."""
    num_bytes_out: int = 0
    num_bytes_in: int = 0  # bytes of the same blocks, over all workers
    out_s: float = 0.0
    in_s: float = 0.0  # measured durations, of the slowest worker
    num_slots: int | None = None  # number of slots, if fewer than the scheduler expects

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReport":
        """Merge the reports of two workers that made the same copies: a slot is saved only if both saved it, blocks and
        seconds are those of the larger, bytes are the sum, and the number of slots is the smaller."""
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
