"""What the report on the paper's evaluation computes: published data, ways, plan, envelope, targets, effects."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from experiments.paper import effects, published, report, ways
from experiments.paper.__main__ import plan_of, scaled
from experiments.paper.pictures import Pictures
from experiments.paper.plan import FULL, HELD_OUT_SEEDS, SHORT, expected_s, in_order, make_plan, total_s
from experiments.paper.points import BEATEN, HALF_KV, HELD_OUT, LADDERS, LIGHT, LOADED, TWICE_FULL, Point, demand
from experiments.paper.progress import Progress
from experiments.paper.results import Results, read
from experiments.paper.sections import ablations, beat, copying, included
from experiments.paper.sections.beat import standing
from experiments.paper.sections.section import Report
from experiments.paper.standing import RANKS, Seconds, Standing, envelope, least, ratios
from experiments.paper.targets import TARGETS, Target
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.bench.compare import Pool
from streamrag.bench.runner import CellFinished, CellProgressed
from streamrag.bench.store import CellStore
from streamrag.bench.summary import digest, percentile
from streamrag.cli.output import Output
from streamrag.engine.profile_files import load_profile
from tests.bench.made import made_result


def seconds(p50: float, p95: float, p99: float) -> Seconds:
    return {"P50": p50, "P90": (p50 + p95) / 2, "P95": p95, "P99": p99, "max": 2 * p99}


# What is published.


def test_every_published_way_is_one_that_is_simulated() -> None:
    names = {ways.NOT_STREAMING.name, *ways.PAPER_POLICIES}
    assert {way for _, _, way in published.SECONDS} <= names
    assert {each.way for each in published.SPEED_UPS} <= {*names, "streaming"}
    assert {each.over for each in published.SPEED_UPS} <= names
    for of in (published.PRESSURE, published.PREEMPTIONS):
        assert of.keys() == published.WORKLOADS.keys()
        assert all(tuple(policies) == ways.TABLE_POLICIES for policies in of.values())


def test_every_published_rate_is_one_that_is_simulated() -> None:
    rates = {(name, point.qps) for name, points in LADDERS.items() for point in points}
    assert {(workload, qps) for workload, qps, _ in published.SECONDS} <= rates
    assert {(each.workload, each.qps) for each in published.SPEED_UPS} <= rates


def test_published_figures_agree_with_each_other() -> None:
    for found in published.SECONDS.values():
        known = [second for second in found if second is not None]
        assert known == sorted(known)
    for each in published.SPEED_UPS:
        assert 0 < each.least <= each.most
    # What the text says of the speed-ups follows from the artifact's seconds, within their 5 %.
    for each in published.SPEED_UPS:
        of, over = (published.SECONDS.get((each.workload, each.qps, way)) for way in (each.way, each.over))
        if of and over:
            rank = ("P50", "P95", "P99").index(each.rank)
            assert (over[rank] or 0) / (of[rank] or 1) == pytest.approx(each.least, rel=0.05)


def test_the_published_table_shows_what_the_text_says_of_it() -> None:
    for workload, by_policy in published.PRESSURE.items():
        assert len(by_policy["FCFS"]) == len(published.EVICTIONS)
        assert all(p99 < 1 for _, p99 in by_policy["vLLM-S"]), workload
        assert all(p99 > 1 for _, p99 in by_policy["FCFS"]), workload


# Ways and points.


def test_ours_is_the_scheduler_s_defaults() -> None:
    cell = ways.OURS.cell(LOADED[0], 1, 100)
    assert cell.scheduler_options == {}
    assert (cell.policy, cell.eviction) == (SchedulerOptions().policy, SchedulerOptions().eviction)
    assert cell.max_num_batched_tokens == ways.OURS_BUDGET


def test_whatever_the_scheduler_can_do_is_decided_for_the_paper_s_arm() -> None:
    # A new option of the scheduler has to be switched off there, or named as one that means nothing.
    assert {field.name for field in fields(SchedulerOptions)} == {*ways.PAPER_OPTIONS, *ways.NO_PART_OF_PAPER}


def test_an_ablation_changes_one_thing_of_the_defaults() -> None:
    made = ways.ablations()
    assert made
    assert len({way.name for way in made}) == len(made)
    for name, options in ways.ABLATIONS.items():
        changed = SchedulerOptions(**options)
        assert (changed != SchedulerOptions()) == (f"ours, {name}" in {way.name for way in made})


def test_what_is_not_the_scheduler_s_own_arm_has_no_options_of_it() -> None:
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


def test_what_a_load_wants_follows_from_little_s_law_where_every_stream_is_the_same() -> None:
    wants = demand(Point("anns-last", 1.0))
    # An update replaces the context, so that a stream holds about its final tokens all the time.
    assert wants.num_tokens == pytest.approx(wants.residency_s * 13_006, rel=0.2)
    assert wants.published_formula == pytest.approx(4.47 * 13_006, rel=0.05)


# The plan.


def test_a_cell_that_two_sections_want_is_planned_once() -> None:
    plan = plan_of(SHORT, ())
    alone = sum(len(plan_of(SHORT, [section.name])) for section in report.SECTIONS)
    assert len(plan) < alone
    cells = in_order(plan)
    assert len({CellStore.path(CellStore(Path("nowhere")), cell) for cell in cells}) == len(cells)


def test_all_ways_at_a_point_have_the_same_seeds_and_queries() -> None:
    for scale in (SHORT, FULL):
        by_point: dict[Point, set[tuple[tuple[int, int | None], ...]]] = {}
        for (point, _), cells in plan_of(scale, ()).items():
            by_point.setdefault(point, set()).add(tuple((cell.seed, cell.num_queries) for cell in cells))
        assert all(len(loads) == 1 for loads in by_point.values())


def test_what_is_held_out_has_the_seeds_that_are() -> None:
    for scale in (SHORT, FULL):
        assert {seed for point in HELD_OUT for seed in scale.seeds(point)} <= set(HELD_OUT_SEEDS)
    assert all(FULL.seeds(point) == tuple(range(1, 11)) for point in BEATEN)


def test_the_short_scale_takes_less_than_forty_minutes_on_two_cores() -> None:
    assert total_s(in_order(plan_of(SHORT, ()))) < 2 * 40 * 60 * 0.9


def test_the_time_left_follows_the_work_that_is_done_and_not_the_number_of_cells() -> None:
    cells = in_order(make_plan(SHORT, [(TWICE_FULL[0], ways.FCFS), (LIGHT[0], ways.FCFS)]))
    now_s = [100.0]
    progress = Progress(cells, 2, Output(quiet=True), clock=lambda: now_s[0])
    with progress:
        assert progress.left_s == pytest.approx(total_s(cells) / 2)
        now_s[0] += 50.0
        progress.show(CellProgressed(cells[0], 1, 2))
        done_s = expected_s(cells[0]) / 2
        assert progress.left_s == pytest.approx(50.0 * (total_s(cells) - done_s) / done_s)
        for cell in cells:
            progress.show(CellFinished(cell))
        assert progress.left_s == pytest.approx(0.0)


# The envelope.


def test_the_envelope_is_the_best_at_each_rank_of_those_that_are_not_worse_than_not_streaming() -> None:
    not_streaming = seconds(1.0, 3.0, 5.0)
    found, names = envelope(
        {
            "a": seconds(0.1, 1.0, 4.0),
            "b": seconds(0.2, 0.5, 5.0),
            "collapses": seconds(0.05, 0.4, 5.1),
        },
        not_streaming,
    )
    assert names == ("a", "b")
    assert found
    assert [found[rank] for rank in ("P50", "P95", "P99")] == [0.1, 0.5, 4.0]


def test_there_is_no_envelope_where_everything_collapses() -> None:
    assert envelope({"a": seconds(0.1, 1.0, 6.0)}, seconds(1.0, 3.0, 5.0)) == (None, ())
    assert all(map(math.isnan, ratios(None, seconds(1, 2, 3)).values()))
    assert least([]) is None


# Targets.


def made_standing(point: Point, ours: Seconds, **changes: object) -> Standing:
    base = Standing(
        point,
        (1,),
        ours,
        fcfs=seconds(0.10, 0.50, 1.5),
        envelope=seconds(0.09, 0.40, 1.2),
        eligible=("FCFS",),
        not_streaming=seconds(0.7, 3.0, 4.0),
        floor=seconds(0.02, 0.1, 0.4),
        busy_ratio=1.01,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def missed(standings: list[Standing]) -> list[tuple[str, str]]:
    return [(target.text, each.rank) for target in TARGETS for each in target.at(standings) if not each.is_met]


def test_a_fast_enough_way_meets_all_targets() -> None:
    assert missed([made_standing(LOADED[0], seconds(0.045, 0.25, 0.8))]) == []


def test_each_limit_is_missed_just_past_it() -> None:
    # The paper's FCFS takes 0.50 at P95: 0.40 is 1.25 times as fast.
    fast = made_standing(LOADED[0], seconds(0.045, 0.25, 0.8), envelope=None)
    assert ("the paper's FCFS over ours", "P95") not in missed([fast])
    slow = replace(fast, ours=seconds(0.045, 0.401, 0.8), floor=seconds(0.02, 0.2, 0.4))
    assert missed([slow]) == [("the paper's FCFS over ours", "P95")]
    assert missed([replace(fast, busy_ratio=1.021)]) == [("busy time over not streaming's", "busy")]
    waits = replace(fast, ours={**fast.ours, "max": 16.1})
    assert missed([waits]) == [("our longest wait over not streaming's", "max")]
    assert missed([replace(fast, not_streaming={**fast.not_streaming, "P90": 0.14})]) == [
        ("not streaming over ours, up to twice saturation", "P90")
    ]


def test_a_limit_that_the_floor_forbids_is_said_to_be_impossible() -> None:
    # The envelope takes 0.40 at P95, and the requests alone 0.38: nobody can be 1.1 times as fast.
    close = made_standing(LOADED[0], seconds(0.045, 0.39, 0.8), floor=seconds(0.02, 0.38, 0.4))
    (target,) = (t for t in TARGETS if t.text == "the envelope over ours" and t.ranks == ("P95",))
    (found,) = target.at([close])
    assert (found.is_met, found.is_possible) == (False, False)
    assert found.bound == pytest.approx(0.40 / 0.38)
    assert target.why([found]) == "the floor allows 1.05 (P95, crawler 4 QPS)"
    assert replace(target, reason="known").why([found._replace(is_possible=True)]) == "known"
    assert target.why([found._replace(is_met=True)]) == ""


def test_limits_differ_by_point() -> None:
    half = made_standing(HALF_KV[0], seconds(0.05, 0.3, 0.55))
    of = [target for target in TARGETS if "half" in target.text]
    assert [[each.limit for each in target.at([half])] for target in of] == [[1.2], [2.5]]
    assert [[each.limit for each in target.at([replace(half, point=HALF_KV[1])])] for target in of] == [[1.2], [1.5]]
    assert all(target.at([replace(half, point=LIGHT[0])]) == [] for target in of)


def test_what_is_not_known_is_neither_met_nor_missed() -> None:
    unknown = made_standing(LOADED[0], seconds(0.045, 0.25, 0.8), fcfs=None, envelope=None)
    for target in TARGETS:
        if "FCFS" in target.text or "envelope" in target.text:
            assert target.at([unknown]) == []


def test_the_worst_figure_is_the_one_farthest_on_the_wrong_side() -> None:
    def target(*, is_least: bool) -> Target:
        return Target("", ("P50",), lambda s: s.ours, lambda p: 1.0, lambda p: True, is_least=is_least)

    found = [made_standing(LOADED[0], seconds(value, 1, 2)) for value in (0.9, 1.4, 2.0)]
    for is_least, worst in ((True, 0.9), (False, 2.0)):
        of = target(is_least=is_least)
        assert of.worst(of.at(found)).value == worst


# From cells to a report.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Made-up results of every cell, of few requests each."""
    scale = scaled(SHORT, 25, None)
    pools = {key: Pool(tuple(digest(made_result(c)) for c in cells)) for key, cells in plan_of(scale, ()).items()}
    folder = tmp_path_factory.mktemp("paper")
    return Report(scale, Results(pools), Pictures(folder / "paper", folder / "paper.md"))


