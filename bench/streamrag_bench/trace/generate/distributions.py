"""Stratified sampling, which reproduces percentiles at every seed."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Marginal:
    """A positive distribution through given percentiles, log-normal between neighbouring ones.

    The logarithm of the value is piecewise linear in the normal score of its rank. Below the first point and above the
    last, the value is constant.
    """

    points: tuple[tuple[float, float], ...]
    """Pairs of (rank between 0 and 1, value), both ascending."""

    def __post_init__(self) -> None:
        ranks, values = zip(*self.points, strict=True)
        for ascending in (ranks, values):
            assert len(ascending) > 1, ascending
            assert list(ascending) == sorted(set(ascending)), ascending
        assert 0 < min(ranks) < max(ranks) < 1, ranks
        assert min(values) > 0, values

    def sample(self, num: int, rng: Random) -> list[float]:
        """Draw one value from each of `num` equal slices of the ranks, and return them in ascending order."""
        scores = [NORMAL.inv_cdf(rank) for rank, _ in self.points]
        logs = [math.log(value) for _, value in self.points]
        values = []
        for i in range(num):
            score = NORMAL.inv_cdf((i + 0.5 + 0.98 * (rng.random() - 0.5)) / num)  # never 0 or 1
            score = min(max(score, scores[0]), scores[-1])
            right = min(bisect_right(scores, score), len(scores) - 1)
            slope = (logs[right] - logs[right - 1]) / (scores[right] - scores[right - 1])
            values.append(math.exp(logs[right] + slope * (score - scores[right])))
        return values


def stratified_counts(shares: Sequence[int], num: int, rng: Random) -> list[int]:
    """Return `num` counts in random order, with the given shares of 1, 2, ...

    The ranks are the middles of `num` equal slices, so that the same counts come at every seed.
    """
    ends = list(accumulate(shares))
    drawn = [1 + bisect_right(ends, (i + 0.5) / num * ends[-1]) for i in range(num)]
    rng.shuffle(drawn)
    return drawn


def couple(scores: Sequence[float], ascending: Sequence[float]) -> list[float]:
    """Return a value for each score, by rank: the smallest value for the lowest score, and so on."""
    coupled = [0.0] * len(scores)
    for value, index in zip(ascending, sorted(range(len(scores)), key=scores.__getitem__), strict=True):
        coupled[index] = value
    return coupled


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers of at least 1 with the sum `total`, in proportion to the weights (largest remainder method)."""
    assert total >= len(weights), (total, len(weights))
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    parts = [1 + int(part) for part in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
