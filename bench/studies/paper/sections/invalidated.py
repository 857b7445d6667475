"""Tokens that updates made useless after they were computed: figure 11."""

from collections.abc import Iterator, Sequence

from ..markdown import percent, table
from ..pictures import Curves, draw_ccdfs
from ..plan import Scale, Wanted
from ..points import LADDERS, Point
from ..published import INVALIDATED_SHARE, INVALIDATED_TOKENS
from ..ways import OURS, PAPER_WAYS, Way
from .section import Report, Section

WAYS = (*PAPER_WAYS, OURS)
POINTS = (*LADDERS["anns"], *LADDERS["anns-last"])


def wanted(scale: Scale) -> Wanted:
    for point in POINTS:
        for way in WAYS:
            yield point, way


def write(report: Report) -> str:
    picture = draw_ccdfs(list(_ccdfs(report)), "tokens invalidated, per request", least=10.0)
    return (
        f"Share of the searches that invalidate more than {INVALIDATED_TOKENS:,} tokens. Published: more than "
        f"{INVALIDATED_SHARE:.0%} at every rate and under every policy, with curves that nearly overlap.\n\n"
        + table(["", *(way.name for way in WAYS)], _rows(report))
        + "\n"
        + report.pictures.add("invalidated", picture, "CCDFs of the tokens invalidated")
    )


def share(values: Sequence[float]) -> float:
    """Of the requests that invalidate more than `INVALIDATED_TOKENS`."""
    return sum(value > INVALIDATED_TOKENS for value in values) / len(values)


def share_of(report: Report, point: Point, way: Way) -> float | None:
    pool = report.results.pool(point, way)
    return share(pool.values(lambda d: d.num_invalidated)) if pool else None


def _rows(report: Report) -> Iterator[list[str]]:
    for point in POINTS:
        yield [point.name, *(percent(share_of(report, point, way)) for way in WAYS)]


def _ccdfs(report: Report) -> Iterator[Curves]:
    for point in POINTS:
        found = report.results.at(point, WAYS)
        yield Curves(point.name, {way.name: pool.values(lambda d: d.num_invalidated) for way, pool in found})


SECTION = Section("invalidated", "Tokens invalidated (figure 11)", wanted, write)
