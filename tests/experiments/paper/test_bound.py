"""The bound: below what any schedule does, on small loads where all of them can be tried, and below simulated cells."""

import random
from itertools import combinations

import pytest

from experiments.paper import ways
from experiments.paper.bound import Bound, Job, bound_of, job_of, work_s
from experiments.paper.points import Point, queries_of
from experiments.paper.standing import RANKS
from streamrag.bench.simulate import run_cell
from streamrag.bench.summary import percentile
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile


def h200() -> AnalyticProfile:
    profile = load_profile(ways.PROFILE)
    assert isinstance(profile, AnalyticProfile)
    return profile


def made_jobs(rng: random.Random, num: int) -> list[Job]:
    jobs = []
    for _ in range(num):
        releases = sorted(rng.uniform(0, 4) for _ in range(rng.randint(1, 3)))
        jobs.append(Job(releases[-1], tuple(releases), tuple(rng.choice((0.1, 0.5, 1.5)) for _ in releases)))
    return jobs


def are_on_time(jobs: tuple[Job, ...], after_s: float) -> bool:
    """Whether all can be: on one machine with preemption, work that is due by b fits behind each a, for all a and b."""
    return all(
        sum(
            work
            for job in jobs
            if job.end_s + after_s <= due_s
            for at_s, work in zip(job.releases_s, job.works_s, strict=True)
            if at_s >= start_s
        )
        <= due_s - start_s + 1e-9
        for due_s in (job.end_s + after_s for job in jobs)
        for start_s in (at_s for job in jobs for at_s in job.releases_s)
        if start_s <= due_s
    )


def fewest_late(jobs: list[Job], after_s: float) -> int:
    for num_late in range(len(jobs)):
        if any(are_on_time(kept, after_s) for kept in combinations(jobs, len(jobs) - num_late)):
            return num_late
    return len(jobs)


def test_no_schedule_has_fewer_late_jobs_than_the_bound_which_is_often_reached() -> None:
    rng = random.Random(17)
    differences = []
    for _ in range(60):
        jobs = made_jobs(rng, 6)
        for after_s in (0.2, 0.8, 2.0):
            found, fewest = Bound([jobs]).num_late(after_s), fewest_late(jobs, after_s)
            assert found <= fewest
            differences.append(fewest - found)
    assert differences.count(0) > 0.7 * len(differences)


def test_requests_of_several_loads_do_not_wait_for_each_other() -> None:
    job = Job(1.0, (1.0,), (1.0,))
    assert Bound([[job, job]]).num_late(1.5) == 1
    assert Bound([[job], [job]]).num_late(1.5) == 0
    assert Bound([[job, job]]).at(1.0) == pytest.approx(2.0, rel=1e-3)
    assert Bound([[job, job]], overhead_s=0.25).at(0.0) == pytest.approx(1.25, rel=1e-3)


def test_work_is_that_of_steps_without_overhead_however_it_is_cut() -> None:
    profile = h200()
    steps = [(2_048, 0), (2_048, 2_048), (904, 4_096)]
    assert sum(profile.step_s([part]) - profile.overhead_s for part in steps) == pytest.approx(
        work_s(profile, 0, 5_000)
    )


def test_a_search_has_to_compute_only_its_last_prompt() -> None:
    cell = ways.OURS.cell(Point("anns-last", 1.0), 1, 20)
    for query in queries_of(cell):
        job = job_of(query, h200())
        assert sum(job.works_s) == pytest.approx(
            work_s(h200(), 0, sum(c.num_tokens for c in query.events[-1].chunks) + 32)
        )  # type: ignore[union-attr]
        assert job.end_s == pytest.approx(query.arrival_s + query.end_s)
        assert list(job.releases_s) == sorted(job.releases_s)


@pytest.mark.parametrize("point", [Point("crawler", 8.0), Point("anns-last", 4.0)])
def test_no_simulated_cell_beats_the_bound(point: Point) -> None:
    least = bound_of((ways.OURS.cell(point, 1, 40),))
    for way in (ways.OURS, ways.NOT_STREAMING, ways.ORACLE, ways.with_other_budget(ways.FCFS)):
        values = [r.ttft_after_retrieval_s for r in run_cell(way.cell(point, 1, 40)).requests]
        assert len(values) == 40
        for rank, fraction in RANKS.items():
            assert percentile(values, fraction) >= least[rank], (way.name, rank)
