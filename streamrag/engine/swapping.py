"""What becomes of a victim's KV, and how it comes back: recomputed, or copied to host memory and back.

    evict    drop │ save what is overwritten      by what each would cost, the way back included
    resume   recompute │ load                     anew: of what is there now, and with the queue of copies as it is now

Two ways that always do the same, and one that compares costs, share one interface.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol, TypeAlias

from streamrag.engine.copies import CopyCosts
from streamrag.engine.costs import DEFAULT_BUDGET, Part, StepProfile, recompute_s
from streamrag.engine.planning import Fate
from streamrag.errors import ConfigurationError

__all__ = ["DROPPED", "Comparison", "CostChoice", "EvictionMode", "SwapAlways", "SwapChoice", "make_swap_choice"]

EvictionMode: TypeAlias = Literal["recompute", "swap", "cost"]

WEIGHT = 0.1
"""Of the newest observation in a running mean."""
NUM_NEWEST = 9
"""Observations that correct a profile."""
WRITE_THROUGH_BELOW = 0.3
"""Share of the KV blocks that is free, from which on evictions are near enough to copy ahead of them."""
MOST_WRITTEN_THROUGH = 1_024
"""Blocks in one step."""
UNNOTICED = 0.03
"""Saving blocks at the last moment holds nobody up if it takes less than this share of computing as many."""
FEWEST_TOKENS = 64
"""Shorter steps say more about what a step costs than about what a token does."""
RUN = 64
"""Blocks of a copy that is long enough for its latency not to matter."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways to have the KV of some tokens again, and what they were expected to take."""

    choice: Fate
    recompute_s: float
    swap_s: float
    hidden_s: float = 0.0
    """Of `swap_s`, what is expected to run beside other work. The choice does not count it."""

    @property
    def predicted_s(self) -> float:
        """Of what was chosen."""
        return self.swap_s if self.choice == "swap" else self.recompute_s


DROPPED = Comparison("recompute", 0.0, 0.0)
"""Where there is no choice."""


