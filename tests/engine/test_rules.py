"""Each rule alone, and the loop without any; `test_planning.py` has all of them together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamrag.engine import Eviction, Grant, Plan, RequestView, StepBudget, plan
from streamrag.engine import rules as all_rules
from streamrag.engine.rules import (
    AdapterSlots,
    ConnectorLookup,
    DataHighWater,
    DataShare,
    DraftMemory,
    DraftPrice,
    GroupedPrefills,
    KvBudget,
    KvBudgetLeft,
    LateBinding,
    LeanPartials,
    LowWater,
    PartialEviction,
    Rule,
    RuleList,
    ShortBeforeReplaced,
    ShortDrafts,
    SizedSteps,
    Turns,
    WholeUnits,
)
from streamrag.engine.step_size import StepCosts
from streamrag.engine.walk import Wait

BLOCK_SIZE = 16
BUDGET = StepBudget(1_000, 8)


@dataclass
class Blocks:
    """Memory of blocks that nobody shares."""

    num_free_blocks: int

    def num_present_tokens(self, request: RequestView) -> int:
        return request.num_computed_tokens

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        return -(-(request.num_computed_tokens + num_tokens) // BLOCK_SIZE) - request.num_blocks

    def can_evict(self, request: RequestView) -> bool:
        return True

    def num_blocks_freed(self, request: RequestView) -> int:
        return request.num_blocks


def complete(name: str, num_tokens: int = 160, **fields: object) -> RequestView:
    return RequestView(name, 0.0, 0.0, num_tokens, **fields)  # type: ignore[arg-type]


def partial(name: str, num_tokens: int = 160, **fields: object) -> RequestView:
    return complete(name, num_tokens, is_complete=False, **fields)


def holding(request: RequestView, num_blocks: int) -> RequestView:
    """The same with KV: half of it computed, in so many blocks."""
    return request._replace(num_computed_tokens=request.num_tokens // 2, num_blocks=num_blocks)


def planned(
    order: Sequence[RequestView],
    *rules: Rule,
    num_free: int = 1_000,
    budget: StepBudget = BUDGET,
    idle: Callable[[], Sequence[RequestView]] = list,
) -> Plan:
    return plan(order, idle, budget, Blocks(num_free), RuleList(rules))


def tokens(made: Plan) -> dict[str, int]:
    return {grant.request.request_id: grant.num_tokens for grant in made.grants}


def test_without_rules_the_budget_goes_down_the_order() -> None:
    order = [partial("a", 400), complete("b", 400), partial("c", 400)]
    assert tokens(planned(order)) == {"a": 400, "b": 400, "c": 200}
    assert tokens(planned(order, budget=StepBudget(1_000, 2))) == {"a": 400, "b": 400}
    assert tokens(planned(order, budget=StepBudget(1_000, 3, num_ahead=2))) == {"a": 400}


def test_without_rules_complete_prompts_take_memory_from_behind_and_partial_ones_wait() -> None:
    behind, idle = holding(partial("behind"), 10), holding(partial("idle"), 5)
    made = planned([complete("a"), behind], num_free=0, idle=lambda: [idle])
    assert tokens(made) == {"a": 160}
    assert [e.request.request_id for e in made.evictions] == ["idle", "behind"]
    made = planned([partial("a"), behind._replace(num_blocks=0, num_computed_tokens=0)], num_free=9)
    assert (tokens(made), [r.request_id for r in made.waiting]) == ({}, ["a", "behind"])


def test_partial_eviction_lets_partial_prompts_take_memory_all_or_those_that_grow() -> None:
    idle = [holding(partial("idle"), 10)]

    def is_served(request: RequestView, rule: Rule) -> bool:
        return bool(planned([request], rule, num_free=0, idle=lambda: idle).grants)

    grows, changes = partial("grows"), partial("changes", is_speculative=True)
    assert not is_served(grows, PartialEviction())
    assert is_served(grows, PartialEviction(can_growing=lambda: True))
    assert not is_served(changes, PartialEviction(can_growing=lambda: True))
    assert is_served(changes, PartialEviction(can_partial=True))


def test_lean_partials_limits_them_all_together_and_gives_none_beside_a_complete_one() -> None:
    lean = LeanPartials(lambda: 100)
    assert tokens(planned([partial("a", 80), partial("b", 80)], lean)) == {"a": 80, "b": 20}
    assert tokens(planned([complete("asked", 10), partial("a", 80)], lean)) == {"asked": 10}
    assert tokens(planned([partial("a", 80)], LeanPartials(lambda: None))) == {"a": 80}


def test_lean_partials_fills_a_step_up_to_a_share_of_the_backlog() -> None:
    order = [complete("asked", 10), partial("a", 3_190)]
    assert tokens(planned(order, LeanPartials(lambda: 64))) == {"asked": 10, "a": 3_200 // 32 - 10}
    waits_for_memory = LeanPartials(lambda: 64, num_blocks_short=2_000)
    assert tokens(planned(order, waits_for_memory)) == {"asked": 10}


def test_short_before_replaced_limits_one_partial_prompt_by_its_own_number() -> None:
    short = partial("a", num_step_tokens=16)
    assert tokens(planned([short, partial("b")], ShortBeforeReplaced())) == {"a": 16, "b": 160}
    assert tokens(planned([short._replace(is_complete=True)], ShortBeforeReplaced())) == {"a": 160}


def test_a_draft_takes_from_others_no_more_than_one_of_its_tokens_saves() -> None:
    """A step's overhead of 100 tokens, half of which a drafted token saves, shared by all others."""
    price = DraftPrice(lambda: StepCosts(100.0, 0.0), lambda: 0.5)
    draft, other = complete("draft", request_class="draft"), complete("other", request_class="draft")
    assert tokens(planned([draft, other], price)) == {"draft": 160, "other": 160}
    assert tokens(planned([draft, partial("a"), other], price)) == {"a": 160, "draft": 50, "other": 50}
    assert tokens(planned([draft], price, budget=StepBudget(1_000, 8, num_ahead=5))) == {"draft": 10}
    assert not planned([draft], price, budget=StepBudget(1_000, 88, num_ahead=51)).grants
    waits = partial("waits", 1 << 20)  # nothing of it fits
    assert tokens(planned([waits, draft], price, num_free=20)) == {"draft": 160}
    unknown = DraftPrice(lambda: None, lambda: 0.5)
    assert tokens(planned([draft, partial("a")], unknown)) == {"a": 160}
    assert tokens(planned([draft], unknown)) == {"draft": 160}


