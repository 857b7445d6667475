"""Ours against the paper's best ways with all seeds that they have: at P99, one seed decides little."""

from collections.abc import Iterator, Sequence

from streamrag_bench.report.comparison import Pool

from ..markdown import table, triple
from ..plan import Scale, Wanted
from ..points import LIGHT, LOADED, MORE_PRESSED, MORE_SEEDS, TWICE_FULL, Point, more_of
from ..points import PRESSED as PRESSED_POINTS
from ..standing import Seconds, floor_of, least, ratios, seconds_of
from ..ways import FCFS, HINTED, NOT_STREAMING, OURS, Way, paper, with_other_budget, with_our_budget
from .section import Report, Section

TAIL = ("P50", "P95", "P99")
LCAS, CODED = paper("LCAS"), paper("LCAS as coded")
OPEN = (FCFS, LCAS, with_other_budget(FCFS), with_other_budget(LCAS))
PRESSED = (FCFS, paper("FCFS", "cost"), paper("LCAS", "cost"))
"""Of the paper's policies and evictions the best under pressure, and what is judged by itself."""


def wanted(scale: Scale) -> Wanted:
    for point in (*MORE_SEEDS, *MORE_PRESSED):
        for way in (OURS, NOT_STREAMING, _waiting(point), *_others(point)):
            yield point, way
    yield more_of(LOADED[0]) or LOADED[0], HINTED


def _waiting(point: Point) -> Way:
    """Not streaming with another budget, that of ours under memory pressure."""
    return with_our_budget(NOT_STREAMING, point) if point in MORE_PRESSED else with_other_budget(NOT_STREAMING)


def _others(point: Point) -> Sequence[Way]:
    if point in MORE_PRESSED:
        return PRESSED
    return (*OPEN, CODED) if point == more_of(LOADED[0]) else OPEN


def write(report: Report) -> str:
    open_seeds, pressed_seeds = (
        [*report.scale.seeds(points[0]), *report.scale.seeds(more[0])]
        for points, more in ((LOADED, MORE_SEEDS), (TWICE_FULL, MORE_PRESSED))
    )
    return (
        f"How many times as fast ours is as the paper's best ways, of {len(open_seeds)} seeds and, under memory "
        f"pressure, {len(pressed_seeds)}: pooled, and from the seed that suits it least to the one that suits it best. "
        "*The best of these* is taken apart at each percentile, without those whose P99 is worse than that of not "
        "streaming.\n\n" + table(["", "over", *TAIL, "ours, s", "ours/floor"], _rows(report), num_left=2)
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for point in (*LIGHT, *LOADED, *PRESSED_POINTS):
        find = report.results.all_seeds
        mine, waiting = find(point, OURS), find(point, NOT_STREAMING)
        others = {way.name: pool for way in _others(more_of(point) or point) if (pool := find(point, way))}
        if mine is None or not others:
            continue
        seconds = seconds_of(mine)
        to_floor = ratios(seconds, floor_of(mine))
        best = [p for p in others.values() if waiting and seconds_of(p)["P99"] <= seconds_of(waiting)["P99"]]
        groups = {name: [pool] for name, pool in others.items()} | ({"the best of these": best} if best else {})
        for name, pools in groups.items():
            yield [point.name, name, *_times(pools, mine), *(_tail(of) for of in (seconds, to_floor))]


def _times(others: Sequence[Pool], mine: Pool) -> Iterator[str]:
    """Of all seeds and, in brackets, of each."""
    pooled = ratios(_best(others), seconds_of(mine))
    alone = [ratios(_best([p.only([seed]) for p in others]), seconds_of(mine.only([seed]))) for seed in mine.seeds]
    for rank in TAIL:
        values = [each[rank] for each in alone]
        yield f"{pooled[rank]:.2f} ({min(values):.2f}–{max(values):.2f})"


def _tail(of: Seconds) -> str:
    return triple(of[rank] for rank in TAIL)


def _best(pools: Sequence[Pool]) -> Seconds | None:
    return least(map(seconds_of, pools))


SECTION = Section("seeds", "With more seeds", wanted, write)
