"""How long a step should be."""

import math
import random

import pytest

from streamrag.engine.step_size import FEWEST_STEPS, LEAST_TOKENS, RATE_S, StepCostEstimator, StepCosts


def learnt(
    sizes: list[int],
    *,
    overhead_s: float,
    token_s: float,
    pair_s: float = 0.0,
    noise: float = 0.0,
    num_before: tuple[int, ...] = (0,),
) -> StepCostEstimator:
    rng = random.Random(1)
    made = StepCostEstimator()
    for num_tokens in sizes:
        num_pairs = num_tokens * (rng.choice(num_before) + num_tokens / 2)
        duration_s = overhead_s + token_s * num_tokens + pair_s * num_pairs
        made.observe_step(num_tokens, num_pairs, duration_s * rng.uniform(1 - noise, 1 + noise))
    return made


MIXED = [1, 40, 800, 2_000, 1, 6_000, 300, 8_192] * 40


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.001), (0.05, 0.3)])
def test_overhead_and_the_time_of_a_token_are_told_apart(noise: float, tolerance: float) -> None:
    made = learnt(MIXED, overhead_s=0.008, token_s=14e-6, noise=noise)
    made.observe_complete(0.0)
    costs = made.at(0.0)
    assert costs is not None
    assert costs.overhead == pytest.approx(0.008 / 14e-6, rel=tolerance)
    assert costs.arrivals_per_token == pytest.approx(14e-6 / RATE_S, rel=tolerance)


def test_changed_step_costs_are_learnt_anew() -> None:
    made = learnt(MIXED, overhead_s=0.008, token_s=14e-6)
    for num_tokens in MIXED:
        made.observe_step(num_tokens, num_tokens**2 / 2, 0.05 + 1e-3 * num_tokens)
    costs = made.at(0.0)
    assert costs is not None
    assert costs.overhead == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize(
    "sizes",
    [[], [1, 800] * (FEWEST_STEPS // 2 - 1), [512] * 100, [1] * 100],
    ids=["no step", "few steps", "long steps of one costs", "decodes only"],
)
def test_step_costs_are_unknown_until_enough_steps_are_known(sizes: list[int]) -> None:
    assert learnt(sizes, overhead_s=0.008, token_s=14e-6).at(0.0) is None


def test_steps_that_take_no_longer_with_more_tokens_say_nothing() -> None:
    assert learnt(MIXED, overhead_s=0.008, token_s=0.0).at(0.0) is None
    assert learnt(MIXED, overhead_s=0.9, token_s=-1e-4).at(0.0) is None


def test_steps_without_overhead_are_as_short_as_they_may_be() -> None:
    made = learnt(MIXED, overhead_s=-1e-3, token_s=1e-4)
    made.observe_complete(0.0)
    costs = made.at(0.0)
    assert costs is not None
    assert (costs.overhead, costs.best_length(5)) == (0.0, LEAST_TOKENS)


def test_the_rate_is_that_of_the_last_seconds_however_they_were_bunched() -> None:
    even, bunched = StepCostEstimator(), StepCostEstimator()
    for made in (even, bunched):
        for num_tokens in MIXED:
            made.observe_step(num_tokens, num_tokens**2 / 2, 0.008 + 14e-6 * num_tokens)
    for i in range(400):
        even.observe_complete(i / 4)
        bunched.observe_complete(i // 40 * 10.0)
    at_rate_4, after_a_pause, after_bunches = even.at(100.0), even.at(100.0 + RATE_S), bunched.at(100.0)
    assert at_rate_4
    assert after_a_pause
    assert after_bunches
    assert at_rate_4.arrivals_per_token == pytest.approx(4 * 14e-6, rel=0.05)
    assert after_a_pause.arrivals_per_token == pytest.approx(at_rate_4.arrivals_per_token / math.e)
    assert after_bunches.arrivals_per_token == pytest.approx(4 * 14e-6, rel=1.0)


def test_a_clock_that_goes_back_raises_no_rate() -> None:
    made = learnt(MIXED, overhead_s=0.008, token_s=14e-6)
    made.observe_complete(5.0)
    early, then = made.at(1.0), made.at(5.0)
    assert early
    assert then
    assert early.arrivals_per_token == then.arrivals_per_token


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.001), (0.05, 0.3)])
def test_the_cost_of_attention_is_told_apart_from_that_of_tokens(noise: float, tolerance: float) -> None:
    far = (0, 3_000, 20_000, 60_000)
    made = learnt(MIXED, overhead_s=0.008, token_s=14e-6, pair_s=46e-11, noise=noise, num_before=far)
    costs = made.at(0.0)
    assert costs is not None
    assert costs.overhead == pytest.approx(0.008 / 14e-6, rel=tolerance)
    assert costs.pair_cost == pytest.approx(46e-11 / 14e-6, rel=tolerance)


