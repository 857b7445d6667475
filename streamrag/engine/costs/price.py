"""The seconds to recompute or to copy KV blocks: a profile, corrected by observation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from streamrag.engine.costs.step_profiles import DEFAULT_BUDGET, StepPart, StepProfile, recompute_s
from streamrag.errors import ConfigurationError

WEIGHT = 0.1
"""Weight of the newest observation in a running mean."""
NUM_NEWEST = 9
"""Observations in the median that corrects a profile."""
FEWEST_TOKENS = 64
"""Smaller steps do not correct the profile, because their duration is mostly overhead."""


@dataclass(slots=True)
class _Scale:
    """The factor by which steps or copies take longer than the profile says: the median of the last few ratios.

    Not a mean, because the first copies into untouched memory take several times as long as later ones, and the speed
    of a shared machine jumps.
    """

    value: float = 1.0
    _newest: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=NUM_NEWEST))

    def observe(self, ratio: float) -> None:
        self._newest.append(ratio)
        self.value = median(self._newest)


class Price:
    """The expected costs on an engine with blocks of `block_size` tokens and steps of `budget` tokens.

    Times are on the engine's clock.

    :raises ConfigurationError: the profile has no costs of copies.
    """

    def __init__(self, profile: StepProfile, block_size: int, budget: int = DEFAULT_BUDGET) -> None:
        if profile.copies is None:
            raise ConfigurationError(
                f"eviction='cost' needs to know what copies take, which profile {profile.name!r} does not say; "
                "make one with:  streamrag profile --model MODEL"
            )
        self.profile = profile
        self.is_overlapped = profile.copies.is_overlapped
        """Whether copies overlap with the computation."""
        self.share_valid = 1.0
        """Share of a prompt's computed tokens whose KV stays valid when a chunk arrives: a running mean."""
        self.step_s = self.mean_step_s = 0.0
        """Seconds of the last step, and the running mean."""
        self._copies = profile.copies
        self._block_size = block_size
        self._budget = budget
        self._compute_scale, self._out_scale, self._in_scale = _Scale(), _Scale(), _Scale()
        self._out_free_s = self._in_free_s = 0.0
        """When the queues of copies are expected to be empty."""

    def recompute_s(self, start: int, num_blocks: int) -> float:
        """Return the seconds that computing blocks [start, start + num_blocks) of a request adds to steps."""
        size = self._block_size
        end = (start + num_blocks) * size
        return self._compute_scale.value * recompute_s(self.profile, start * size, end, self._budget)

    def save_s(self, num_blocks: int) -> float:
        """Return the seconds to copy `num_blocks` blocks to host memory at once."""
        return self._out_scale.value * self._copies.out_s(num_blocks)

    def load_s(self, num_blocks: int) -> float:
        """Return the seconds to copy `num_blocks` blocks back from host memory."""
        return self._in_scale.value * self._copies.in_s(num_blocks)

    def wait_to_save_s(self, now_s: float) -> float:
        """Return the seconds until the queue of copies out is expected to be empty."""
        return max(self._out_free_s - now_s, 0.0)

    def wait_to_load_s(self, now_s: float) -> float:
        """Return the seconds until the queue of copies in is expected to be empty."""
        return max(self._in_free_s - now_s, 0.0)

    def share_of_step(self, parts: Sequence[StepPart], index: int, num_tokens: int) -> float:
        """Return the share of a step's time, by the profile, that the first `num_tokens` of part `index` add to it."""
        num_new, num_before = parts[index]
        rest = [(num_new - num_tokens, num_before + num_tokens)] if num_tokens < num_new else []
        # Without them the step would still compute the request's next token.
        without = [*parts[:index], *parts[index + 1 :], *rest] or [(1, num_before + num_tokens)]
        whole_s = self.profile.step_s(parts)
        return max(whole_s - self.profile.step_s(without), 0.0) / whole_s

    def observe_sent(self, num_out: int, num_in: int, now_s: float) -> None:
        """Record that a step sent copies of `num_out` blocks out and `num_in` back, which lengthen their queues."""
        if num_out:
            self._out_free_s = max(self._out_free_s, now_s) + self.save_s(num_out)
        if num_in:
            self._in_free_s = max(self._in_free_s, now_s) + self.load_s(num_in)

    def observe_step(
        self, parts: Sequence[StepPart], duration_s: float, copies_s: float, *, waited_for_copies: bool = False
    ) -> None:
        """Keep a step's duration and the mean; unless the step computed few tokens, correct the profile's step times.

        copies_s: seconds of its copies, which are subtracted unless copies overlap with the computation.
        waited_for_copies: whether it waited for copies. If they overlap, the step is ignored: the wait is unknown.
        """
        if not self.is_overlapped:
            duration_s -= copies_s
        elif waited_for_copies:
            return
        self.step_s = duration_s
        self.mean_step_s = _updated(self.mean_step_s, duration_s)
        if sum(num_new for num_new, _ in parts) >= FEWEST_TOKENS:
            self._compute_scale.observe(duration_s / self.profile.step_s(parts))

    def observe_copies(self, num_out: int, out_s: float, num_in: int, in_s: float) -> None:
        """Correct the expected seconds of copies by those that `num_out` blocks out and `num_in` in took, if over 0."""
        if num_out:
            self._out_scale.observe(out_s / self._copies.out_s(num_out))
        if num_in:
            self._in_scale.observe(in_s / self._copies.in_s(num_in))

    def observe_chunk(self, num_computed: int, num_valid: int) -> None:
        """Record a chunk that left the KV of `num_valid` of `num_computed` tokens valid. `num_computed` is over 0."""
        self.share_valid = _updated(self.share_valid, num_valid / num_computed)


def _updated(mean: float, newest: float) -> float:
    return (1 - WEIGHT) * mean + WEIGHT * newest
