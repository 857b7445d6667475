"""What recomputing KV blocks takes, and what copying them takes: a profile, corrected by what is observed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from streamrag.engine.costs.step_profiles import DEFAULT_BUDGET, Part, StepProfile, recompute_s
from streamrag.errors import ConfigurationError

WEIGHT = 0.1
"""Weight of the newest observation in a running mean."""
NUM_NEWEST = 9
"""Observations that correct a profile."""
FEWEST_TOKENS = 64
"""Shorter steps say more about what a step costs than about what a token does."""


@dataclass(slots=True)
class _Scale:
    """The factor by which steps or copies take longer than the profile says: the median of the last few.

    Not a mean: the first copies into memory that was never written take several times as long as all later ones, and
    a machine that is shared becomes faster or slower from one moment to the next.
    """

    value: float = 1.0
    _newest: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=NUM_NEWEST))

    def observe(self, ratio: float) -> None:
        self._newest.append(ratio)
        self.value = median(self._newest)


class Price:
    """The choice for an engine with blocks of `block_size` tokens and steps of `budget` tokens. Times are on the
    engine's clock.

    :raises ConfigurationError: the profile does not know what copies take.
    """

    def __init__(self, profile: StepProfile, block_size: int, budget: int = DEFAULT_BUDGET) -> None:
        if profile.copies is None:
            raise ConfigurationError(
                f"eviction='cost' needs to know what copies take, which profile {profile.name!r} does not say; "
                "make one with:  streamrag profile --model MODEL"
            )
        self.profile = profile
        self.is_overlapped = profile.copies.is_overlapped
        """Whether copies run beside the computation."""
        self.share_valid = 1.0
        """Share of the computed tokens that chunks find whose KV is still valid afterwards."""
        self.step_s = self.mean_step_s = 0.0
        """Seconds of the last step that computed, and of steps on average."""
        self._copies = profile.copies
        self._block_size = block_size
        self._budget = budget
        self._compute_scale, self._out_scale, self._in_scale = _Scale(), _Scale(), _Scale()
        self._out_free_s = self._in_free_s = 0.0
        """When the copies that were sent are expected to be done."""

    # ------------------------------------------------------------------------------------------------ what is asked

    def recompute_s(self, start: int, num_blocks: int) -> float:
        """Return the seconds that computing blocks [start, start + num_blocks) of a request adds to steps."""
        size = self._block_size
        end = (start + num_blocks) * size
        return self._compute_scale.value * recompute_s(self.profile, start * size, end, self._budget)

    def save_s(self, num_blocks: int) -> float:
        """Return the seconds of copying `num_blocks` blocks to host memory in one go."""
        return self._out_scale.value * self._copies.out_s(num_blocks)

    def load_s(self, num_blocks: int) -> float:
        """Return the seconds of copying `num_blocks` blocks back from host memory."""
        return self._in_scale.value * self._copies.in_s(num_blocks)

    def wait_to_save_s(self, now_s: float) -> float:
        """For the copies out that were sent before."""
        return max(self._out_free_s - now_s, 0.0)

    def wait_to_load_s(self, now_s: float) -> float:
        return max(self._in_free_s - now_s, 0.0)

    def share(self, parts: Sequence[Part], index: int, num_tokens: int) -> float:
        """Share of the time of a step with these parts that the first `num_tokens` tokens of part `index` add."""
        num_new, num_before = parts[index]
        rest = [(num_new - num_tokens, num_before + num_tokens)] if num_tokens < num_new else []
        # A step of its own would have computed one token after them in any case.
        without = [*parts[:index], *parts[index + 1 :], *rest] or [(1, num_before + num_tokens)]
        whole_s = self.profile.step_s(parts)
        return max(whole_s - self.profile.step_s(without), 0.0) / whole_s

    # --------------------------------------------------------------------------------------------- what is observed

    def observe_sent(self, num_out: int, num_in: int, now_s: float) -> None:
        """Blocks of each step that are to be copied."""
        if num_out:
            self._out_free_s = max(self._out_free_s, now_s) + self.save_s(num_out)
        if num_in:
            self._in_free_s = max(self._in_free_s, now_s) + self.load_s(num_in)

    def observe_step(
        self, parts: Sequence[Part], duration_s: float, copies_s: float, *, is_held_up: bool = False
    ) -> None:
        """Learn from a step: the parts that it computed, its duration, and its copies, which may have held it up."""
        if not self.is_overlapped:
            duration_s -= copies_s
        elif is_held_up:
            return  # for how long is not known
        self.step_s = duration_s
        self.mean_step_s = _moved(self.mean_step_s, duration_s)
        if sum(num_new for num_new, _ in parts) >= FEWEST_TOKENS:
            self._compute_scale.observe(duration_s / self.profile.step_s(parts))

    def observe_copies(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Learn from the seconds that copies of these numbers of blocks took, out and in."""
        if num_out:
            self._out_scale.observe(out_s / self._copies.out_s(num_out))
        if num_in:
            self._in_scale.observe(in_s / self._copies.in_s(num_in))

    def observe_chunk(self, num_computed: int, num_valid: int) -> None:
        """Each chunk that found computed tokens, and of how many the KV is still true."""
        self.share_valid = _moved(self.share_valid, num_valid / num_computed)


def _moved(mean: float, newest: float) -> float:
    return (1 - WEIGHT) * mean + WEIGHT * newest
