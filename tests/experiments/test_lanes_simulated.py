"""Lanes in virtual time: engines of one step time, small cells, and what a decode lane charges for a prompt."""

import asyncio
import statistics
from dataclasses import replace

import lanes_simulated
import lanes_whole
import pytest
from lane_play import LANE_ROUTERS, Outcome, Timing, Way, play
from lanes_simulated import ARMS, BUDGETS, LINKS, PROFILE, Cell, best, best_of_each, report, rows_of, run, splits
from routing.flowguard import overload
from routing.loads import Piece, Query
from simulated_lanes import DEPTH_RULES, DRAFT_SHARE, Acceptance, LaneEngine, LaneOptions, accepted
from speculation_policies import SpecuStream
from study_figures import decimal

from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile
from streamrag.routing import ReplicaState

STEP_S = 0.5


class Half:
    """Steps of half a second."""

    kv_tokens = 1 << 20

    def step_s(self, parts):
        assert parts
        return STEP_S


def options(rule="none", acceptance=1.0, budget=512):
    return LaneOptions(Half(), budget, rule, acceptance, most_open=16)


def ask(engine, num_blocks=2, num_output=9, first=0):
    """Return when the first and the last token came."""

    async def main():
        async with engine.stream(range(first, first + num_blocks), num_output, is_complete=True) as stream:
            return [asyncio.get_running_loop().time() async for _ in stream]

    return run_virtual(main())


def query(at_s=0.0, document=1, num_output=3):
    return Query(at_s, ((0.0, (Piece(document, 128),)),), num_output)


# -------------------------------------------------------------------------------------------------------------- engines


def test_each_token_takes_a_step_without_drafts_and_each_draft_that_is_right_saves_one():
    assert ask(LaneEngine(options(), "e0")) == [0.5, 4.5]
    # The prompt's step gives one token, and two steps with three right drafts each give four.
    step_s = STEP_S + 3 * DRAFT_SHARE * STEP_S
    assert ask(LaneEngine(options("fixed 3"), "e0")) == pytest.approx([0.5, 0.5 + 2 * step_s])


def test_wrong_drafts_cost_their_drafting_and_save_nothing():
    engine = LaneEngine(options("fixed 3", acceptance=0.0), "e0")
    first_s, last_s = ask(engine)
    assert last_s - first_s > 8 * STEP_S
    assert engine.counts.num_right == 0
    assert engine.counts.num_drafted == 3 * 5 + 2 + 1, "no more than the answer still needs"


def test_a_decode_lane_verifies_no_drafts_before_its_first_token():
    engine = LaneEngine(options("fixed 3"), "e0", decodes=True)
    step_s = STEP_S + 3 * DRAFT_SHARE * STEP_S
    # One token in the first step, then four in each of two steps with three right drafts.
    assert ask(engine) == pytest.approx([STEP_S, STEP_S + 2 * step_s])
    assert engine.counts.num_drafted == 2 * 3