def test_pooled_figures_are_percentiles_of_all_requests_of_all_seeds(small: Report) -> None:
    point = LOADED[0]
    found = standing(small, point)
    assert found
    cells = [ways.OURS.cell(point, seed, 25) for seed in small.scale.seeds(point)]
    values = [r.ttft_after_retrieval_s for cell in cells for r in made_result(cell).requests]
    assert found.ours == pytest.approx({rank: percentile(values, fraction) for rank, fraction in RANKS.items()})


def test_the_best_budget_makes_no_baseline_slower(small: Report) -> None:
    for point in BEATEN:
        same, best = standing(small, point), standing(small, point, any_budget=True)
        assert same
        assert best
        for rank in RANKS:
            assert best.not_streaming[rank] <= same.not_streaming[rank]
            assert (best.fcfs or {})[rank] <= (same.fcfs or {})[rank]


def test_the_report_has_every_section_and_all_pictures(small: Report) -> None:
    path = small.pictures.report
    report.write(path, small.scale, plan_of(small.scale, ()), small.results)
    text = path.read_text()
    assert "simulated yet" not in text
    for section in report.SECTIONS:
        assert f"## {section.title}\n" in text
    shown = [part.partition(")")[0] for part in text.split("](paper/")[1:]]
    assert sorted(shown) == sorted(found.name for found in (path.parent / "paper").iterdir())
    assert len(shown) == len(set(shown))