def test_a_draft_beside_a_partial_draft_alone_has_a_price() -> None:
    price = DraftPrice(lambda: StepCosts(100.0, 0.0), lambda: 0.5)
    begun, draft = (make(name, request_class="draft") for make, name in ((partial, "begun"), (complete, "draft")))
    assert tokens(planned([begun, draft], price)) == {"begun": 160, "draft": 50}


def test_drafts_come_last_and_lend_their_blocks() -> None:
    draft = holding(complete("draft", request_class="draft", has_output=True), 5)
    made = planned([draft, complete("a", 80)], DraftMemory(0), num_free=0)
    assert (tokens(made), [e.request.request_id for e in made.evictions]) == ({"a": 80}, ["draft"])


def test_drafts_evict_no_request_and_leave_memory_free_while_others_compute() -> None:
    draft, idle = complete("draft", request_class="draft"), holding(partial("idle"), 10)
    order = [partial("a"), draft]
    assert tokens(planned(order, DraftMemory(5), num_free=25, idle=lambda: [idle])) == {"a": 160, "draft": 160}
    assert tokens(planned(order, DraftMemory(5), num_free=24, idle=lambda: [idle])) == {"a": 160}
    alone = planned([draft], DraftMemory(5), num_free=0, idle=lambda: [idle])
    assert (tokens(alone), len(alone.evictions)) == ({"draft": 160}, 1)


