"""Lanes in virtual time: a small cell, and what a decode lane charges for a prompt that it is sent."""

import pytest
from lanes_simulated import LINKS, PROFILE, answers_only, cell, splits

from streamrag.engine.costs.profile_files import load_profile


def test_a_cell_compares_lanes_with_engines_that_do_both() -> None:
    rows = cell("crawler", 2, 10, 4)
    assert [row.way for row in rows] == ["both", *LINKS]
    both, *lanes = rows
    assert (both.num_prefill, {row.num_prefill for row in lanes}) == (0, {1})
    # The KV of several thousand tokens crosses 12.5 GB/s in some 50 ms.
    assert lanes[0].first_p50_s < lanes[-1].first_p50_s
    assert both.first_p50_s < lanes[-1].first_p50_s
    for row in rows:
        assert row.last_p50_s == pytest.approx(row.first_p50_s + 9 * row.per_token_p50_s, rel=0.3)
    assert cell("crawler", 2, 10, 4) == rows


def test_a_decode_lane_computes_only_the_last_token_of_a_prompt() -> None:
    profile = load_profile(PROFILE)
    assert answers_only(profile, [(4_000, 0), (1, 500)]) == profile.step_s([(1, 3_999), (1, 500)])


def test_splits_leave_a_lane_of_each_kind() -> None:
    assert splits(2) == [1]
    assert splits(4) == [1, 2, 3]
    assert splits(64) == [16, 32, 48]