def test_blocks_of_one_token_compute_exact_prompts():
    class Recording(Half):
        def __init__(self):
            self.steps = []

        def step_s(self, parts):
            self.steps.append(list(parts))
            return STEP_S

    def steps(block_size):
        profile = Recording()
        engine = LaneEngine(LaneOptions(profile, 128, block_size=block_size), "e0")
        profile.steps.clear()  # of estimates
        ask(engine, num_blocks=-(-150 // block_size), num_output=1)
        return profile.steps

    assert steps(1) == [[(128, 0)], [(22, 128)]]
    assert steps(64) == [[(128, 0)], [(64, 128)]]


def test_a_decode_lane_samples_in_its_first_step():
    engine = LaneEngine(options(), "e0", decodes=True)
    assert ask(engine, num_blocks=100) == [0.5, 4.5]
    assert engine.num_found(range(100)) == 100
    assert engine.num_found([*range(50), 7]) == 50


def test_complete_prompts_come_before_partial_ones_and_the_shortest_first():
    async def main():
        engine, times_s = LaneEngine(options(), "e0"), {}

        async def ask_for(name, start, num_blocks, *, is_complete=True):
            async with engine.stream(range(start, start + num_blocks), 1, is_complete=is_complete) as stream:
                if not is_complete:
                    await asyncio.sleep(100)
                    return
                async for _ in stream:
                    times_s[name] = asyncio.get_running_loop().time()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask_for("begun", 0, 8))
            tasks.create_task(ask_for("partial", 1_000, 8, is_complete=False))
            tasks.create_task(ask_for("long", 2_000, 16))
            tasks.create_task(ask_for("short", 3_000, 8))
        return times_s

    assert run_virtual(main()) == {"begun": 0.5, "short": 1.0, "long": 2.0}


def test_drafts_hold_as_often_as_their_acceptance_says():
    assert [accepted(5, 0.5, draw) for draw in (0.6, 0.5, 0.3, 0.2, 0.01)] == [0, 1, 1, 2, 5]
    assert (accepted(4, 1.0, 0.9), accepted(4, 0.0, 0.1)) == (4, 0)
    draws = [(number + 0.5) / 10_000 for number in range(10_000)]
    assert statistics.mean(accepted(3, 0.7, draw) for draw in draws) == pytest.approx(0.7 + 0.49 + 0.343, abs=0.01)


def test_metrics_are_those_of_the_last_full_period():
    metrics = Acceptance()
    metrics.add(10, 4, 6)
    metrics.roll(0.4)
    assert (metrics.share, metrics.tokens_per_s) == (0.0, 0.0)
    metrics.roll(0.6)
    assert (metrics.share, metrics.tokens_per_s) == (0.4, 10.0)
    metrics.roll(1.2)
    assert (metrics.share, metrics.tokens_per_s) == (0.4, 0.0), "nothing was drafted"


def test_specustreams_depth_is_the_published_sum_from_the_first_adaptation():
    # d = 5 + a M 5 (1 - load) max(1, 400 / t); M is the mean of |f|, in which one of ten gradients is .8
    assert SpecuStream().adapt(0.8, 0.5, 100.0) == pytest.approx(5 + 0.8 * 0.08 * 5 * 0.5 * 4)
    assert SpecuStream().adapt(0.8, 1.0, 800.0) == pytest.approx(5 + 0.8 * 0.08 * 5 * 0.1)
    assert SpecuStream().adapt(1.0, 0.0, 1.0) == 20.0
    assert DEPTH_RULES["fixed 7"]().adapt(0.0, 1.0, 0.0) == 7


def test_a_request_keeps_the_depth_that_it_began_with():
    engine = LaneEngine(options("SpecuStream", acceptance=1.0), "e0")
    ask(engine, num_output=40)
    # Nothing was accepted yet when its only request began, so that the depth is 5: steps give 6 tokens.
    assert engine.num_steps == 1 + 6 + 1
    assert engine.counts.num_drafted == 6 * 5 + 2


# ---------------------------------------------------------------------------------------------------------------- lanes


def test_a_transfer_comes_between_the_two_lanes_and_what_is_there_is_not_sent():
    way = Way("lanes", 2, 1, link_bytes_s=128.0, kv_bytes_per_token=1)
    first, second = play([query(), query(at_s=10.0)], way, options()).timings
    # prefill, a transfer of 128 tokens, and the decode lane's first of three steps
    assert first == Timing(pytest.approx(0.5 + 1.001 + 0.5), pytest.approx(3.001), 0.5, 128, 3, 2, 0)
    assert second == Timing(pytest.approx(0.5 + 0.001 + 0.5), pytest.approx(2.001), 0.5, 128, 3, 0, 2)
    again = play([query(), query(at_s=10.0)], Way("lanes", 2, 1, 128.0, 1, reuses=False), options())
    assert [timing.num_sent for timing in again.timings] == [2, 2]


def test_a_link_carries_one_transfer_at_a_time():
    way = Way("lanes", 2, 1, link_bytes_s=128.0, kv_bytes_per_token=1)
    timings = play([query(document=1), query(document=2)], way, options()).timings
    # The second waits for the link, then for the end of a step.
    assert sorted(timing.first_s for timing in timings) == pytest.approx([2.001, 3.501])


def test_a_pair_answers_what_it_prefilled_and_flowguard_takes_the_other_pair():
    way = Way("pairs", 4, 2, 1e9, 1, router="FlowGuard")
    outcome = play([query(document=number) for number in range(4)], way, options())
    # Two on each pair, one after the other.
    assert [timing.last_s for timing in outcome.timings] == pytest.approx([2.001, 2.001, 3.001, 3.001], abs=0.001)


def test_flowguard_excludes_a_pair_with_more_than_six_of_sixteen_waiting():
    assert overload(ReplicaState("a", num_queued=7, max_open=16)) > 0.85
    assert overload(ReplicaState("a", num_queued=6, max_open=16)) < 0.85


@pytest.mark.parametrize("router", LANE_ROUTERS)
def test_any_router_answers_all_queries_of_lanes(router):
    way = Way("lanes", 4, 2, 1e9, 1, router=router)
    outcome = play([query(0.1 * n, n % 3) for n in range(20)], way, options("SpecuStream", acceptance=0.5))
    assert isinstance(outcome, Outcome)
    assert len(outcome.timings) == 20
    assert 0 < outcome.num_right < outcome.num_drafted


def test_the_given_number_of_queries_is_open_at_once():
    queries = [query(document=number) for number in range(4)]
    seconds = [play(queries, Way("both", 1, num_at_once=num), options()).seconds for num in (1, 2, 4)]
    assert seconds == [4 * 3 * STEP_S, 4.0, 2.0]


def test_the_rows_of_a_cell_are_those_of_links_and_arms_and_the_same_each_time():
    cell = Cell("crawler", 10, 2, 2)
    rows = rows_of(cell)
    links = [row for row in rows if (row.router, row.rule) == ARMS[0]]
    assert [(row.way, row.budget) for row in links] == [
        *(("both", budget) for budget in BUDGETS),
        *((link, 2_048) for link in LINKS),
    ]
    assert len(rows) == len(links) + 2 * (len(ARMS) - 1)
    # The KV of several thousand tokens crosses 12.5 GB/s in some 50 ms.
    assert links[-3].first_p50_s + 0.02 < links[-1].first_p50_s
    drafting = [row for row in rows if row.rule != "none"]
    assert all(row.per_token_p50_s < links[0].per_token_p50_s for row in drafting)
    assert rows_of(cell) == rows


def test_lanes_are_compared_with_the_step_budget_that_suits_engines_that_do_both_best():
    cell = Cell("anns", 50, 2, 10)
    rows, queries = rows_of(cell), cell.queries()
    shown = [row for row in best_of_each(rows) if row.way == "both"]
    assert [(row.router, row.rule) for row in shown] == list(ARMS)
    for row in shown:
        tried = [run(cell, queries, 0, router=row.router, rule=row.rule, budget=budget) for budget in BUDGETS]
        assert row == best(tried)
    assert shown[0].budget < cell.budget == 8_192, "else this load does not tell the budgets apart"


def test_the_best_row_has_the_least_p95_of_the_last_token_and_of_nearly_equal_ones_the_first_token_decides():
    row = run(Cell("crawler", 10, 2, 2), Cell("crawler", 10, 2, 2).queries(), 0)
    early, late, slow = (replace(row, first_p95_s=a, last_p95_s=b) for a, b in ((0.1, 1.03), (0.3, 1.0), (0.0, 1.1)))
    assert best([late, slow, early]) == early
    assert best([late, slow]) == late


def test_tables_are_markdown_and_name_the_step_budget():
    rows = rows_of(Cell("anns", 20, 2, 6))
    tables = report(rows)
    both = next(row for row in best_of_each(rows) if row.way == "both")
    assert f"| searches, 20 | 2 | both | {both.budget:,} |  | " in tables
    assert f"{1e3 * both.per_token_p50_s:.1f} ({both.budget:,}) |" in tables, "with the arms"
    for table in tables.split("## ")[1:]:
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1, table


def test_many_engines_are_simulated_without_arms(monkeypatch):
    monkeypatch.setattr(lanes_simulated, "MOST_WITH_ARMS", 1)
    rows = rows_of(Cell("crawler", 10, 2, 2))
    assert {(row.router, row.rule) for row in rows} == {ARMS[0]}
    assert "Routers" not in report(rows)


def test_figures_lose_their_leading_zero_and_decimals_that_say_nothing():
    assert [decimal(each) for each in (0.05, 0.944, 1.0, 13.94, 102.6)] == [".05", ".94", "1.00", "13.9", "103"]
    assert [decimal(each, 3) for each in (0.05, 1.2345)] == [".050", "1.23"]


def test_documents_that_are_popular_are_sent_less_often():
    rows = rows_of(Cell("documents", 0, 2, 6))
    assert [row.budget for row in rows if row.way == "both"] == list(BUDGETS)
    of = {(row.way, row.reuses): row for row in rows}
    assert of["100 Gb/s", True].sent_share < of["100 Gb/s", False].sent_share == 1.0
    assert of["100 Gb/s", True].first_p50_s <= of["100 Gb/s", False].first_p50_s


def test_the_medians_of_lean_engines_are_those_of_vllms_schedulers_within_a_sixth():
    rows = lanes_whole.rows_of(Cell("crawler", 20, 2, 6))
    assert [row.model for row in rows] == ["vLLM's schedulers", "lean"] * 3
    assert [row.budget for row in rows] == [2_048, 2_048, 1_024, 1_024, 2_048, 2_048]
    for whole, lean in zip(rows[::2], rows[1::2], strict=True):
        for name in ("last_p50_s", "per_token_p50_s"):
            assert getattr(lean, name) == pytest.approx(getattr(whole, name), rel=1 / 6), (whole.way, name)
    assert lanes_whole.rows_table(rows).count("| lean |") == 3


def test_differences_of_the_models_are_those_of_the_least_and_the_most_cell():
    row = lanes_whole.Row("anns", 2, 50, "both", 0, 1_024, "vLLM's schedulers", *[1.0] * 6)
    rows = [row, replace(row, model="lean", last_p50_s=1.1), row, replace(row, model="lean", last_p50_s=0.8)]
    line = lanes_whole.differences_table(rows).splitlines()[-1]
    assert line == "| both, searches, 1,024 | -20 to +10 % |" + " +0 to +0 % |" * 4


def test_a_decode_lane_computes_only_the_last_token_of_a_prompt():
    profile = load_profile(PROFILE)
    assert lanes_whole.answers_only(profile, [(4_000, 0), (1, 500)]) == profile.step_s([(1, 3_999), (1, 500)])


def test_splits_leave_a_lane_of_each_kind():
    assert splits(2) == [1]
    assert splits(4) == [1, 2, 3]
    assert splits(64) == [16, 32, 48]


def test_the_short_form_has_all_loads():
    cells = lanes_simulated.cells_of(is_short=True)
    assert {cell.load for cell in cells} == {"crawler", "anns", "documents"}
    assert {cell.num_engines for cell in cells} == {2, 4}