def test_the_cost_of_attention_is_zero_where_it_cannot_be_measured() -> None:
    made = learnt([1_000, 1_001, 1_200, 1_300] * 40, overhead_s=0.008, token_s=14e-6, pair_s=46e-11)
    costs = made.at(0.0)
    assert costs is not None
    assert costs.pair_cost == 0.0
    faster = learnt(MIXED, overhead_s=0.008, token_s=14e-6, pair_s=-1e-10, num_before=(0, 9_000)).at(0.0)
    assert faster is None or faster.pair_cost == 0.0


@pytest.mark.parametrize("num_before", [0, 500, 80_000])
@pytest.mark.parametrize("pair", [0.0, 1e-6, 3e-5])
def test_the_tokens_that_fit_have_the_given_length(num_before: int, pair: float) -> None:
    costs = StepCosts(570, 5e-5, pair)
    for length in (1.0, 600.0, 8_192.0, math.inf):
        num_tokens = costs.num_fitting(length, num_before)
        assert 0 < num_tokens <= length
        if length < math.inf:
            assert costs.length(num_tokens, num_before) == pytest.approx(length)


def test_planning_late_costs_no_more_than_it_gains() -> None:
    costs = StepCosts(overhead=570, arrivals_per_token=5e-5)
    for num_waiting in (1, 4, 20):
        worth = costs.best_length(num_waiting) / math.sqrt(2)
        assert costs.is_worth_putting_off(1.01 * worth, num_waiting)
        assert not costs.is_worth_putting_off(0.99 * worth, num_waiting)
    assert not StepCosts(570, 0.0).is_worth_putting_off(8_192, 1), "nobody comes"


@pytest.mark.parametrize("num_waiting", [1, 4, 20])
def test_the_best_length_of_a_step_costs_less_than_a_shorter_or_longer_one(num_waiting: int) -> None:
    costs = StepCosts(overhead=570, arrivals_per_token=5e-5)

    def cost(num_tokens: float) -> float:
        return num_waiting * costs.overhead / num_tokens + costs.arrivals_per_token * num_tokens / 2

    best = costs.best_length(num_waiting)
    assert cost(best) < min(cost(0.9 * best), cost(1.1 * best))


@pytest.mark.parametrize("num_waiting", [1, 4, 20])
def test_a_prompt_in_even_parts_costs_less_than_in_fewer_or_more(num_waiting: int) -> None:
    costs = StepCosts(overhead=570, arrivals_per_token=5e-5)
    best = costs.best_length(num_waiting)
    for length in (1, 300, 0.7 * best, 1.3 * best, 1.5 * best, 2.4 * best, 2.5 * best, 9.9 * best):

        def cost(num_parts: int, length: float = length) -> float:
            return num_waiting * costs.overhead * num_parts + costs.arrivals_per_token * length**2 / (2 * num_parts)

        cheapest = min(range(1, 20), key=cost)
        assert costs.even_part(length, best) == pytest.approx(length / cheapest)
    assert costs.even_part(9_000, math.inf) == 9_000


def test_a_step_may_be_of_any_length_if_no_request_arrives() -> None:
    assert StepCosts(overhead=570, arrivals_per_token=0.0).best_length(1) == math.inf


def test_no_step_is_shorter_than_its_overhead() -> None:
    assert StepCosts(overhead=570, arrivals_per_token=1.0).best_length(1) == 570


def test_a_prompt_joins_others_in_a_step_if_that_saves_more_than_it_costs() -> None:
    costs = StepCosts(overhead=500, arrivals_per_token=1e-5)
    assert costs.is_worth_adding(10_000, num_before=0, num_waiting=1)  # nobody waits for it
    assert costs.is_worth_adding(500, num_before=1, num_waiting=1)
    assert not costs.is_worth_adding(501, num_before=1, num_waiting=1)
    assert not costs.is_worth_adding(500, num_before=2, num_waiting=1)
    assert costs.is_worth_adding(1_000, num_before=2, num_waiting=4)
