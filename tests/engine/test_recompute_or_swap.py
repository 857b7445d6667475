"""Recompute or copy: what costs less, as far as is known."""

import pytest

from streamrag.engine.costs.copy_costs import CopyCosts, linear_copies
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.engine.recompute_or_swap import CostChoice, SwapAlways

BLOCK_BYTES = 1_000_000


def profile(copies: CopyCosts | None = None) -> TableProfile:
    """A token takes a millisecond, and more after much context."""
    return TableProfile("p", "d", ((1, 0.001), (1_000, 1.0)), 1e-7, 0.0, kv_tokens=0, block_size=16, copies=copies)


def choice(bytes_per_s: float, *, is_overlapped: bool = True) -> CostChoice:
    copies = linear_copies(BLOCK_BYTES, bytes_per_s, is_overlapped=is_overlapped)
    return CostChoice(Price(profile(copies), 16))


def test_a_fast_link_swaps_and_a_slow_one_recomputes() -> None:
    assert choice(1e10).evict(10, 10, 0.0).choice == "swap"
    assert choice(1e7).evict(10, 10, 0.0).choice == "recompute"


def test_a_comparison_tells_both_costs() -> None:
    found = choice(1e9).evict(10, 10, 0.0)
    assert found.swap_s == pytest.approx(2 * 10 * BLOCK_BYTES / 1e9)
    assert found.recompute_s == pytest.approx(0.160, rel=0.05)


def test_blocks_in_host_memory_already_need_not_be_copied_out() -> None:
    between = choice(1.0e8)  # out and in take 0.2 s, in alone 0.1 s, and computing it 0.16 s
    assert between.evict(10, 10, 0.0).choice == "recompute"
    assert between.evict(10, 0, 0.0).choice == "swap"
    assert between.resume(0, 10, 0.0).choice == "swap"


def test_copies_wait_for_those_before_them() -> None:
    found = choice(1e9)
    found.price.observe_sent(500, 500, now_s=10.0)
    assert found.resume(0, 10, 10.0).choice == "recompute"
    assert found.resume(0, 10, 10.6).choice == "swap"


def test_updates_that_invalidate_make_saving_less_worth_than_recomputing() -> None:
    found = choice(1.5e8)
    assert found.evict(10, 10, 0.0).choice == "swap"
    for _ in range(50):
        found.price.observe_chunk(1_000, 100)
    assert found.evict(10, 10, 0.0).choice == "recompute"


def test_observed_times_of_steps_and_copies_correct_the_profile() -> None:
    slow_steps = choice(1e7)
    for _ in range(100):
        slow_steps.price.observe_step([(1_000, 0)], 1_000.0, 0.0)
    assert slow_steps.evict(10, 10, 0.0).choice == "swap"
    slow_copies = choice(1e10)
    for _ in range(100):
        slow_copies.price.observe_copies(10, 100.0, 10, 100.0)
    assert slow_copies.evict(10, 10, 0.0).choice == "recompute"


def test_steps_that_wait_for_copies_say_nothing_of_what_computing_takes() -> None:
    found = choice(1e9)
    before = found.evict(10, 10, 0.0)
    for _ in range(100):
        found.price.observe_step([(1_000, 0)], 100.0, 0.0, waited_for_copies=True)
    assert found.evict(10, 10, 0.0) == before


def test_blocks_are_written_through_if_memory_is_short_and_copies_overlap() -> None:
    found = choice(1e9)
    found.price.observe_step([(1_000, 0)], 0.01, 0.0)
    assert found.num_to_write_through(0.1) == pytest.approx(10, abs=1)
    assert found.num_to_write_through(0.9) == 0
    assert choice(1e9, is_overlapped=False).num_to_write_through(0.1) == 0
    slow = choice(1e7)
    slow.price.observe_step([(1_000, 0)], 0.01, 0.0)
    assert slow.num_to_write_through(0.1) == 0


def test_blocks_are_written_through_if_only_the_way_back_pays() -> None:
    found = choice(1e8)
    found.price.observe_step([(1_000, 0)], profile().step_s([(1_000, 0)]), 0.0)
    computed_s, copied_s = found.price.recompute_s(0, 64), found.price.save_s(64)
    assert copied_s < computed_s < 2 * copied_s
    assert found.num_to_write_through(0.1) > 0


def test_blocks_are_not_written_through_if_late_saves_take_no_noticeable_time() -> None:
    found = choice(1e10)
    found.price.observe_step([(1_000, 0)], 1.0, 0.0)
    assert found.price.save_s(64) == pytest.approx(0.0064)
    assert found.num_to_write_through(0.1) == 0  # computing them takes a second
    for _ in range(9):
        found.price.observe_step([(1_000, 0)], 0.1, 0.0)
    assert found.num_to_write_through(0.1) > 0


def test_loads_that_run_beside_a_step_are_not_counted() -> None:
    beside, alone = choice(5e7), choice(5e7, is_overlapped=False)
    for found in (beside, alone):
        for _ in range(100):
            found.price.observe_step([(1_000, 0)], profile().step_s([(1_000, 0)]), 0.0)
    hidden = beside.resume(0, 10, 0.0)
    assert hidden.swap_s == alone.resume(0, 10, 0.0).swap_s
    assert (hidden.choice, alone.resume(0, 10, 0.0).choice) == ("swap", "recompute")


def test_swap_always_swaps() -> None:
    always = SwapAlways()
    assert always.evict(1, 1, 0.0).choice == always.resume(0, 1, 0.0).choice == "swap"
