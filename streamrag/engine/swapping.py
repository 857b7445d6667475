"""What becomes of a victim's KV, and how it comes back: recomputed, or copied to host memory and back.

    evict    drop │ save what is overwritten      by what each would cost, the way back included
    resume   recompute │ load                     anew: of what is there now, and with the queue of copies as it is now

One way that always copies, and one that compares prices.
"""

from dataclasses import dataclass
from typing import Protocol

from streamrag.engine.costs.price import Price
from streamrag.engine.eviction import Fate

WRITE_THROUGH_BELOW = 0.3
"""Share of the KV blocks that is free, from which on evictions are near enough to copy ahead of them."""
MOST_WRITTEN_THROUGH = 1_024
"""Blocks that are written through in one step, at most."""
UNNOTICED = 0.03
"""Saving blocks at the last moment holds nobody up if it takes less than this share of computing as many."""
RUN = 64
"""Blocks of a copy that is long enough for its latency not to matter."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways to have the KV of some tokens again, and what they were expected to take."""

    choice: Fate
    recompute_s: float
    swap_s: float


DROPPED = Comparison("recompute", 0.0, 0.0)
"""The comparison where KV can only be recomputed."""


class SwapChoice(Protocol):
    """Decides between recomputing and copying. Block counts are of whole blocks, times on the engine's clock."""

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        """For a victim whose first `num_blocks` blocks are computed, of which `num_unsaved` are not in host memory."""

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        """For a request whose blocks [start, start + num_blocks) are in host memory."""

    def num_to_write_through(self, share_free: float) -> int:
        """Blocks to be copied ahead of their eviction, beside a step that computes. `share_free` is that of the KV."""


class SwapAlways:
    """Saves and loads whatever can be."""

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        return Comparison("swap", 0.0, 0.0)

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        return Comparison("swap", 0.0, 0.0)

    def num_to_write_through(self, share_free: float) -> int:
        return 0


class CostChoice:
    """Whatever takes less time.

    A victim's KV is worth the recomputation that it saves, times the share of it that is likely to be true still when
    it comes back: updates invalidate some. Copies wait for those before them.
    """

    def __init__(self, price: Price) -> None:
        self.price = price

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        price = self.price
        save_s = price.save_s(num_unsaved) + (price.wait_to_save_s(now_s) if num_unsaved else 0.0)
        load_s = price.share_valid * price.load_s(num_blocks)
        return self._cheaper(price.share_valid * price.recompute_s(0, num_blocks), save_s + load_s, load_s)

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        load_s = self.price.wait_to_load_s(now_s) + self.price.load_s(num_blocks)
        return self._cheaper(self.price.recompute_s(start, num_blocks), load_s, load_s)

    def num_to_write_through(self, share_free: float) -> int:
        price = self.price
        if not price.is_overlapped or share_free > WRITE_THROUGH_BELOW:
            return 0
        compute_s, save_s = price.recompute_s(0, RUN), price.save_s(RUN)
        if compute_s < price.load_s(RUN) or save_s < UNNOTICED * compute_s:
            return 0
        return min(int(price.step_s / save_s * RUN), MOST_WRITTEN_THROUGH)

    def _cheaper(self, recompute_s: float, swap_s: float, load_s: float) -> Comparison:
        """Loads run beside what their step computes: for so long they hold up nobody."""
        hidden_s = min(load_s, self.price.mean_step_s) if self.price.is_overlapped else 0.0
        return Comparison("swap" if swap_s - hidden_s < recompute_s else "recompute", recompute_s, swap_s)