def test_short_drafts_limits_drafts_only() -> None:
    draft = complete("draft", request_class="draft")
    assert tokens(planned([draft, complete("a")], ShortDrafts(lambda: 50))) == {"draft": 50, "a": 160}
    assert tokens(planned([draft], ShortDrafts(lambda: None))) == {"draft": 160}


def test_data_share_divides_a_step_among_all_that_have_something_to_compute() -> None:
    data = [partial(name, 900, request_class="stream") for name in "ab"]
    assert tokens(planned([*data, complete("asked", 40)], DataShare(800))) == {"a": 333, "b": 333, "asked": 40}
    assert tokens(planned(data[:1], DataShare(800))) == {"a": 800}
    assert tokens(planned(data, DataShare(800), budget=StepBudget(200, 8))) == {"a": 128, "b": 72}


def test_turns_asks_others_in_each_step_once_some_did_not_fit() -> None:
    rule, order = Turns(), [partial(f"r{i}") for i in range(20)]
    asked = []
    for _ in range(3):
        waiting = planned([complete("fits", 16), *order], rule, num_free=1).waiting
        asked.append([r.request_id for r in waiting])
    assert [names[:4] for names in asked] == [["r0", "r1", "r2", "r3"]] * 3
    assert [names[4:] for names in asked] == [[], ["r4", "r5", "r6"], ["r7", "r8", "r9", "r10"]]
    nobody_fits = planned(order, rule, num_free=0)
    assert len(nobody_fits.waiting) == 20  # then there is time to ask everybody


def test_a_step_has_room_for_some_adapters_and_those_of_requests_that_decode_come_first() -> None:
    order = [complete(f"q{number}", 16)._replace(adapter_id=number or None) for number in (0, 1, 2, 1, 3)]
    order = [request._replace(request_id=f"{index}") for index, request in enumerate(order)]
    for ahead, served in ((set(), "0123"), ({2}, "0123"), ({3}, "0134"), ({1, 3}, "0134"), ({8, 9}, "0")):
        assert "".join(tokens(planned(order, AdapterSlots(2, lambda ahead=ahead: ahead)))) == served


def test_whole_units_grants_whole_blocks_or_the_rest_of_a_prompt_and_ends_a_step_without_room_for_one() -> None:
    lean = LeanPartials(lambda: 20)
    for num_left, granted in ((160, 64), (64, 64), (50, 50)):
        assert tokens(planned([partial("r", num_left)], lean, WholeUnits(64))) == {"r": granted}
    order = [complete("long", 160), complete("short", 8)]
    assert tokens(planned(order, WholeUnits(64), budget=StepBudget(150, 8))) == {"long": 128, "short": 8}
    assert tokens(planned(order, WholeUnits(64), budget=StepBudget(60, 8))) == {}


def test_low_water_keeps_blocks_free_where_one_that_was_evicted_starts_again() -> None:
    again = partial("again", was_evicted=True)
    assert tokens(planned([again], LowWater(5), num_free=15)) == {"again": 160}
    assert planned([again], LowWater(5), num_free=14).waiting == (again,)
    for other in (again._replace(was_evicted=False), again._replace(is_complete=True), holding(again, 5)):
        assert planned([other], LowWater(5), num_free=14).grants


