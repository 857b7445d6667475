"""From the results of cells to a report."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.tests.made import made_result
from streamrag_bench.report.comparison import Pool
from streamrag_bench.store import CellStore
from streamrag_bench.summary import digest, percentile
from studies.paper import effects, report, ways
from studies.paper.pictures import Pictures
from studies.paper.plan import SHORT, make_plan
from studies.paper.points import BEATEN, HELD_OUT, LIGHT, LOADED, OVERLOAD, TWICE_FULL, more_of
from studies.paper.results import Results, read
from studies.paper.run import plan_of, scaled
from studies.paper.sections import ablations, beat
from studies.paper.sections.beat import standing
from studies.paper.sections.section import Report
from studies.paper.standing import RANKS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Made-up results of every cell, of few requests each."""
    scale = scaled(SHORT, 25, None)
    pools = {key: Pool(tuple(digest(made_result(c)) for c in cells)) for key, cells in plan_of(scale, ()).items()}
    folder = tmp_path_factory.mktemp("studies") / "paper"
    folder.mkdir()
    return Report(scale, Results(pools), Pictures(folder / "pictures", folder / "README.md"))


def test_pooled_figures_are_percentiles_of_all_requests_of_all_seeds(small: Report) -> None:
    point = LOADED[0]
    found = standing(small, point)
    assert found
    more = more_of(point)
    assert more
    seeds = [*small.scale.seeds(point), *small.scale.seeds(more)]
    assert found.seeds == tuple(seeds) == tuple(range(1, 8))
    cells = [ways.OURS.cell(point, seed, 25) for seed in seeds]
    values = [r.ttft_after_retrieval_s for cell in cells for r in made_result(cell).requests]
    assert found.ours == pytest.approx({rank: percentile(values, fraction) for rank, fraction in RANKS.items()})


def test_ways_that_have_the_first_seed_only_stand_beside_nothing_that_has_more(small: Report) -> None:
    results, mcps = small.results, ways.paper("MCPS")
    assert results.pool(LOADED[0], mcps)
    assert results.all_seeds(LOADED[0], mcps) is None
    assert standing(small, OVERLOAD[0], any_budget=True) == standing(
        small, OVERLOAD[0], any_budget=True, has_more_seeds=False
    )
    first = replace(small, results=Results({key: pool for key, pool in results.pools.items() if key[0] == LOADED[0]}))
    assert first.results.all_seeds(LOADED[0], mcps) == results.pool(LOADED[0], mcps), "where no point has more"
    found = standing(small, LIGHT[0])
    assert found
    assert set(found.eligible) <= {"FCFS", "LCAS"}
    assert found.makers.keys() == (RANKS.keys() if found.eligible else set())


def test_best_budgets_that_were_tried_with_one_seed_stand_beside_ours_with_that_seed(small: Report) -> None:
    pooled, best = (beat.standings(small, TWICE_FULL, any_budget=any_budget)[0].seeds for any_budget in (False, True))
    assert (pooled, best) == ((1, 2, 3, 4), (1,))


def test_busy_time_is_set_against_not_streaming_with_either_budget(small: Report) -> None:
    crawl, search = standing(small, LOADED[0]), standing(small, LOADED[1])
    assert crawl
    assert search
    busy_s = [
        pool.total(lambda d: d.busy_s).value
        for way in (ways.OURS, ways.with_other_budget(ways.NOT_STREAMING))
        if (pool := small.results.all_seeds(LOADED[0], way))
    ]
    assert crawl.busy_ratio_same == pytest.approx(busy_s[0] / busy_s[1])
    assert search.busy_ratio_same == search.busy_ratio, "searches have our budget as published"
    assert crawl.busiest == max(crawl.busy_ratio, crawl.busy_ratio_same)


def test_the_best_budget_makes_no_baseline_slower(small: Report) -> None:
    for point in BEATEN:
        same, best = (
            standing(small, point, any_budget=any_budget, has_more_seeds=False) for any_budget in (False, True)
        )
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
    shown = [part.partition(")")[0] for part in text.split("](pictures/")[1:]]
    assert sorted(shown) == sorted(found.name for found in (path.parent / "pictures").iterdir())
    assert len(shown) == len(set(shown))


def test_a_report_says_which_cells_are_not_simulated_yet(small: Report) -> None:
    nothing = replace(small, results=Results({}))
    assert all("not simulated yet" in row for row in effects.rows(nothing.results))
    for section in (beat, ablations):
        assert "yet" in section.write(nothing) or "–" in section.write(nothing)


def test_a_point_counts_when_all_of_its_seeds_are_there(tmp_path: Path) -> None:
    plan, store = (
        make_plan(scaled(SHORT, 25, 2), [(HELD_OUT[0], ways.OURS), (HELD_OUT[0], ways.FCFS)]),
        CellStore(tmp_path),
    )
    first, second = plan.values()
    assert len(first) > 1
    for cell in (*first, second[0]):
        store.write(made_result(cell))
    found = read(plan, store)
    assert found.pool(HELD_OUT[0], ways.FCFS) is None
    pool = found.pool(HELD_OUT[0], ways.OURS)
    assert pool
    assert pool.seeds == tuple(cell.seed for cell in first)


def test_every_effect_comes_to_a_verdict(small: Report) -> None:
    for effect in effects.EFFECTS:
        found = effect.look(small.results)
        assert found is not None, effect.claim
        assert found.figures


def test_lcas_comes_close_behind_if_it_is_neither_much_slower_nor_much_faster(small: Report) -> None:
    def shows(factor: float) -> bool:
        pools = dict(small.results.pools)
        for point in (LOADED[0], more_of(LOADED[0])):
            assert point
            fcfs = pools[point, ways.FCFS]
            seconds = [tuple(factor * s for s in d.ttft_after_retrieval_s) for d in fcfs.digests]
            slower = [replace(d, ttft_after_retrieval_s=s) for d, s in zip(fcfs.digests, seconds, strict=True)]
            pools[point, ways.paper("LCAS")] = Pool(tuple(slower))
        found = effects._lcas(Results(pools))
        assert found
        assert "seeds 1–7" in found.figures
        return found.shows

    assert [shows(factor) for factor in (0.7, 0.95, 1.05, 1.2, 1.3)] == [False, True, True, True, False]
