"""Choose between recomputing evicted KV and copying it to host memory and back.

    evict    drop │ save the blocks that are overwritten     by expected cost, the way back included
    resume   recompute │ load                                decided again, by what is present and the copy queue now

`SwapAlways` always copies; `CostChoice` compares costs.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from streamrag.engine.costs.price import Price

Fate: TypeAlias = Literal["recompute", "swap"]
"""Whether a victim's KV is dropped, or copied to host memory."""
FATES: tuple[Fate, ...] = get_args(Fate)

EvictionMode: TypeAlias = Literal[Fate, "cost"]
"""A fixed fate, or "cost" to choose the cheaper one for each victim."""
EVICTIONS: tuple[EvictionMode, ...] = get_args(EvictionMode)

WRITE_THROUGH_BELOW = 0.3
"""Share of free KV blocks below which evictions are so near that blocks are copied ahead of them."""
MOST_WRITTEN_THROUGH = 1_024
"""Most blocks that are written through in one step."""
UNNOTICED = 0.03
"""Saving at eviction time delays no request noticeably if it takes less than this share of computing as many blocks."""
RUN = 64
"""Blocks of a copy that is long enough for its latency not to matter."""


@dataclass(frozen=True, slots=True)
class CostComparison:
    """A choice between two ways to restore KV, and the seconds that each was expected to take."""

    choice: Fate
    recompute_s: float
    swap_s: float


DROPPED = CostComparison("recompute", 0.0, 0.0)
"""The comparison where KV can only be recomputed."""


class SwapAlways:
    """A policy that saves and loads every block it can. Times are on the engine's clock."""

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> CostComparison:
        """Choose for a victim with `num_blocks` computed blocks, `num_unsaved` of which are not in host memory."""
        return CostComparison("swap", 0.0, 0.0)

    def resume(self, start: int, num_blocks: int, now_s: float) -> CostComparison:
        """Choose for a request whose blocks [start, start + num_blocks) are in host memory."""
        return CostComparison("swap", 0.0, 0.0)

    def num_to_write_through(self, share_free: float) -> int:
        """Return how many blocks to copy ahead of evictions in this step, where `share_free` of the KV is free."""
        return 0


class CostChoice:
    """A policy that takes whatever takes less time.

    A victim's KV saves its recomputation only if it is still valid when the victim resumes, because updates invalidate
    some of it; `Price.share_valid` is that share. Copies wait for the copies before them.
    """

    def __init__(self, price: Price) -> None:
        self.price = price

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> CostComparison:
        """Compare recomputing the share that stays valid with saving `num_unsaved` (and its wait) and loading that."""
        price = self.price
        save_s = price.save_s(num_unsaved) + (price.wait_to_save_s(now_s) if num_unsaved else 0.0)
        load_s = price.share_valid * price.load_s(num_blocks)
        return self._cheaper(price.share_valid * price.recompute_s(0, num_blocks), save_s + load_s, load_s)

    def resume(self, start: int, num_blocks: int, now_s: float) -> CostComparison:
        load_s = self.price.wait_to_load_s(now_s) + self.price.load_s(num_blocks)
        return self._cheaper(self.price.recompute_s(start, num_blocks), load_s, load_s)

    def num_to_write_through(self, share_free: float) -> int:
        """Return how many blocks are saved in a step's time; 0 unless KV is short and copies overlap and pay off."""
        price = self.price
        if not price.is_overlapped or share_free > WRITE_THROUGH_BELOW:
            return 0
        compute_s, save_s = price.recompute_s(0, RUN), price.save_s(RUN)
        if compute_s < price.load_s(RUN) or save_s < UNNOTICED * compute_s:
            return 0
        return min(int(price.step_s / save_s * RUN), MOST_WRITTEN_THROUGH)

    def _cheaper(self, recompute_s: float, swap_s: float, load_s: float) -> CostComparison:
        """Compare, leaving out the part of `load_s` that is hidden behind the computation of the step."""
        hidden_s = min(load_s, self.price.mean_step_s) if self.price.is_overlapped else 0.0
        return CostComparison("swap" if swap_s - hidden_s < recompute_s else "recompute", recompute_s, swap_s)


SwapChoice: TypeAlias = SwapAlways | CostChoice
"""A policy that decides between recomputing and copying."""