def test_kv_budget_lets_complete_prompts_begin_one_after_the_other_and_none_passes() -> None:
    first, second, small = complete("a", num_answer_tokens=16), complete("b", num_answer_tokens=16), complete("c", 16)
    left = KvBudgetLeft(12, has_claims=False)
    assert tokens(planned([first, second, small], KvBudget(lambda: left))) == {"a": 160}
    assert tokens(planned([first, second._replace(has_claim=True)], KvBudget(lambda: left))) == {"a": 160, "b": 160}
    assert tokens(planned([first], KvBudget(lambda: KvBudgetLeft(2, has_claims=False)))) == {"a": 160}
    assert tokens(planned([first], KvBudget(lambda: KvBudgetLeft(2, has_claims=True)))) == {}
    made = planned(
        [holding(first, 5), complete("d", 16, has_claim=True)], KvBudget(lambda: KvBudgetLeft(2, True)), num_free=0
    )
    assert [e.request.request_id for e in made.evictions] == ["a"]


def test_sized_steps_ends_a_step_where_more_would_make_others_wait() -> None:
    order = [complete("a", 300), complete("b", 300)]
    assert tokens(planned(order, SizedSteps(lambda: StepCosts(overhead=1_000, arrivals_per_token=0.0)))) == {
        "a": 300,
        "b": 300,
    }
    assert tokens(planned(order, SizedSteps(lambda: StepCosts(overhead=50, arrivals_per_token=0.0)))) == {"a": 300}
    often = SizedSteps(lambda: StepCosts(overhead=50, arrivals_per_token=1.0))  # steps of 256 tokens are best
    assert tokens(planned([complete("a", 600)], often)) == {"a": 300}
    assert tokens(planned([complete("a", 260)], often)) == {"a": 260}, "no step for a rest of four tokens"
    looked_up = complete("a", num_computed_tokens=160, num_blocks=10)  # by a connector: nothing of it is computed yet
    few = SizedSteps(lambda: StepCosts(overhead=50, arrivals_per_token=0.0))
    assert tokens(planned([looked_up, *order[1:]], few))["b"] == 300
    assert tokens(planned(order, SizedSteps(lambda: None))) == {"a": 300, "b": 300}


def test_grouped_prefills_lets_one_wait_for_what_another_computes() -> None:
    def next_block(request: RequestView, num_tokens: int) -> int:
        return num_tokens // BLOCK_SIZE

    leader, follower = holding(complete("a"), 5)._replace(is_running=True), holding(complete("b"), 5)
    assert tokens(planned([leader, follower], GroupedPrefills(next_block))) == {"a": 80}
    assert tokens(planned([leader, follower], GroupedPrefills(lambda request, num: None))) == {"a": 80, "b": 80}


def test_connector_lookup_lets_partial_prompts_wait_as_the_connector_says() -> None:
    order = [partial("a"), complete("b", 32)]
    assert tokens(planned(order, ConnectorLookup(lambda request: Wait.SKIP))) == {"b": 32}
    made = planned(order, ConnectorLookup(lambda request: Wait.MEMORY))
    assert (tokens(made), made.waiting) == ({"b": 32}, (order[0],))


def test_data_high_water_keeps_blocks_for_questions_and_lets_data_take_none() -> None:
    data, idle = partial("data", request_class="stream"), [holding(partial("idle"), 10)]
    assert tokens(planned([data], DataHighWater(5), num_free=15)) == {"data": 160}
    assert tokens(planned([data, complete("asked", 16)], DataHighWater(5), num_free=14)) == {"asked": 16}
    made = planned([data], PartialEviction(can_partial=True), DataHighWater(5), num_free=0, idle=lambda: idle)
    assert (made.grants, made.evictions) == ((), ())


def test_a_question_takes_from_data_what_nothing_else_can_give_it() -> None:
    data, asked = holding(partial("data", 160, request_class="stream"), 5), complete("asked", 160)
    made = planned([data, asked], DataHighWater(5), num_free=7)
    assert (tokens(made), [e.request.request_id for e in made.evictions]) == ({"asked": 160}, ["data"])
    last = holding(partial("last"), 5)  # which comes behind the question: no need to take from the data
    made = planned([data, asked, last], DataHighWater(5), num_free=7)
    assert (tokens(made), [e.request.request_id for e in made.evictions]) == ({"asked": 160}, ["last"])


