"""Percentiles of two ways over the same loads, and how much of their ratio is chance. Needs numpy."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from streamrag.errors import MissingDependencyError

NUM_SAMPLES = 1_000
SPREAD = (5, 95)
"""Percentiles of the bootstrap samples."""


class Ratio(NamedTuple):
    """The ratio of two percentiles, and the range of the bootstrap samples without 5 % at each end."""

    value: float
    low: float
    """NaN of one seed."""
    high: float


def percentile_ratios(
    of: Sequence[Sequence[float]],
    to: Sequence[Sequence[Sequence[float]]],
    ranks: Sequence[float],
    num_samples: int = NUM_SAMPLES,
) -> list[Ratio]:
    """The percentile of `of` over the least one of those of `to`, at each of `ranks` (0 to 100).

    `of`, and each of `to`, holds the values of one seed after the other; all have the same seeds in the same order. A
    sample draws whole seeds, the same for all, because requests of one run wait for each other.
    Raises MissingDependencyError without numpy.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise MissingDependencyError("numpy", "pip install numpy") from error
    ways = [[np.asarray(values, dtype=float) for values in way] for way in (of, *to)]

    def ratios(seeds: Sequence[int]) -> list[float]:
        mine, *theirs = (np.percentile(np.concatenate([way[i] for i in seeds]), ranks) for way in ways)
        return [float(one) for one in mine / np.min(theirs, axis=0)]

    num_seeds = len(of)
    values = ratios(range(num_seeds))
    if num_seeds < 2:
        return [Ratio(value, math.nan, math.nan) for value in values]
    rng = np.random.default_rng(0)
    samples = [ratios(rng.integers(num_seeds, size=num_seeds).tolist()) for _ in range(num_samples)]
    lows, highs = np.percentile(samples, SPREAD, axis=0)
    return [Ratio(value, float(low), float(high)) for value, low, high in zip(values, lows, highs, strict=True)]
