"""Ours against the paper's best ways with more seeds than the other tables have: at P99, one seed decides little."""

from collections.abc import Iterator, Sequence

from streamrag.bench.compare import Pool

from ..markdown import table, triple
from ..plan import Scale, Wanted
from ..points import MORE_PRESSED, MORE_SEEDS, Point
from ..standing import Seconds, floor_of, least, ratios, seconds_of
from ..ways import FCFS, OURS, Way, paper, with_other_budget
from .section import Report, Section

TAIL = ("P50", "P95", "P99")
OPEN = (FCFS, paper("LCAS"), with_other_budget(FCFS), with_other_budget(paper("LCAS")))
PRESSED = (paper("FCFS", "cost"), paper("LCAS", "swap"), paper("LCAS", "cost"))
"""Of the paper's policies and evictions the best under pressure."""


def wanted(scale: Scale) -> Wanted:
    for point in () if scale.has_all_ways else (*MORE_SEEDS, *MORE_PRESSED):
        yield from ((point, way) for way in (OURS, *_others(point)))


def _others(point: Point) -> Sequence[Way]:
    return PRESSED if point in MORE_PRESSED else OPEN


def write(report: Report) -> str:
    if report.scale.has_all_ways:
        return "All tables have these seeds.\n"
    open_seeds, pressed_seeds = (report.scale.seeds(points[0]) for points in (MORE_SEEDS, MORE_PRESSED))
    return (
        f"How many times as fast ours is as the paper's best ways, with {len(open_seeds)} more seeds and, under memory "
        f"pressure, {len(pressed_seeds)}: pooled, and from the seed that suits it least to the one that suits it best. "
        "*The best of these* is taken apart at each percentile.\n\n"
        + table(["", "over", *TAIL, "ours, s", "ours/floor"], _rows(report), num_left=2)
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for point in (*MORE_SEEDS, *MORE_PRESSED):
        mine = report.results.pool(point, OURS)
        others = {way.name: pool for way in _others(point) if (pool := report.results.pool(point, way))}
        if mine is None or not others:
            continue
        seconds = seconds_of(mine)
        to_floor = ratios(seconds, floor_of(mine))
        groups = {name: [pool] for name, pool in others.items()} | {"the best of these": [*others.values()]}
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
