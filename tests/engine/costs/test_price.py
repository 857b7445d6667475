"""What recomputing and copying take, by a profile that is corrected."""

import pytest

from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.errors import ConfigurationError


def profile(copies: CopyCosts | None) -> TableProfile:
    """A token takes a millisecond, and more after much context."""
    return TableProfile("p", "d", ((1, 0.001), (1_000, 1.0)), 1e-7, 0.0, kv_tokens=0, block_size=16, copies=copies)


def price(*, is_overlapped: bool = True) -> Price:
    """The prices of an engine that copies a block in a millisecond."""
    return Price(profile(linear_copies(1_000_000, 1e9, is_overlapped=is_overlapped)), 16)


def test_a_single_slow_copy_does_not_outweigh_all_others() -> None:
    found = price()
    usual_s = found.save_s(10)
    for _ in range(30):
        found.observe_copies(10, usual_s, 0, 0.0)
    found.observe_copies(10, 10 * usual_s, 0, 0.0)
    assert found.save_s(10) < 1.3 * usual_s


def test_a_profile_that_is_always_wrong_is_corrected_by_the_first_copies() -> None:
    found = price()
    usual_s = found.save_s(10)
    for _ in range(3):
        found.observe_copies(10, 2 * usual_s, 0, 0.0)
    assert found.save_s(10) > 1.6 * usual_s


def test_copies_that_stop_the_engine_are_no_part_of_what_a_step_computes() -> None:
    found = price(is_overlapped=False)
    before_s = found.recompute_s(0, 10)
    for _ in range(100):
        found.observe_step([(1_000, 0)], found.profile.step_s([(1_000, 0)]) + 5.0, 5.0)
    assert found.recompute_s(0, 10) == pytest.approx(before_s)


def test_costs_cannot_be_compared_by_a_profile_without_copies() -> None:
    with pytest.raises(ConfigurationError, match="streamrag profile"):
        Price(profile(None), 16)


def test_copies_wait_for_those_of_their_direction() -> None:
    found = price()
    found.observe_sent(500, 0, now_s=10.0)
    assert found.wait_to_save_s(10.1) == pytest.approx(0.4)
    assert found.wait_to_save_s(11.0) == found.wait_to_load_s(10.1) == 0.0


def test_a_part_of_a_step_has_the_share_that_the_step_would_be_shorter_without_it() -> None:
    found = price()
    assert found.share_of_step([(100, 0), (300, 0)], 1, 300) == pytest.approx(0.75, rel=1e-2)
    assert found.share_of_step([(400, 0)], 0, 100) == pytest.approx(0.25, rel=2e-2)
