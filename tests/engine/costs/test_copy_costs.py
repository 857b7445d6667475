import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.errors import ConfigurationError
from streamrag_bench.simulated_step_times import CopyClock

COSTS = CopyCosts(
    out_points=((1, 0.002), (10, 0.011), (20, 0.031)), in_points=((4, 0.008), (8, 0.010)), block_bytes=1_000,
    is_overlapped=True,
)  # fmt: skip
STEADY = linear_copies(1_000, 1e6)  # a block takes a millisecond
NUM_LAYERS = 4


@pytest.mark.parametrize(
    ("num_blocks", "expected_s"), [(0, 0.0), (1, 0.002), (5, 0.006), (10, 0.011), (15, 0.021), (20, 0.031), (30, 0.051)]
)
def test_copies_are_linear_between_their_points_and_beyond_the_last(num_blocks: int, expected_s: float) -> None:
    assert COSTS.out_s(num_blocks) == pytest.approx(expected_s)


def test_below_the_first_point_a_copy_goes_down_to_its_latency() -> None:
    assert COSTS.in_s(2) == pytest.approx(0.006 + 2 * 0.0005)
    assert COSTS.in_s(0) == 0.0


def test_a_line_without_a_latency_goes_down_to_nothing() -> None:
    steep = replace(COSTS, in_points=((4, 0.001), (8, 0.010)))
    assert steep.in_s(2) == pytest.approx(0.0005)
    assert replace(COSTS, in_points=((4, 0.008),)).in_s(6) == pytest.approx(0.012)


def test_a_link_takes_its_latency_and_what_its_bandwidth_says() -> None:
    link = linear_copies(2_000_000, 50e9, latency_s=1e-4, is_overlapped=False)
    for seconds in (link.out_s, link.in_s):
        assert seconds(1_000) == pytest.approx(1e-4 + 0.04)
        assert seconds(1) == pytest.approx(1e-4 + 4e-5)
        assert seconds(0) == 0.0
    assert (link.block_bytes, link.is_overlapped) == (2_000_000, False)


points = st.lists(st.tuples(st.integers(1, 9_999), st.floats(0, 100)), min_size=1, max_size=8, unique_by=lambda p: p[0])


@given(points, st.integers(0, 20_000))
def test_more_blocks_never_take_less_time(measured: list[tuple[int, float]], num_blocks: int) -> None:
    line = tuple(zip(sorted(num for num, _ in measured), sorted(seconds for _, seconds in measured), strict=True))
    costs = replace(COSTS, out_points=line)
    assert 0 <= costs.out_s(num_blocks) <= costs.out_s(num_blocks + 1) + 1e-9


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 0.1), (1, 0.2)),
        ((2, 0.1), (1, 0.2)),
        ((1, 0.1), (1, 0.2)),
        ((1, 0.2), (2, 0.1)),
        ((1, -0.1),),
        ((1, math.nan), (2, 0.1)),
    ],
)
def test_points_that_are_no_rising_line_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match="in_points"):
        replace(COSTS, in_points=points)


def test_blocks_and_links_of_no_size_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="block_bytes=0"):
        replace(COSTS, block_bytes=0)
    with pytest.raises(ConfigurationError, match="bytes_per_s=0"):
        linear_copies(1_000, 0)
    with pytest.raises(ConfigurationError, match="num_layers=0"):
        CopyClock(STEADY, 0)


def test_a_step_without_copies_takes_what_it_computes() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020) == pytest.approx(0.020)
    assert (clock.busy_out_s, clock.busy_in_s) == (0.0, 0.0)


def test_blocks_that_a_step_overwrites_are_saved_before_its_forward() -> None:
    assert CopyClock(STEADY, NUM_LAYERS).step_s(1.0, 0.020, num_saves=5) == pytest.approx(0.025)


def test_blocks_that_stay_are_saved_beside_the_forward() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_held_saves=15) == pytest.approx(0.020)
    assert clock.step_s(1.020, 0.020) == pytest.approx(0.020)


def test_the_next_forward_waits_for_saves_that_took_longer_than_the_step() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_held_saves=50) == pytest.approx(0.020)
    assert clock.step_s(1.020, 0.020, num_saves=5) == pytest.approx(0.030 + 0.005 + 0.020)
    assert clock.step_s(2.0, 0.020) == pytest.approx(0.020)


def test_loads_run_layer_by_layer_beside_the_forward() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_loads=10) == pytest.approx(0.020)
    assert clock.step_s(2.0, 0.020, num_loads=40) == pytest.approx(0.040 + 0.020 / NUM_LAYERS)
    assert clock.step_s(3.0, 0.020, num_saves=5, num_loads=40) == pytest.approx(0.005 + 0.040 + 0.020 / NUM_LAYERS)


def test_with_one_layer_a_forward_begins_when_all_is_loaded() -> None:
    assert CopyClock(STEADY, 1).step_s(1.0, 0.020, num_loads=10) == pytest.approx(0.030)


def test_a_device_that_cannot_do_both_at_once_stands_still_while_it_copies() -> None:
    clock = CopyClock(replace(STEADY, is_overlapped=False), NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, 1, 2, 4) == pytest.approx(0.027)
    assert clock.step_s(2.0, 0.020) == pytest.approx(0.020)


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_the_engines_count_how_long_they_are_busy(is_overlapped: bool) -> None:
    clock = CopyClock(replace(STEADY, is_overlapped=is_overlapped), NUM_LAYERS)
    clock.step_s(1.0, 0.020, num_saves=1, num_held_saves=2, num_loads=4)
    clock.step_s(2.0, 0.020, num_loads=6)
    assert clock.busy_out_s == pytest.approx(0.003)
    assert clock.busy_in_s == pytest.approx(0.010)
