"""Ours where chunks tell what is still to come."""

from collections.abc import Iterator

from streamrag_bench.report.comparison import Pool

from ..markdown import table, triple
from ..plan import Scale, Wanted
from ..points import LOADED, TWICE_FULL
from ..standing import Seconds, floor_of, ratios, seconds_of
from ..ways import HINTED, ORACLE, OURS
from .beat import TAIL, standing
from .section import Report, Section

POINTS = (LOADED[0], TWICE_FULL[0])


def wanted(scale: Scale) -> Wanted:
    for point in POINTS:
        yield from ((point, way) for way in (OURS, HINTED, ORACLE))


def write(report: Report) -> str:
    return (
        "Ours, P50/P95/P99 in seconds, and in brackets the envelope over it, and it over the floor. The envelope is "
        "told nothing. *What is left*: the pages in the crawler's queue at the mean gap so far. *The end*: an oracle, "
        "which no retriever has. Both are assumptions of docs/traces.md. "
        f"Seeds {', '.join(map(str, report.scale.seeds(POINTS[0])))}.\n\n"
        + table(["", "ours, told nothing", "told what is left", "an oracle: told the end"], _rows(report))
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for point in POINTS:
        around = standing(report, point, has_more_seeds=False)
        pools = [report.results.pool(point, way) for way in (OURS, HINTED, ORACLE)]
        if around is None or not all(pools):
            continue
        yield [point.name, *(_cell(around.envelope, pool) for pool in pools if pool)]


def _cell(envelope: Seconds | None, pool: Pool) -> str:
    found = seconds_of(pool)
    return f"{_tail(found)} ({_tail(ratios(envelope, found))}; {_tail(ratios(found, floor_of(pool)))})"


def _tail(of: Seconds) -> str:
    return triple(of[rank] for rank in TAIL)


SECTION = Section("hints", "Told what is still to come", wanted, write)
