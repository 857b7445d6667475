"""Cells side by side."""

import math

import numpy as np
import pytest
from made import made_result, settings

from streamrag.bench.grid import Grid
from streamrag.bench.report.comparison import compare
from streamrag.bench.summary import Digest, digest


def digests_of(grid: Grid) -> list[Digest]:
    return [digest(made_result(cell)) for cell in grid.cells()]


def test_seeds_are_pooled_and_their_spread_is_kept() -> None:
    cells = digests_of(Grid("virtual", "crawler", arms=("streaming",), qps=(2,), seeds=(3, 1, 2), num_queries=40))
    (comparison,) = compare(cells)
    pool = comparison.pools["streaming srpf/recompute", 2]
    assert pool.seeds == (1, 2, 3)
    figure = pool.figure(lambda d: d.ttft_s, "p95")
    alone = [float(np.percentile(cell.ttft_s, 95)) for cell in cells]
    assert figure.value == pytest.approx(np.percentile([t for cell in cells for t in cell.ttft_s], 95))
    assert (figure.low, figure.high) == pytest.approx((min(alone), max(alone)))


def test_a_speed_up_is_a_ratio_of_percentiles_over_the_seeds_that_both_have() -> None:
    before = digests_of(Grid("virtual", "crawler", arms=("no-streaming",), qps=(2,), seeds=(1, 2), num_queries=40))
    after = digests_of(Grid("virtual", "crawler", arms=("streaming",), qps=(2,), seeds=(2, 3), num_queries=40))
    (comparison,) = compare([*after, *before])
    speed_up = comparison.speed_up("streaming srpf/recompute", 2, "p99")
    assert speed_up is not None
    expected = np.percentile(before[1].ttft_after_retrieval_s, 99) / np.percentile(after[0].ttft_after_retrieval_s, 99)
    assert speed_up.value == speed_up.low == speed_up.high == pytest.approx(expected)
    assert comparison.speed_up("no-streaming", 2, "p50") == (1.0, 1.0, 1.0)


def test_a_speed_up_without_a_baseline_is_unknown() -> None:
    only = digests_of(Grid("virtual", "crawler", arms=("streaming",), qps=(2,), num_queries=5))
    assert compare(only)[0].speed_up("streaming srpf/recompute", 2, "p50") is None
    other_seed = digests_of(Grid("virtual", "crawler", arms=("no-streaming",), qps=(2,), seeds=(9,), num_queries=5))
    assert compare(only + other_seed)[0].speed_up("streaming srpf/recompute", 2, "p50") is None


def test_loads_are_kept_apart_and_rates_put_in_order() -> None:
    cells = digests_of(Grid("virtual", "anns", qps=(4, 0.5), delays=(1.0, 30.0), num_queries=5))
    comparisons = compare(cells)
    assert [c.load.delay for c in comparisons] == [1.0, 30.0]
    assert comparisons[0].qps == (0.5, 4)
    assert comparisons[0].variants == ("no-streaming", "streaming srpf/recompute")


def test_the_ratio_to_the_floor_is_unknown_without_one() -> None:
    made = made_result(settings())
    (comparison,) = compare([digest(made)])
    (pool,) = comparison.pools.values()
    floors = [r.floor_s for r in made.requests]
    after = [r.ttft_after_retrieval_s for r in made.requests]
    assert pool.ratio_to_floor("p50") == pytest.approx(np.median(after) / np.median(floors))
    from dataclasses import replace

    (without,) = compare([replace(digest(made), floor_s=())])[0].pools.values()
    assert math.isnan(without.ratio_to_floor("p50"))
