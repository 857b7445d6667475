"""What a plan promises, whatever the requests and the policy."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import Limits, plan
from strategies import BLOCK_SIZE, SPECS, policy_of, view_lists, views

from streamrag.engine import Plan, RequestView, StepBudget, make_policy
from streamrag.engine.rules import KvBudgetLeft
from streamrag.engine.rules.memory_rules import MOST_TRIES, NUM_IN_TURN
from streamrag.engine.rules.sized_steps import count_waiting
from streamrag.engine.rules.tokens import BACKLOG_SHARE, num_filling_tokens
from streamrag.engine.step_size import LEAST_TOKENS, StepCosts
from streamrag.engine.walk import Walk


@dataclass
class Blocks:
    """Memory of blocks that nobody shares."""

    num_free_blocks: int
    asked: list[str] = field(default_factory=list)

    def num_present_tokens(self, request: RequestView) -> int:
        return request.num_computed_tokens or request.num_cached_tokens

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        num_present = self.num_present_tokens(request)
        return max(-(-(num_present + num_tokens) // BLOCK_SIZE) - request.num_blocks, 0)

    def can_evict(self, request: RequestView) -> bool:
        return True

    def num_blocks_freed(self, request: RequestView) -> int:
        self.asked.append(request.request_id)
        return request.num_blocks


LIMITS = st.builds(
    Limits,
    st.integers(1, 400),
    st.integers(1, 6),
    st.booleans(),
    num_partial_tokens=st.none() | st.integers(1, 200),
    step_costs=st.none() | st.builds(StepCosts, st.floats(0, 200), st.floats(0, 1)),
    is_early=st.booleans(),
    num_blocks_kept_from_data=st.none() | st.integers(0, 20),
    max_data_tokens=st.none() | st.integers(1, 200),
    budget=st.none() | st.builds(KvBudgetLeft, st.integers(-5, 30), st.booleans()),
    draft_survival=st.none() | st.floats(0, 1),
    max_adapters=st.none() | st.integers(1, 2),
    adapters_ahead=st.frozensets(st.integers(1, 3), max_size=1),
    prefill_unit=st.sampled_from([1, BLOCK_SIZE, 4 * BLOCK_SIZE]),
    num_blocks_kept_free=st.integers(0, 10),
)


def make(spec: str, requests: list[RequestView], idle: list[RequestView], limits: Limits, memory: Blocks) -> Plan:
    policy = policy_of(spec)
    return plan(policy.order(requests, 10.0), lambda: policy.order(idle, 10.0), limits, memory)


def num_blocks_at_most(requests: list[RequestView]) -> int:
    return max((-(-r.num_tokens // BLOCK_SIZE) for r in requests), default=0)


@pytest.mark.parametrize("spec", SPECS)
@given(view_lists(), view_lists(4, is_idle=True), LIMITS, st.integers(0, 40))
def test_a_plan_keeps_its_promises(
    spec: str, requests: list[RequestView], idle: list[RequestView], limits: Limits, num_free: int
) -> None:
    memory = Blocks(num_free)
    made = make(spec, requests, idle, limits, memory)
    granted = [g.request for g in made.grants]
    evicted = [e.request for e in made.evictions]

    # Never over budget.
    assert sum(g.num_tokens for g in made.grants) <= limits.num_tokens
    assert len(granted) <= limits.num_seqs
    assert all(1 <= g.num_tokens <= g.request.num_remaining_tokens for g in made.grants)
    # Never more adapters than there is room for, and never a part of a unit that is not a prompt's end.
    adapters = limits.adapters_ahead | {r.adapter_id for r in granted if r.adapter_id is not None}
    assert limits.max_adapters is None or len(adapters) <= limits.max_adapters
    ends = (g.request.num_tokens - memory.num_present_tokens(g.request) == g.num_tokens for g in made.grants)
    assert all(is_end or g.num_tokens % limits.prefill_unit == 0 for g, is_end in zip(made.grants, ends, strict=True))
    # Never evicts a request that it schedules, nor anybody twice, nor for nothing.
    assert len({*granted, *evicted}) == len(granted) + len(evicted)
    assert all(e.num_blocks for e in evicted)
    assert not evicted or granted
    # Memory suffices, unless even everything is not enough for the most urgent alone.
    needed = sum(memory.num_blocks_needed(g.request, g.num_tokens) for g in made.grants)
    freed = sum(e.num_blocks for e in evicted)
    assert needed <= num_free + freed or len(granted) == 1
    # No victim more than needed.
    assert not evicted or num_free + freed - evicted[-1].num_blocks < needed
    # Deterministic.
    assert make(spec, requests, idle, limits, Blocks(num_free)) == made


@pytest.mark.parametrize("spec", SPECS)
@given(view_lists(), view_lists(4, is_idle=True), LIMITS, st.integers(0, 40))
def test_victims_are_idle_ones_then_drafts_then_others_and_shown_ones_last(
    spec: str, requests: list[RequestView], idle: list[RequestView], limits: Limits, num_free: int
) -> None:
    made = make(spec, requests, idle, limits, Blocks(num_free))
    evicted = [e.request for e in made.evictions]
    ranks = [0 if r.is_idle else 1 if r.request_class == "draft" else 2 + r.has_output for r in evicted]
    assert ranks == sorted(ranks)
    granted = [g.request for g in made.grants]
    holders = [r for r in requests + idle if r.num_blocks and r not in granted]
    if 3 in ranks:
        assert all(r in evicted for r in holders if not r.has_output)


@given(view_lists(), LIMITS)
def test_the_most_urgent_request_with_work_is_always_served(requests: list[RequestView], limits: Limits) -> None:
    limits = replace(
        limits, is_early=False, num_blocks_kept_from_data=None, budget=None, max_adapters=None, prefill_unit=1
    )
    ordered = make_policy("fcfs").order(requests, 10.0)
    # Among those that have shown a token, whoever holds a slot goes on first. Drafts come last.
    ordered.sort(key=lambda r: 3 if r.request_class == "draft" else 2 if not r.has_output else not r.is_running)
    made = plan(ordered, list, limits, Blocks(0))
    first = next((r for r in ordered if r.num_remaining_tokens), None)
    if first is None or first.is_complete or limits.can_partial_evict:
        assert (made.grants[0].request if made.grants else None) == first


@given(views("r0"), views("r1"))
def test_a_plan_with_memory_to_spare_asks_for_no_eviction(a: RequestView, b: RequestView) -> None:
    memory = Blocks(1000)
    made = plan([a, b], lambda: pytest.fail("asked for the idle ones"), Limits(1000, 8), memory)
    assert made.evictions == ()
    assert memory.asked == []


def test_partial_prompts_evict_only_if_they_may() -> None:
    first = RequestView("first", 0, 0, 16, is_complete=True)
    partial = RequestView("partial", 0, 0, 32, is_complete=False)
    idle = RequestView("idle", 0, 0, 32, 32, 2, is_complete=False, is_idle=True)
    memory = Blocks(1)
    may = plan([first, partial], lambda: [idle], Limits(100, 8, can_partial_evict=True), memory)
    may_not = plan([first, partial], lambda: [idle], Limits(100, 8), memory)
    assert [g.request.request_id for g in may.grants] == ["first", "partial"]
    assert [e.request.request_id for e in may.evictions] == ["idle"]
    assert [g.request.request_id for g in may_not.grants] == ["first"]
    assert may_not.evictions == ()


def test_a_growing_prompt_may_evict_where_allowed_and_a_replaced_one_may_not() -> None:
    limits = Limits(100, 8, can_growing_evict=True)
    idle = RequestView("idle", 0, 0, 32, 32, 2, is_complete=False, is_idle=True)
    growing = RequestView("growing", 0, 0, 32, is_complete=False)
    made = plan([growing], lambda: [idle], limits, Blocks(1))
    assert [g.request.request_id for g in made.grants] == ["growing"]
    assert [e.request.request_id for e in made.evictions] == ["idle"]
    replaced = plan([growing._replace(is_speculative=True)], lambda: [idle], limits, Blocks(1))
    assert replaced.grants == replaced.evictions == ()


def test_a_partial_prompt_that_may_not_evict_does_not_block_a_complete_one() -> None:
    partial = RequestView("partial", 0, 0, 160, is_complete=False)
    complete = RequestView("complete", 1, 1, 32)
    made = plan([partial, complete], list, Limits(1000, 8), Blocks(2))
    assert [g.request.request_id for g in made.grants] == ["complete"]


def test_a_step_tries_only_the_first_partial_prompts_that_do_not_fit() -> None:
    too_big = [RequestView(f"partial {i}", i, i, 160, is_complete=False) for i in range(MOST_TRIES)]
    small = RequestView("small", 98, 98, 16, is_complete=False)
    complete = RequestView("complete", 99, 99, 32)
    one_less = plan([*too_big[1:], small, complete], list, Limits(1000, 8), Blocks(3))
    enough = plan([*too_big, small, complete], list, Limits(1000, 8), Blocks(3))
    assert [g.request.request_id for g in one_less.grants] == ["small", "complete"]
    assert [g.request.request_id for g in enough.grants] == ["complete"]


def test_prompts_that_do_not_fit_are_tried_in_turn_at_no_more_cost() -> None:
    too_big = [RequestView(f"partial {i}", i, i, 160, is_complete=False) for i in range(40)]
    small = RequestView("small", 98, 98, 16, is_complete=False)
    complete = RequestView("complete", 99, 99, 32)
    order = [*too_big, small, complete]
    steps = [plan(order, list, replace(Limits(1000, 8), turn=turn), Blocks(3)) for turn in range(7, 7 + 11)]
    assert sum(any(g.request is small for g in made.grants) for made in steps) == 1
    assert all(len(made.waiting) <= MOST_TRIES + NUM_IN_TURN for made in steps)
    assert {r.request_id for made in steps for r in made.waiting} == {r.request_id for r in too_big}


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_every_prompt_is_tried_at_once_when_no_step_is_ahead(num_ahead: int) -> None:
    too_big = [RequestView(f"partial {i}", i, i, 160, is_complete=False) for i in range(40)]
    small = RequestView("small", 98, 98, 16, is_complete=False)
    made = plan([*too_big, small], list, Limits(1000, 8, num_ahead=num_ahead), Blocks(3))
    assert [g.request.request_id for g in made.grants] == ([] if num_ahead else ["small"])
    assert len(made.waiting) == (MOST_TRIES if num_ahead else 40)


def test_a_complete_prompt_may_evict_a_stuck_partial_prompt_before_it() -> None:
    partial = RequestView("partial", 0, 0, 160, 32, 2, is_complete=False)
    complete = RequestView("complete", 1, 1, 64)
    made = plan([partial, complete], list, Limits(1000, 8), Blocks(2))
    assert [g.request.request_id for g in made.grants] == ["complete"]
    assert [e.request.request_id for e in made.evictions] == ["partial"]


def test_a_lean_step_holds_no_partial_prompt_beside_a_complete_one() -> None:
    complete, partial = RequestView("complete", 0, 0, 32), RequestView("partial", 1, 1, 96, is_complete=False)
    lean = Limits(100, 8, num_partial_tokens=64)
    beside = plan([complete, partial], list, lean, Blocks(100))
    alone = plan([partial], list, lean, Blocks(100))
    assert [(g.request.request_id, g.num_tokens) for g in beside.grants] == [("complete", 32)]
    assert [(g.request.request_id, g.num_tokens) for g in alone.grants] == [("partial", 64)]


def test_a_step_is_filled_up_to_a_share_of_the_backlog() -> None:
    complete = RequestView("complete", 0, 0, 32)
    partial = RequestView("partial", 1, 1, int(80 / BACKLOG_SHARE) - 32, is_complete=False)
    lean = Limits(100, 8, num_partial_tokens=64)
    beside = plan([complete, partial], list, lean, Blocks(100))
    alone = plan([partial._replace(num_tokens=int(80 / BACKLOG_SHARE))], list, lean, Blocks(100))
    assert [g.num_tokens for g in beside.grants] == [32, 48]
    assert [g.num_tokens for g in alone.grants] == [80]


@pytest.mark.parametrize("is_early", [True, False])
def test_a_step_of_partial_prompts_only_is_put_off_while_another_computes(is_early: bool) -> None:
    partial = RequestView("partial", 1, 1, 96, is_complete=False)
    early = Limits(100, 8, num_partial_tokens=64, is_early=is_early)
    made = plan([partial], list, early, Blocks(100), reports_holds=True)
    assert (made.is_put_off, len(made.grants)) == (is_early, not is_early)
    assert made.holds == ((("partial", "LateBinding"),) if is_early else ())
    complete, decoding = RequestView("complete", 0, 0, 32), RequestView("decoding", 0, 0, 33, 32, 3, has_output=True)
    for other in (complete, decoding):
        made = plan([other, partial], list, early, Blocks(100))
        assert made.grants[0].request is other
        assert not made.is_put_off
    ahead = Limits(100, 8, num_partial_tokens=64, is_early=is_early, num_ahead=1)
    assert [g.num_tokens for g in plan([partial], list, ahead, Blocks(100)).grants] == [64]


def test_a_request_that_a_step_completes_waits_little_more_than_the_overhead() -> None:
    short, next_one, long = (RequestView(str(i), i, i, num) for i, num in enumerate((100, 150, 5_000)))
    partial = RequestView("partial", 3, 3, 400_000, is_complete=False)
    limits = Limits(8_192, 8, num_partial_tokens=64, step_costs=StepCosts(overhead=60, arrivals_per_token=0.0))
    shared = plan([short, next_one, long, partial], list, limits, Blocks(1_000))
    of_two = plan([short, next_one, partial], list, limits, Blocks(1_000))
    alone = plan([long, partial], list, limits, Blocks(1_000_000))
    assert [g.num_tokens for g in shared.grants] == [100]  # 150 tokens would cost it more than two overheads of 60
    assert [g.num_tokens for g in of_two.grants] == [100]
    assert [g.num_tokens for g in alone.grants] == [5_000, 3_192]
    dear = replace(limits, step_costs=StepCosts(overhead=80, arrivals_per_token=0.0))
    assert [g.num_tokens for g in plan([short, next_one, long], list, dear, Blocks(1_000)).grants] == [100, 150]


def test_a_long_prompt_is_cut_into_even_parts_where_others_come_often() -> None:
    prompts = [RequestView("long", 0, 0, 9_000), RequestView("longer", 0, 0, 10_000)]
    costs = StepCosts(overhead=300, arrivals_per_token=1e-4)
    limits = Limits(8_192, 8, num_partial_tokens=64, step_costs=costs)
    for waiting, num_parts in ((prompts[:1], 3), (prompts, 2)):
        made = plan(waiting, list, limits, Blocks(10_000))
        num_coming = costs.arrivals_per_token * sum(r.num_tokens for r in waiting)
        assert [g.num_tokens for g in made.grants] == [9_000 / num_parts]
        assert costs.even_part(9_000, costs.best_length(len(waiting) + num_coming)) == 9_000 / num_parts
    rest = RequestView("rest", 0, 0, 3_376)  # a little more than the best step
    assert costs.best_length(1 + costs.arrivals_per_token * 3_376) < 3_000
    assert [g.num_tokens for g in plan([rest], list, limits, Blocks(10_000)).grants] == [3_376]
    partial = RequestView("partial", 0, 0, 5_000, is_complete=False)
    shown = RequestView("preempted", 0, 0, 5_000, has_output=True)
    for other in (partial, shown):  # nobody waits for the first token of these
        made = plan([other], list, replace(limits, num_partial_tokens=None), Blocks(1_000))
        assert [g.num_tokens for g in made.grants] == [5_000]
    assert LEAST_TOKENS < 300


@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ((1_130, 142), [1_130, 142]),  # best are 1,228: a part of the second would need a step as well
        ((1_900, 50), [950, 50]),  # best are 1,334; the short one delays the long one little
        ((1_130, 5_000), [1_130]),  # a part of the long one, 1,667, is not worth the first one's wait
    ],
)
def test_a_step_has_even_parts_of_all_its_prompts(lengths: tuple[int, ...], num_tokens: list[int]) -> None:
    order = [RequestView(str(i), i, i, length) for i, length in enumerate(lengths)]
    limits = Limits(8_192, 8, step_costs=StepCosts(overhead=200, arrivals_per_token=8e-4))
    assert [g.num_tokens for g in plan(order, list, limits, Blocks(10_000)).grants] == num_tokens


AHEAD = [
    [RequestView("partial", 0, 0, 30_000, is_complete=False)],
    [RequestView("preempted", 0, 0, 30_000, has_output=True)],
    [RequestView(f"partial{i}", 0, 0, 2_000, is_complete=False) for i in range(4)],
]


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_tokens", [200, 900, 2_000])
def test_a_prompt_gets_its_part_of_a_step_that_others_have_filled(ahead: list[RequestView], num_tokens: int) -> None:
    order, costs = [*ahead, RequestView("awaited", 9, 9, num_tokens)], StepCosts(overhead=570, arrivals_per_token=1e-3)
    made = plan(order, list, Limits(8_192, 8, num_partial_tokens=2_048, step_costs=costs), Blocks(100_000))
    num_coming = costs.arrivals_per_token * num_tokens
    part = math.ceil(costs.even_part(num_tokens, costs.best_length(1 + num_coming)))
    assert made.grants[-1].request is order[-1]
    assert made.grants[-1].num_tokens == part


def test_every_answer_has_its_next_token_in_a_short_step() -> None:
    answers = [RequestView(f"a{i}", 0, 0, 301, 300, 19, has_output=True, is_running=True) for i in range(300)]
    order = [*answers, RequestView("awaited", 9, 9, 400)]
    made = plan(order, list, Limits(8_192, 512, step_costs=StepCosts(20, 1e-3)), Blocks(10_000))
    assert [grant.request for grant in made.grants] == order


def test_a_step_has_fewer_tokens_behind_a_long_prompt() -> None:
    costs = StepCosts(overhead=300, arrivals_per_token=1e-4, pair_cost=1e-4)
    limits = Limits(8_192, 8, step_costs=costs)
    fresh, far = RequestView("fresh", 0, 0, 9_000), RequestView("far", 0, 0, 39_000, 30_000, 2_000)
    num_fresh, num_far = (plan([r], list, limits, Blocks(9_999)).grants[0].num_tokens for r in (fresh, far))
    assert num_far < num_fresh / 2
    for num_tokens, request in ((num_fresh, fresh), (num_far, far)):
        before = request.num_computed_tokens
        num_waiting = 1 + costs.arrivals_per_token * costs.length(9_000, before)
        part = costs.even_part(costs.length(9_000, before), costs.best_length(num_waiting))
        assert costs.length(num_tokens - 1, before) < part <= costs.length(num_tokens, before)
    # What comes back from host memory is not counted as work, but what is there is attended to.
    kept = RequestView("kept", 0, 0, 39_000, num_kept_tokens=30_000)
    assert kept.num_likely_tokens == 9_000


def test_a_long_step_of_complete_prompts_is_put_off_where_others_come_often() -> None:
    often, seldom = StepCosts(overhead=300, arrivals_per_token=1e-4), StepCosts(overhead=300, arrivals_per_token=1e-6)
    long, short = RequestView("long", 0, 0, 9_000), RequestView("short", 0, 0, 100)

    def is_put_off(*order: RequestView, costs: StepCosts | None = often, **limits: Any) -> bool:
        made = plan(order, list, Limits(8_192, 8, is_early=True, step_costs=costs, **limits), Blocks(9_999))
        assert made.is_put_off == (not made.grants)
        return made.is_put_off

    assert is_put_off(long)
    assert not is_put_off(short)
    assert not is_put_off(long, costs=None)
    assert not is_put_off(long, costs=seldom)
    assert not is_put_off(long, num_ahead=1), "who reads an answer waits for its next token"
    assert not is_put_off(*(long._replace(request_id=str(i)) for i in range(40))), "many wait, and a step is full"
    assert not is_put_off(long._replace(has_output=True)), "its answer is being read"
    assert not is_put_off(long, costs=StepCosts(overhead=0, arrivals_per_token=0)), "nobody comes"


def test_a_plan_that_can_do_nothing_is_not_put_off() -> None:
    partial = RequestView("partial", 1, 1, 96, is_complete=False)
    made = plan([partial], list, Limits(100, 8, is_early=True), Blocks(0))
    assert not made.is_put_off
    assert made.waiting == (partial,)


@pytest.mark.parametrize(
    ("num_free", "num_blocks", "is_speculative", "is_backlog"),
    [(100, 0, False, True), (100, 0, True, False), (10, 0, False, False), (10, 3, False, True), (10, 3, True, False)],
)
def test_a_backlog_is_what_must_be_computed(
    num_free: int, num_blocks: int, is_speculative: bool, is_backlog: bool
) -> None:
    lean = Limits(100, 8, num_partial_tokens=64, num_blocks_kept_free=10)
    far = RequestView(
        "far", 1, 1, int(100 / BACKLOG_SHARE), 0, num_blocks, is_complete=False, is_speculative=is_speculative
    )
    near = RequestView("near", 0, 0, 100, 16, 7, is_complete=False)
    made = plan([near, far], list, lean, Blocks(num_free))
    assert sum(g.num_tokens for g in made.grants) == (100 if is_backlog else 64)


def test_partial_prompts_go_on_beside_a_decode() -> None:
    decoding = RequestView("decoding", 0, 0, 33, 32, 3, has_output=True, is_running=True)
    partial = RequestView("partial", 1, 1, 96, is_complete=False)
    made = plan([decoding, partial], list, Limits(100, 8, num_partial_tokens=64), Blocks(100))
    assert [g.num_tokens for g in made.grants] == [1, 64]


def test_no_request_starts_behind_one_that_does_not_fit() -> None:
    running = RequestView("running", 0, 0, 160, 159, 10, has_output=True)
    big = RequestView("big", 1, 1, 160)
    small = RequestView("small", 2, 2, 16)
    made = plan([running, big, small], list, Limits(1000, 8), Blocks(5))
    assert [g.request.request_id for g in made.grants] == ["running"]


def test_the_callers_choice_decides_what_becomes_of_a_victim() -> None:
    new = RequestView("new", 0, 0, 32)
    idle = RequestView("idle", 0, 0, 32, 32, 2, is_complete=False, is_idle=True)
    made = plan([new], lambda: [idle], Limits(100, 8), Blocks(0), fate=lambda victim: "swap")
    assert [e.fate for e in made.evictions] == ["swap"]


def test_an_evicted_partial_prompt_starts_again_only_where_memory_is_left_or_it_is_complete() -> None:
    evicted = RequestView("r", 0.0, 0.0, 4 * BLOCK_SIZE, is_complete=False, was_evicted=True)
    limits = Limits(1_000, 4, num_blocks_kept_free=3)
    assert not make("fcfs", [evicted], [], limits, Blocks(6)).grants
    assert make("fcfs", [evicted], [], limits, Blocks(7)).grants
    assert make("fcfs", [evicted._replace(was_evicted=False)], [], limits, Blocks(6)).grants
    assert make("fcfs", [evicted._replace(is_complete=True)], [], limits, Blocks(6)).grants


def test_requests_that_hold_a_slot_come_first_among_those_with_output() -> None:
    preempted = RequestView("preempted", 0, 0, 33, 0, 0, has_output=True)
    running = RequestView("running", 1, 1, 33, 32, 3, has_output=True, is_running=True)
    made = make("arrival", [preempted, running], [], Limits(100, 1), Blocks(10))
    assert [g.request for g in made.grants] == [running]


def data(name: str, **fields: object) -> RequestView:
    """Of a session."""
    return made_view(name, is_complete=False, request_class="stream", **fields)


def made_view(name: str, **fields: object) -> RequestView:
    return RequestView(name, 0.0, 0.0, **{"num_tokens": 160, **fields})  # type: ignore[arg-type]


def granted(order: list[RequestView], limits: Limits, num_free: int = 1_000) -> dict[str, int]:
    made = plan(order, list, limits, Blocks(num_free))
    return {grant.request.request_id: grant.num_tokens for grant in made.grants}


def test_data_of_sessions_leave_reserved_blocks_free_and_questions_do_not() -> None:
    limits = Limits(1_000, 8, can_partial_evict=True, num_blocks_kept_from_data=5)
    order = [data("data"), made_view("partial", is_complete=False), made_view("asked")]
    assert granted(order, limits, num_free=35).keys() == {"data", "partial", "asked"}
    assert granted(order[:1], limits, num_free=15) == {"data": 160}
    assert granted(order, limits, num_free=14).keys() == {"partial"}
    assert granted(order[::-1], limits, num_free=34).keys() == {"partial", "asked"}


def test_data_that_lack_only_reserved_blocks_wait_if_no_other_request_goes_on() -> None:
    def waiting(order: list[RequestView], num_free: int) -> list[str]:
        made = plan(order, list, Limits(1_000, 8, num_blocks_kept_from_data=5), Blocks(num_free))
        return [request.request_id for request in made.waiting]

    assert waiting([data("data"), made_view("asked", num_tokens=16)], 12) == []
    assert waiting([data("data")], 12) == ["data"]
    assert waiting([data("data"), made_view("asked", num_tokens=16)], 9) == ["data"]


def test_a_prompt_that_waits_for_its_load_claims_no_memory() -> None:
    absent, loaded = RequestView("absent", 0, 0, 96, num_cached_tokens=96), RequestView("loaded", 1, 1, 97, 96, 6)
    made = plan([absent, loaded], list, Limits(100, 8, budget=KvBudgetLeft(7, False)), Blocks(10))
    assert [(g.request, g.num_tokens, g.num_blocks_claimed) for g in made.grants] == [(absent, 0, None), (loaded, 1, 7)]


def test_data_of_one_session_have_an_equal_share_of_a_step_within_their_bounds() -> None:
    limits = Limits(8_192, 64, max_data_tokens=1_024)
    long = data("long", num_tokens=9_000)
    assert granted([long], limits) == {"long": 1_024}
    many = [long, *(data(f"d{i}", num_tokens=9_000) for i in range(15))]
    assert set(granted(many, limits).values()) == {8_192 // 16}
    assert set(granted([long, *(data(f"d{i}", num_tokens=9_000) for i in range(99))], limits).values()) == {128}
    assert granted([long, made_view("asked", num_tokens=5_000)], limits) == {"long": 1_024, "asked": 5_000}


def test_complete_prompts_begin_while_what_they_may_come_to_need_is_within_the_budget() -> None:
    asked = [made_view(f"q{i}", num_answer_tokens=40) for i in range(4)]  # 160 and 40 tokens: 13 blocks each
    limits = Limits(1_000, 8, budget=KvBudgetLeft(30, has_claims=False))
    made = plan(asked, list, limits, Blocks(1_000))
    assert [(g.request.request_id, g.num_blocks_claimed) for g in made.grants] == [("q0", 13), ("q1", 13)]
    begun = asked[2]._replace(has_claim=True)
    assert granted([*asked[:2], begun], replace(limits, budget=KvBudgetLeft(12, has_claims=True))) == {"q2": 160}


def test_a_request_over_the_budget_runs_alone_and_no_complete_one_passes_it() -> None:
    large, small = made_view("large", num_answer_tokens=400), made_view("small", num_tokens=16)
    limits = Limits(1_000, 8, budget=KvBudgetLeft(30, has_claims=False))
    assert granted([large, small], limits) == {"large": 160}
    others_run = replace(limits, budget=KvBudgetLeft(20, has_claims=True))
    assert granted([large, small], others_run) == {}
    assert granted([large, small, made_view("partial", is_complete=False)], others_run) == {"partial": 160}


def test_a_shared_block_is_computed_by_the_first_request_that_needs_it() -> None:
    def next_block(request: RequestView, num_tokens: int) -> tuple[str, int] | None:
        """Requests of one letter share ten blocks."""
        index = num_tokens // BLOCK_SIZE
        return (request.request_id[0] if index < 10 else request.request_id, index) if index < 12 else None

    def computing(order: list[RequestView], max_data_tokens: int | None = None) -> list[str]:
        limits = Limits(1_000, 8, max_data_tokens=max_data_tokens)
        made = plan(order, list, limits, Blocks(1_000), next_block=next_block)
        return [grant.request.request_id for grant in made.grants]

    a1, a2, b1 = (made_view(name, num_tokens=200) for name in ("a1", "a2", "b1"))
    assert computing([a1, a2, b1]) == ["a1", "a2", "b1"]  # a2 finds in this step what a1 computes
    part = a1._replace(request_class="stream", is_complete=False)
    assert computing([part, part._replace(request_id="a2"), b1], max_data_tokens=64) == ["a1", "b1"]
    holds = a2._replace(num_computed_tokens=20, num_blocks=2)
    leads = a1._replace(num_computed_tokens=20, num_blocks=2, is_running=True)
    assert computing([leads, holds]) == ["a1"]  # it would not look for what it lacks before it waits
    assert computing([leads, holds._replace(is_running=True)]) == ["a1", "a2"]
    assert computing([leads._replace(is_complete=False), holds]) == ["a1", "a2"]
    assert computing([leads, holds._replace(num_computed_tokens=50, num_blocks=4)]) == ["a1", "a2"]
    assert computing([holds]) == ["a2"]  # whoever led is gone


@given(view_lists(), st.floats(0, 1e-2), st.floats(0, 1e-3))
def test_the_count_of_waiting_prompts_agrees_with_their_views_and_sizes(
    order: list[RequestView], arrivals: float, pair: float
) -> None:
    costs = StepCosts(500.0, arrivals, pair)
    awaited = [r for r in order if r.is_complete and not r.has_output and r.request_class != "draft"]
    waiting = [r for r in awaited if r.num_likely_tokens]
    lengths = [costs.length(r.num_likely_tokens, r.num_tokens - r.num_likely_tokens) for r in waiting]
    prompts = Walk(order, list, StepBudget(512, 8), Blocks(1_000)).prompts
    assert count_waiting(prompts, costs) == pytest.approx(len(waiting) + arrivals * sum(lengths))


@given(view_lists())
def test_a_backlog_is_what_is_likely_to_be_computed(order: list[RequestView]) -> None:
    complete = [view._replace(is_complete=True) for view in order]
    most = num_filling_tokens(Walk(complete, list, StepBudget(512, 8), Blocks(1_000)), num_blocks_short=0)
    awaited = [view for view in complete if view.request_class != "draft"]
    assert most == int(sum(view.num_likely_tokens for view in awaited) * BACKLOG_SHARE)


def test_data_of_a_session_take_no_memory_from_others_where_some_is_kept_from_them() -> None:
    idle = made_view("idle", num_computed_tokens=160, num_blocks=10, is_complete=False, is_idle=True)
    alone = data("data")
    kept, free = (Limits(1_000, 8, can_partial_evict=True, num_blocks_kept_from_data=num) for num in (0, None))
    made = plan([alone], lambda: [idle], kept, Blocks(2))
    assert (made.grants, made.evictions, made.waiting) == ((), (), (alone,))
    assert [e.request for e in plan([alone], lambda: [idle], free, Blocks(2)).evictions] == [idle]


def test_the_first_of_several_requests_that_compute_the_same_leads() -> None:
    def next_block(request: RequestView, num_tokens: int) -> int:
        return num_tokens // BLOCK_SIZE

    computes = made_view("first", num_computed_tokens=20, num_blocks=2, is_running=True)
    too = computes._replace(request_id="second", is_complete=False)
    follower = computes._replace(request_id="third", is_running=False)
    made = plan([computes, too, follower], list, Limits(1_000, 8), Blocks(1_000), next_block=next_block)
    # It waits for the complete prompt. For the partial one, which computes the same, it would not.
    assert [grant.request.request_id for grant in made.grants] == ["first", "second"]


def test_a_begun_request_may_evict_prompts_over_the_budget_before_it() -> None:
    over = made_view("over", num_answer_tokens=400)
    holds = made_view("holds", num_computed_tokens=32, num_blocks=2, num_answer_tokens=400)
    begun = made_view("begun", num_tokens=32, has_claim=True)
    limits = Limits(1_000, 8, budget=KvBudgetLeft(20, has_claims=True))
    for order in ([holds, begun], [over, holds, begun]):
        made = plan(order, list, limits, Blocks(0))
        assert [g.request for g in made.grants] == [begun]
        assert [e.request for e in made.evictions] == [holds]
