import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.errors import ConfigurationError

COSTS = CopyCosts(
    out_points=((1, 0.002), (10, 0.011), (20, 0.031)), in_points=((4, 0.008), (8, 0.010)), block_bytes=1_000,
    is_overlapped=True,
)  # fmt: skip


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
