"""Ways, points, and the plan of their cells."""

from dataclasses import fields
from pathlib import Path

import pytest

from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag_bench.store import CellStore
from studies.paper import report, ways
from studies.paper.plan import HELD_OUT_SEEDS, SHORT, in_order, total_s
from studies.paper.points import BEATEN, HALF_KV, HELD_OUT, LOADED, TWICE_FULL, Point, demand
from studies.paper.run import plan_of


def test_ours_is_the_scheduler_s_defaults() -> None:
    cell = ways.OURS.cell(LOADED[0], 1, 100)
    assert cell.scheduler_options == {}
    assert (cell.policy, cell.eviction) == (EngineOptions().policy, EngineOptions().eviction)
    assert cell.max_num_batched_tokens == ways.OURS_BUDGET


def test_every_scheduler_option_is_decided_for_the_papers_arm() -> None:
    # A new option of the scheduler has to be switched off there, or named as one that means nothing.
    assert {field.name for field in fields(EngineOptions)} == {*ways.PAPER_OPTIONS, *ways.NO_PART_OF_PAPER}


def test_an_ablation_changes_one_thing_of_the_defaults() -> None:
    made = ways.ablations()
    assert made
    assert len({way.name for way in made}) == len(made)
    for name, options in ways.ABLATIONS.items():
        changed = EngineOptions(**options)
        assert (changed != EngineOptions()) == (f"ours, {name}" in {way.name for way in made})


def test_an_arm_without_our_scheduler_has_none_of_its_options() -> None:
    for way in (ways.NOT_STREAMING, ways.with_other_budget(ways.NOT_STREAMING)):
        assert way.cell(LOADED[0], 1, 10).scheduler_options == {}
    assert ways.NOT_STREAMING.cell(LOADED[0], 1, 10).max_num_batched_tokens is None
    assert ways.with_other_budget(ways.NOT_STREAMING).cell(LOADED[0], 1, 10).max_num_batched_tokens == 8_192
    assert ways.with_other_budget(ways.NOT_STREAMING).cell(LOADED[1], 1, 10).max_num_batched_tokens == 2_048


def test_streams_of_one_time_want_twice_the_memory_and_four_times_its_half() -> None:
    for point, half in zip(TWICE_FULL, HALF_KV, strict=True):
        wants = demand(point).num_tokens
        assert point.kv_tokens
        assert half.kv_tokens
        assert wants / point.kv_tokens == pytest.approx(2.0, rel=0.02)
        assert wants / half.kv_tokens == pytest.approx(4.0, rel=0.02)


def test_the_demand_of_equal_streams_follows_littles_law() -> None:
    wants = demand(Point("anns-last", 1.0))
    # An update replaces the context, so that a stream holds about its final tokens all the time.
    assert wants.num_tokens == pytest.approx(wants.residency_s * 13_006, rel=0.2)
    assert wants.published_formula == pytest.approx(4.47 * 13_006, rel=0.05)


def test_a_cell_that_two_sections_want_is_planned_once() -> None:
    plan = plan_of(SHORT, ())
    alone = sum(len(plan_of(SHORT, [section.name])) for section in report.SECTIONS)
    assert len(plan) < alone
    cells = in_order(plan)
    assert len({CellStore.path(CellStore(Path("nowhere")), cell) for cell in cells}) == len(cells)


def test_all_ways_at_a_point_have_the_same_seeds_and_queries() -> None:
    by_point: dict[Point, set[tuple[tuple[int, int | None], ...]]] = {}
    for (point, _), cells in plan_of(SHORT, ()).items():
        by_point.setdefault(point, set()).add(tuple((cell.seed, cell.num_queries) for cell in cells))
    assert all(len(loads) == 1 for loads in by_point.values())


def test_held_out_points_use_held_out_seeds() -> None:
    assert {seed for point in HELD_OUT for seed in SHORT.seeds(point)} == set(HELD_OUT_SEEDS)
    assert not {seed for point in BEATEN for seed in SHORT.seeds(point)} & set(HELD_OUT_SEEDS)


def test_the_evaluation_takes_less_than_forty_minutes_on_two_cores() -> None:
    assert total_s(in_order(plan_of(SHORT, ()))) < 2 * 40 * 60 * 0.9
