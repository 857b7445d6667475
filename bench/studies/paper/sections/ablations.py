"""Ours without each of its parts."""

from collections.abc import Iterator

from ..markdown import table, triple
from ..plan import Scale, Wanted
from ..points import BEATEN, HALF_KV, LIGHT, LOADED, Point
from ..standing import floor_of, ratios, seconds_of
from ..ways import ABLATIONS, OURS, Way, ablations
from .section import Report, Section

TAIL = ("P50", "P95", "P99")
POINTS = (*LIGHT, *LOADED, *HALF_KV)

NOT_ALONE = (
    "what an evicted prompt is had back from the host is no work, tokens count by what they attend to, long steps are "
    "planned late",
    "of partial prompts the oldest first",
    "victims are who is expected to wait for longest",
    "what is likely to be in vain keeps nobody waiting",
    "blocks are written through ahead",
)
"""Rules that no option switches off. What the first four do was measured when they came."""


def _ways(point: Point) -> tuple[Way, ...]:
    return ablations(is_pressed=point.kind == "pressure")


def wanted(scale: Scale) -> Wanted:
    for point in POINTS:
        for way in (OURS, *_ways(point)):
            yield point, way


def write(report: Report) -> str:
    names = [way.name.removeprefix("ours, ") for way in ablations()]
    same = [name for name in ABLATIONS if name not in names]
    missing = [point.name for point in BEATEN if point not in POINTS]
    seeds = ", ".join(map(str, report.scale.seeds(LOADED[0])))
    return (
        "How many times as long it takes without each part, P50/P95/P99, and how much longer the engine computes; more "
        f"than 1: the part helps. Seeds {seeds}. Parts that decide about memory are left out (–) where nobody is "
        "evicted."
        + (f" Not simulated here: {'; '.join(missing)}." if missing else "")
        + (f" No part of the default, and so left out: {', '.join(same)}." if same else "")
        + f" Rules that no option switches off alone: {'; '.join(NOT_ALONE)}.\n\n"
        + table(["", *names, "ours/floor"], _rows(report))
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for point in POINTS:
        whole = report.results.pool(point, OURS)
        row = [point.name]
        for way in ablations():
            pool = report.results.pool(point, way)
            if whole is None or pool is None:
                row.append("–")
                continue
            found = ratios(seconds_of(pool), seconds_of(whole))
            busy = pool.total(lambda d: d.busy_s).value / whole.total(lambda d: d.busy_s).value
            row.append(f"{triple(found[rank] for rank in TAIL)}, busy {busy:.2f}")
        to_floor = ratios(seconds_of(whole), floor_of(whole)) if whole else None
        yield [*row, triple(to_floor[rank] for rank in TAIL) if to_floor else "–"]


SECTION = Section("ablations", "Ours without each of its parts", wanted, write)
