"""What is published agrees with itself, and with what is simulated."""

import pytest

from studies.paper import published, ways
from studies.paper.points import LADDERS


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