def test_what_is_not_simulated_yet_is_said_to_be_so(small: Report) -> None:
    nothing = replace(small, results=Results({}))
    assert all("not simulated yet" in row for row in effects.rows(nothing.results))
    for section in (beat, ablations):
        assert "yet" in section.write(nothing) or "–" in section.write(nothing)


def test_a_point_counts_when_all_of_its_seeds_are_there(tmp_path: Path) -> None:
    plan, store = (
        make_plan(scaled(SHORT, 25, None), [(LOADED[0], ways.OURS), (LOADED[0], ways.FCFS)]),
        CellStore(tmp_path),
    )
    first, second = plan.values()
    assert len(first) > 1
    for cell in (*first, second[0]):
        store.write(made_result(cell))
    found = read(plan, store)
    assert found.pool(LOADED[0], ways.FCFS) is None
    pool = found.pool(LOADED[0], ways.OURS)
    assert pool
    assert pool.seeds == tuple(cell.seed for cell in first)


def test_every_effect_comes_to_a_verdict(small: Report) -> None:
    for effect in effects.EFFECTS:
        found = effect.look(small.results)
        assert found is not None, effect.claim
        assert found.figures


def test_results_of_other_experiments_become_a_table_if_they_are_rows() -> None:
    rows = [{"k": 1, "p99_s": 0.51234, "all": [1]}, {"k": 2, "p99_s": None, "all": []}]
    assert included.rows_table(rows).splitlines()[2:] == ["| 1 | 0.512 |", "| 2 | – |"]
    assert included.rows_table({"not": "rows"}) == ""
    assert included.rows_table(41 * rows) == ""


def test_a_plan_that_takes_too_long_is_named(tmp_path: Path) -> None:
    assert "not measured" in included.planning(tmp_path)
    rows = [
        {
            "num_requests": num,
            "load": "all",
            "policy": "fcfs",
            "more_p50_us": us,
            "most_more_us": most,
            "is_met": us < most,
        }
        for num, us, most in ((50, 40.0, 100.0), (500, 610.0, 500.0))
    ]
    (tmp_path / "step_cost.json").write_text(json.dumps({"results": rows}))
    told = included.planning(tmp_path)
    assert "met in 1 of 2" in told
    assert "at worst 610 us with 500. Missed: 500 requests, all, fcfs." in told


def test_copying_out_and_back_takes_both_ways() -> None:
    profile = load_profile(copying.DEVICES["A40"])
    assert profile.copies
    assert copying.copy_s(profile.copies, 1_024, 16) == profile.copies.out_s(64) + profile.copies.in_s(64)
