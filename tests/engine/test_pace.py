"""How large a lean step may be."""

import math

import pytest

from streamrag.engine import Pace


def learnt(*, token_s: float, overhead_s: float = 0.0, num_steps: int = 60) -> int:
    pace = Pace(2_048, 0.05)
    for _ in range(num_steps):
        num_tokens = pace.num_partial_tokens
        assert num_tokens is not None
        pace.observe(num_tokens, overhead_s + token_s * num_tokens)
    assert pace.num_partial_tokens is not None
    return pace.num_partial_tokens


def test_before_a_step_was_measured_the_limit_is_that_of_a_slow_device() -> None:
    pace = Pace(2_048, 0.05)
    assert pace.num_partial_tokens == 128
    assert pace.num_step_tokens(0.02, None) == 2_048


def test_an_overhead_that_is_estimated_as_none_makes_no_tiny_steps() -> None:
    pace = Pace(2_048, 0.05)
    pace.observe(2_048, 0.04)
    assert pace.num_step_tokens(0.1, 0.0) == pace.num_step_tokens(0.1, None) == 809


def test_a_pace_without_a_limit_stays_without_one() -> None:
    pace = Pace(None, 0.05)
    pace.observe(128, 1.0)
    assert pace.num_partial_tokens is None
    assert pace.num_step_tokens(0.02, 64) is None


@pytest.mark.parametrize(
    ("token_s", "replaced_every_s", "overhead", "num_tokens"),
    [
        (2e-3, 0.04, 80, 56),  # two cores, a search whose stages are 20 ms apart
        (2e-3, 0.8, 80, 252),
        (2e-3, 0.001, 80, 16),  # hardly anything would be shorter
        (1e-5, 0.04, 500, 1_999),  # a GPU
        (2e-3, math.inf, 80, 2_048),  # a crawl
    ],
)
def test_a_step_is_as_short_as_the_next_change_is_near(
    token_s: float, replaced_every_s: float, overhead: float, num_tokens: int
) -> None:
    pace = Pace(2_048, 0.05)
    pace.observe(1_000, 1_000 * token_s)
    assert pace.num_step_tokens(replaced_every_s, overhead) == num_tokens
    cost = {n: overhead / n + n * token_s / (2 * replaced_every_s) for n in range(1, 4_000)}
    if 16 < num_tokens < 2_048:
        assert abs(num_tokens - min(cost, key=cost.__getitem__)) <= 1


def test_a_fast_device_has_no_lower_limit() -> None:
    assert learnt(token_s=15e-6, overhead_s=0.008) == 2_048


def test_a_step_on_a_slow_device_takes_about_the_time_that_was_asked_for() -> None:
    num_tokens = learnt(token_s=200e-6, overhead_s=0.005)
    assert 0.9 * 0.05 <= 0.005 + 200e-6 * num_tokens <= 1.1 * 0.05


def test_the_limit_stays_above_a_floor_where_no_step_is_that_short() -> None:
    assert learnt(token_s=1e-6, overhead_s=0.5) == 128


def test_steps_of_a_few_tokens_teach_nothing() -> None:
    pace = Pace(2_048, 0.05)
    pace.observe(8, 1.0)
    assert pace.tokens_per_s is None
