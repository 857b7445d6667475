"""Lanes in virtual time: engines of one step time, small cells, and what a decode lane charges for a prompt."""

import asyncio
from dataclasses import replace

import pytest

from streamrag.backends.simulated.virtual_time import run_virtual
from studies.lanes import run as lanes_simulated
from studies.lanes.engines import LaneEngine
from studies.lanes.figures import decimal
from studies.lanes.play import Timing, Way, play
from studies.lanes.run import BUDGETS, LINKS, Cell, best, best_of_each, report, rows_of, run, splits
from studies.routing.loads import Piece, Query

STEP_S = 0.5


class Half:
    """Steps of half a second."""

    kv_tokens = 1 << 20

    def step_s(self, parts):
        assert parts
        return STEP_S


def lane_engine(**options):
    return LaneEngine(Half(), 512, **options)


def ask(engine, num_blocks=2, num_output=9, first=0):
    """Return when the first and the last token came."""

    async def main():
        async with engine.stream(range(first, first + num_blocks), num_output, is_complete=True) as stream:
            return [asyncio.get_running_loop().time() async for _ in stream]

    return run_virtual(main())


def query(at_s=0.0, document=1, num_output=3):
    return Query(at_s, ((0.0, (Piece(document, 128),)),), num_output)


# -------------------------------------------------------------------------------------------------------------- engines


def test_each_token_takes_a_step():
    assert ask(lane_engine()) == [0.5, 4.5]


def test_a_decode_lane_samples_in_its_first_step():
    engine = lane_engine(decodes=True)
    assert ask(engine, num_blocks=100) == [0.5, 4.5]
    assert engine.num_found(range(100)) == 100
    assert engine.num_found([*range(50), 7]) == 50


def test_complete_prompts_come_before_partial_ones_and_the_shortest_first():
    async def main():
        engine, times_s = lane_engine(), {}

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


# ---------------------------------------------------------------------------------------------------------------- lanes


def test_a_transfer_comes_between_the_two_lanes_and_what_is_there_is_not_sent():
    way = Way(2, 512, 1, link_bytes_s=128.0, kv_bytes_per_token=1)
    first, second = play([query(), query(at_s=10.0)], way, Half()).timings
    # prefill, a transfer of 128 tokens, and the decode lane's first of three steps
    assert first == Timing(pytest.approx(0.5 + 1.001 + 0.5), pytest.approx(3.001), 0.5, 128, 3, 2, 0)
    assert second == Timing(pytest.approx(0.5 + 0.001 + 0.5), pytest.approx(2.001), 0.5, 128, 3, 0, 2)
    again = play([query(), query(at_s=10.0)], Way(2, 512, 1, 128.0, 1, reuses=False), Half())
    assert [timing.num_sent for timing in again.timings] == [2, 2]


def test_a_link_carries_one_transfer_at_a_time():
    way = Way(2, 512, 1, link_bytes_s=128.0, kv_bytes_per_token=1)
    timings = play([query(document=1), query(document=2)], way, Half()).timings
    # The second waits for the link, then for the end of a step.
    assert sorted(timing.first_s for timing in timings) == pytest.approx([2.001, 3.501])


def test_the_rows_of_a_cell_are_those_of_budgets_and_links_and_the_same_each_time():
    cell = Cell("crawler", 10, 2, 2)
    rows = rows_of(cell)
    assert [(row.way, row.budget) for row in rows] == [
        *(("both", budget) for budget in BUDGETS),
        *((link, 2_048) for link in LINKS),
    ]
    # The KV of several thousand tokens crosses 12.5 GB/s in some 50 ms.
    assert rows[-3].first_p50_s + 0.02 < rows[-1].first_p50_s
    assert rows_of(cell) == rows


def test_lanes_are_compared_with_the_step_budget_that_suits_engines_that_do_both_best():
    cell = Cell("anns", 50, 2, 10)
    rows, queries = rows_of(cell), cell.queries()
    (shown,) = [row for row in best_of_each(rows) if row.way == "both"]
    assert shown == best(run(cell, queries, 0, budget=budget) for budget in BUDGETS)
    assert shown.budget < cell.budget == 8_192, "else this load does not tell the budgets apart"


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
    for table in tables.split("## ")[1:]:
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1, table


def test_figures_lose_their_leading_zero_and_decimals_that_say_nothing():
    assert [decimal(each) for each in (0.05, 0.944, 1.0, 13.94, 102.6)] == [".05", ".94", "1.00", "13.9", "103"]
    assert [decimal(each, 3) for each in (0.05, 1.2345)] == [".050", "1.23"]


def test_documents_that_are_popular_are_sent_less_often():
    rows = rows_of(Cell("documents", 0, 2, 6))
    assert [row.budget for row in rows if row.way == "both"] == list(BUDGETS)
    of = {(row.way, row.reuses): row for row in rows}
    assert of["100 Gb/s", True].sent_share < of["100 Gb/s", False].sent_share == 1.0
    assert of["100 Gb/s", True].first_p50_s <= of["100 Gb/s", False].first_p50_s


def test_splits_leave_a_lane_of_each_kind():
    assert splits(2) == [1]
    assert splits(4) == [1, 2, 3]
    assert splits(64) == [16, 32, 48]


def test_the_short_form_has_all_loads():
    cells = lanes_simulated.cells_of(is_short=True)
    assert {cell.load for cell in cells} == {"crawler", "anns", "documents"}
    assert {cell.num_engines for cell in cells} == {2, 4}
