"""Policies of speculation depth, each alone."""

from dataclasses import replace

import pytest
from speculation_policies import (
    BatchSizes,
    ByPrice,
    ConcurrencyCap,
    CostModel,
    Doubling,
    DraftState,
    SpecuStream,
    StepState,
    Verification,
    policies,
)

NEW = DraftState(num_before=1_000, num_left=60)
ALL_RIGHT, ALL_WRONG = Verification(8, 8, has_left=False), Verification(8, 0, has_left=True)


def linear(overhead: float) -> CostModel:
    """A row costs 1."""
    return lambda num_rows, num_pairs: overhead + num_rows


def step(*drafts: DraftState, num_decoding: int | None = None, overhead: float = 500.0) -> StepState:
    num = len(drafts) if num_decoding is None else num_decoding
    return StepState(drafts, num, 1_000.0 * num, 256, 32, linear(overhead))


@pytest.mark.parametrize("name", policies())
def test_every_policy_gives_each_draft_a_depth(name: str) -> None:
    for num in (1, 4, 256):
        depths = policies()[name]().depths(step(*[NEW] * num))
        assert len(depths) == num
        assert all(0 <= depth <= 32 for depth in depths)


def test_doubling_begins_with_the_most_falls_to_four_and_doubles() -> None:
    histories = ((), (ALL_WRONG,), (ALL_WRONG, ALL_RIGHT), (ALL_WRONG, ALL_RIGHT, Verification(8, 5, has_left=False)))
    drafts = [replace(NEW, history=history) for history in histories]
    assert Doubling().depths(step(*drafts)) == [32, 4, 8, 8]


def test_a_gap_between_batch_sizes_has_the_depth_before_it() -> None:
    depths = [BatchSizes().depths(step(NEW, num_decoding=num))[0] for num in (1, 16, 17, 64, 200, 256)]
    assert depths == [3, 3, 3, 2, 2, 0]


def test_the_cap_falls_with_decoders_and_with_acceptance_but_lets_a_draft_recover() -> None:
    bad = replace(NEW, history=(ALL_WRONG,))
    caps = {num: ConcurrencyCap().depths(step(NEW, bad, num_decoding=num)) for num in (1, 16, 64, 65)}
    assert caps == {1: [10, 3], 16: [5, 2], 64: [2, 1], 65: [0, 0]}


def settled(*acceptances: float, load: float = 0.0, tokens_per_s: float = 400.0) -> list[float]:
    policy = SpecuStream()
    return [policy.adapt(acceptances[i % len(acceptances)], load, tokens_per_s) for i in range(200)][-20:]


def test_specustream_settles_at_five_plus_two_and_a_half_squares_of_the_acceptance_rate() -> None:
    for rate in (0.0, 0.4, 0.8, 1.0):
        assert settled(rate) == pytest.approx([5 + 2.5 * rate**2] * 20, abs=0.02)
    assert settled(0.8, load=0.9) == pytest.approx([5.16] * 20, abs=0.02)
    assert settled(0.8, tokens_per_s=20.0) == [20.0] * 20


def test_specustream_verifies_five_when_nothing_is_ever_accepted_and_more_the_more_acceptance_swings() -> None:
    assert min(settled(0.0, load=1.0)) == 5.0
    steady, swinging = settled(0.5), settled(0.0, 1.0)
    assert sum(swinging) > sum(steady)


def test_price_admits_what_raises_tokens_over_cost_and_nothing_more() -> None:
    by_price, step_of = ByPrice(), step(NEW, replace(NEW, history=(ALL_WRONG, ALL_WRONG)), overhead=20.0)
    depths = by_price.depths(step_of)
    assert depths[0] > depths[1]

    def tokens_over_cost(depths: list[int]) -> float:
        rates = [by_price.rate(draft.history) for draft in step_of.drafts]
        tokens = 2 + sum(rate**k for rate, depth in zip(rates, depths, strict=True) for k in range(1, depth + 1))
        return tokens / (20 + 2 + sum(depths))

    best = max(tokens_over_cost([a, b]) for a in range(33) for b in range(33))
    assert tokens_over_cost(depths) == pytest.approx(best)


def test_price_verifies_everything_where_rows_are_free_and_nothing_where_steps_are() -> None:
    assert ByPrice(prior=0.99).depths(step(NEW, overhead=1e6)) == [32]
    assert ByPrice().depths(step(NEW, num_decoding=256, overhead=0.0)) == [0]
