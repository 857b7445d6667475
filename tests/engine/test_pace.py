"""How large a lean step may be."""

from streamrag.engine import Pace


def learnt(*, token_s: float, overhead_s: float = 0.0, num_steps: int = 60) -> int:
    pace = Pace(2_048, 0.05)
    for _ in range(num_steps):
        num_tokens = pace.num_partial_tokens
        pace.observe(num_tokens, overhead_s + token_s * num_tokens)
    return pace.num_partial_tokens


def test_before_anything_is_known_the_limit_is_the_highest() -> None:
    assert Pace(2_048, 0.05).num_partial_tokens == 2_048


def test_a_fast_device_has_no_lower_limit() -> None:
    assert learnt(token_s=15e-6, overhead_s=0.008) == 2_048


def test_on_a_slow_device_a_step_takes_about_the_time_that_was_asked_for() -> None:
    num_tokens = learnt(token_s=200e-6, overhead_s=0.005)
    assert 0.9 * 0.05 <= 0.005 + 200e-6 * num_tokens <= 1.1 * 0.05


def test_the_limit_stays_above_a_floor_where_no_step_is_that_short() -> None:
    assert learnt(token_s=1e-6, overhead_s=0.5) == 128


def test_steps_of_a_few_tokens_teach_nothing() -> None:
    pace = Pace(2_048, 0.05)
    pace.observe(8, 1.0)
    assert pace.num_partial_tokens == 2_048