@pytest.mark.parametrize("is_early", [True, False])
def test_late_binding_puts_off_prompts_that_may_wait_while_a_step_computes(is_early: bool) -> None:
    late = LateBinding(lambda: is_early)
    assert planned([partial("a")], late).is_put_off is is_early
    assert not planned([partial("a")], late, budget=StepBudget(1_000, 8, num_ahead=1)).is_put_off
    assert not planned([partial("a"), complete("asked")], late).is_put_off
    long = SizedSteps(lambda: StepCosts(overhead=1, arrivals_per_token=1.0))
    assert planned([complete("asked")], long, LateBinding(lambda: is_early, long)).is_put_off is is_early


def test_a_plan_names_the_requests_held_back_and_the_rule_that_did_so() -> None:
    def holds(order: Sequence[RequestView], *rules: Rule, num_free: int = 1_000) -> dict[str, str]:
        made = plan(order, list, BUDGET, Blocks(num_free), RuleList(rules), reports_holds=True)
        return dict(made.holds)

    lean, low = LeanPartials(lambda: 100), LowWater(5)
    a, again, asked = partial("a", 100), partial("again", was_evicted=True), complete("asked", 600)
    assert holds([a, asked], lean) == {}
    assert holds([asked, a, again], lean, low) == {"a": "LeanPartials", "again": "LeanPartials"}
    assert holds([again], low, num_free=14) == {"again": "LowWater"}
    assert holds([partial("b"), complete("c"), complete("new", 16)], num_free=9) == {"b": "Memory", "new": "Memory"}
    assert holds([complete("all", 1_000), a, asked]) == {"a": "StepBudget", "asked": "StepBudget"}
    sized = SizedSteps(lambda: StepCosts(overhead=50, arrivals_per_token=0.0))
    assert holds([complete("b"), asked, a], sized) == {"asked": "SizedSteps", "a": "SizedSteps"}
    assert holds([partial("b")], LateBinding(lambda: True)) == {"b": "LateBinding"}


def test_rules_about_memory_count_what_a_request_needs_after_all_others_have_limited_its_tokens() -> None:
    order = [complete("asked", 16), complete("draft", 160, request_class="draft")]
    limited, kept = ShortDrafts(lambda: 16), DraftMemory(5)
    assert tokens(planned(order, kept, num_free=10)) == {"asked": 16}
    assert tokens(planned(order, kept, limited, num_free=10)) == {"asked": 16, "draft": 16}
    assert tokens(planned(order, limited, kept, num_free=10)) == {"asked": 16, "draft": 16}


def test_a_plan_over_its_budget_or_against_the_requests_that_it_serves_is_refused() -> None:
    a, b, idle = complete("a"), complete("b"), holding(partial("idle"), 5)
    budget = StepBudget(100, 4, num_ahead=1, num_ending=1)
    Plan(budget, (Grant(a, 98), Grant(b, 1), Grant(complete("loaded"), 0)), (Eviction(idle, "recompute"),))
    Plan(StepBudget(4, 2, num_ahead=5), (Grant(a, 0),))
    for grants, evicted in (
        ([Grant(a, 100)], []),
        ([Grant(a, 1), Grant(b, 1), Grant(idle, 1)], []),
        ([Grant(a, 1)], [a]),
        ([Grant(a, 1)], [idle, idle]),
    ):
        with pytest.raises(AssertionError):
            Plan(budget, tuple(grants), tuple(Eviction(victim, "recompute") for victim in evicted))


def test_each_rule_says_in_one_sentence_what_it_does_and_is_tried_here_alone() -> None:
    rules = [each for each in vars(all_rules).values() if isinstance(each, type) and issubclass(each, Rule)]
    source = Path(__file__).read_text()
    for rule in rules:
        if rule is Rule:
            continue
        assert rule.__doc__
        assert rule.__doc__.split("\n\n")[0].count(".") == 1
        assert f"{rule.__name__}(" in source