class SwapChoice(Protocol):
    """Decides between recomputing and copying. Block counts are of whole blocks, times on the engine's clock."""

    @property
    def is_overlapped(self) -> bool:
        """Whether copies run beside the computation."""

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        """For a victim whose first `num_blocks` blocks are computed, of which `num_unsaved` are not in host memory."""

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        """For a request whose blocks [start, start + num_blocks) are in host memory."""

    def recompute_s(self, start: int, num_blocks: int) -> float:
        """What computing blocks [start, start + num_blocks) of a request adds to steps."""

    def save_s(self, num_blocks: int) -> float:
        """What copying so many blocks to host memory takes, in one go."""

    def share(self, parts: Sequence[Part], index: int, num_tokens: int) -> float:
        """Of a step with these parts, the share of its time that the first `num_tokens` tokens of one of them add."""

    def num_to_write_through(self, share_free: float) -> int:
        """Blocks to be copied ahead of their eviction, beside a step that computes. `share_free` is that of the KV."""

    def sends(self, num_out: int, num_in: int, now_s: float) -> None:
        """Told of each step's copies."""

    def observe_step(
        self, parts: Sequence[Part], duration_s: float, copies_s: float, *, is_held_up: bool = False
    ) -> None:
        """Told what a step has computed, how long it took, and its copies, for which it may have had to wait."""

    def observe_copies(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Told how long copies took."""

    def observe_chunk(self, num_computed: int, num_valid: int) -> None:
        """Told of each chunk that found computed tokens, and of how many the KV is still true."""


@dataclass(slots=True)
class _Scale:
    """How many times longer things take than the profile says: the median of the last few.

    Not a mean: the first copies into memory that was never written take several times as long as all later ones, and
    a machine that is shared becomes faster or slower from one moment to the next.
    """

    value: float = 1.0
    _newest: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=NUM_NEWEST))

    def observe(self, ratio: float) -> None:
        self._newest.append(ratio)
        self.value = median(self._newest)


class SwapAlways:
    """Saves and loads whatever can be."""

    is_overlapped = True  # that is, the time of a step is taken as it is

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        return Comparison("swap", 0.0, 0.0)

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        return Comparison("swap", 0.0, 0.0)

    def recompute_s(self, start: int, num_blocks: int) -> float:
        return 0.0

    def save_s(self, num_blocks: int) -> float:
        return 0.0

    def share(self, parts: Sequence[Part], index: int, num_tokens: int) -> float:
        return num_tokens / sum(num_new for num_new, _ in parts)

    def num_to_write_through(self, share_free: float) -> int:
        return 0

    def sends(self, num_out: int, num_in: int, now_s: float) -> None: ...

    def observe_step(
        self, parts: Sequence[Part], duration_s: float, copies_s: float, *, is_held_up: bool = False
    ) -> None: ...

    def observe_copies(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None: ...

    def observe_chunk(self, num_computed: int, num_valid: int) -> None: ...


class CostChoice:
    """Whatever takes less time, by a profile that is corrected by what steps and copies really take.

    A victim's KV is worth the recomputation that it saves, times the share of it that is likely to be true still when
    it comes back: updates invalidate some. Copies wait for those before them.
    """

    def __init__(self, profile: StepProfile, copies: CopyCosts, block_size: int, budget: int = DEFAULT_BUDGET) -> None:
        self.profile = profile
        self._budget = budget
        self._copies = copies
        self._block_size = block_size
        self._share_valid = 1.0
        self._compute_scale, self._out_scale, self._in_scale = _Scale(), _Scale(), _Scale()
        self._step_s = self._mean_step_s = 0.0
        """Of the last step that computed."""
        self._out_free_s = self._in_free_s = 0.0
        """When the copies that were sent are expected to be done."""

    @property
    def is_overlapped(self) -> bool:
        return self._copies.is_overlapped

    def evict(self, num_blocks: int, num_unsaved: int, now_s: float) -> Comparison:
        wait_s = max(self._out_free_s - now_s, 0.0)
        save_s = self.save_s(num_unsaved) + (wait_s if num_unsaved else 0.0)
        load_s = self._share_valid * self._in_s(num_blocks)
        return self._cheaper(self._share_valid * self.recompute_s(0, num_blocks), save_s + load_s, load_s)

    def resume(self, start: int, num_blocks: int, now_s: float) -> Comparison:
        wait_s = max(self._in_free_s - now_s, 0.0)
        load_s = wait_s + self._in_s(num_blocks)
        return self._cheaper(self.recompute_s(start, num_blocks), load_s, load_s)

    def recompute_s(self, start: int, num_blocks: int) -> float:
        size = self._block_size
        end = (start + num_blocks) * size
        return self._compute_scale.value * recompute_s(self.profile, start * size, end, self._budget)

    def save_s(self, num_blocks: int) -> float:
        return self._out_scale.value * self._copies.out_s(num_blocks)

    def share(self, parts: Sequence[Part], index: int, num_tokens: int) -> float:
        num_new, num_before = parts[index]
        rest = [(num_new - num_tokens, num_before + num_tokens)] if num_tokens < num_new else []
        # A step of its own would have computed one token after them in any case.
        without = [*parts[:index], *parts[index + 1 :], *rest] or [(1, num_before + num_tokens)]
        whole_s = self.profile.step_s(parts)
        return max(whole_s - self.profile.step_s(without), 0.0) / whole_s

    def num_to_write_through(self, share_free: float) -> int:
        if not self._copies.is_overlapped or share_free > WRITE_THROUGH_BELOW:
            return 0
        compute_s, save_s = self.recompute_s(0, RUN), self.save_s(RUN)
        if compute_s < self._in_s(RUN) or save_s < UNNOTICED * compute_s:
            return 0
        return min(int(self._step_s / save_s * RUN), MOST_WRITTEN_THROUGH)

    def sends(self, num_out: int, num_in: int, now_s: float) -> None:
        if num_out:
            self._out_free_s = max(self._out_free_s, now_s) + self.save_s(num_out)
        if num_in:
            self._in_free_s = max(self._in_free_s, now_s) + self._in_s(num_in)

    def observe_step(
        self, parts: Sequence[Part], duration_s: float, copies_s: float, *, is_held_up: bool = False
    ) -> None:
        if not self._copies.is_overlapped:
            duration_s -= copies_s
        elif is_held_up:
            return  # for how long is not known
        self._step_s = duration_s
        self._mean_step_s = _moved(self._mean_step_s, duration_s)
        if sum(num_new for num_new, _ in parts) >= FEWEST_TOKENS:
            self._compute_scale.observe(duration_s / self.profile.step_s(parts))

    def observe_copies(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        if num_out:
            self._out_scale.observe(out_s / self._copies.out_s(num_out))
        if num_in:
            self._in_scale.observe(in_s / self._copies.in_s(num_in))

    def observe_chunk(self, num_computed: int, num_valid: int) -> None:
        self._share_valid = _moved(self._share_valid, num_valid / num_computed)

    def _cheaper(self, recompute_s: float, swap_s: float, load_s: float) -> Comparison:
        """Loads run beside what their step computes: for so long they hold up nobody."""
        hidden_s = min(load_s, self._mean_step_s) if self._copies.is_overlapped else 0.0
        return Comparison("swap" if swap_s - hidden_s < recompute_s else "recompute", recompute_s, swap_s, hidden_s)

    def _in_s(self, num_blocks: int) -> float:
        return self._in_scale.value * self._copies.in_s(num_blocks)


def make_swap_choice(
    mode: EvictionMode, profile: StepProfile, block_size: int, budget: int = DEFAULT_BUDGET
) -> SwapChoice:
    """Of an engine with blocks of `block_size` tokens and steps of `budget` tokens.

    :raises ConfigurationError: costs are to be compared, but the profile does not know what copies take."""
    if mode == "swap":
        return SwapAlways()
    if profile.copies is None:
        raise ConfigurationError(
            f"eviction='cost' needs to know what copies take, which profile {profile.name!r} does not say; "
            "make one with:  streamrag profile --model MODEL"
        )
    return CostChoice(profile, profile.copies, block_size, budget)


def _moved(mean: float, newest: float) -> float:
    return (1 - WEIGHT) * mean + WEIGHT * newest
