"""Confidence intervals of how many times as fast one way is as the other."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

CONFIDENCE = 0.95
SAME = 1.03
"""An interval within this factor of 1 shows no difference that is felt, and one within it of its middle is narrow."""

VerdictWord: TypeAlias = Literal["faster", "slower", "the same", "unclear"]


class Interval(NamedTuple):
    """A confidence interval of how many times as fast streaming is."""

    low: float
    middle: float
    high: float

    @property
    def is_narrow(self) -> bool:
        """Whether more pairs would add little: the margin is at most 3 %, or at most a third of the effect.

        A third lies so far from no effect that looking again after each pair hardly ever finds an effect that is none.
        """
        return self.high / self.middle <= max(SAME, math.exp(abs(math.log(self.middle)) / 3))

    @property
    def word(self) -> VerdictWord:
        if self.low >= 1 / SAME and self.high <= SAME:
            return "the same"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "unclear"


def interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios, with its confidence interval (Student's t, on logarithms)."""
    from scipy import stats  # type: ignore[import-untyped]  # slow to import

    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return Interval(0.0, math.exp(logs[0]), math.inf)
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
    return Interval(math.exp(mean - margin), math.exp(mean), math.exp(mean + margin))
