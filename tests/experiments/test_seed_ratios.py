"""Ratios of percentiles over paired seeds."""

import math
import random

import numpy as np
import pytest
from seed_ratios import percentile_ratios


def seeds(scale: float, num_seeds: int = 8, num_requests: int = 200) -> list[list[float]]:
    """The same loads each time, `scale` times as slow; seeds differ much."""
    rng = random.Random(1)
    return [[scale * (1 + 5 * seed) * rng.expovariate(1) for _ in range(num_requests)] for seed in range(num_seeds)]


def test_the_ratio_is_that_of_pooled_percentiles_to_the_least_of_the_others() -> None:
    ways = seeds(1.0), seeds(1.3), [[value**1.5 for value in values] for values in seeds(0.8)]
    found = percentile_ratios(ways[0], ways[1:], (50, 95), num_samples=10)
    mine, *theirs = (np.percentile(np.concatenate(way), (50, 95)) for way in ways)
    assert [one.value for one in found] == pytest.approx(list(mine / np.minimum(*theirs)))


def test_pairing_takes_out_what_all_ways_have_in_common() -> None:
    # However much seeds differ, one way is always 1.1 times as slow: nothing of that ratio is chance.
    for one in percentile_ratios(seeds(1.1), [seeds(1.0)], (50, 95, 99), num_samples=200):
        assert (one.value, one.low, one.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_spread_holds_what_seeds_disagree_about() -> None:
    base = seeds(1.0)
    of = [[value * (0.9 if number % 2 else 1.2) for value in values] for number, values in enumerate(base)]
    (found,) = percentile_ratios(of, [base], (50,), num_samples=500)
    assert 0.9 <= found.low < found.value < found.high <= 1.2
    assert found.high - found.low > 0.05
    assert percentile_ratios(of, [base], (50,), num_samples=500) == [found]  # the same samples each time


def test_a_single_seed_has_no_spread() -> None:
    (found,) = percentile_ratios([[1.0, 2.0]], [[[1.0, 1.0]]], (50,))
    assert found.value == 1.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)
