"""Ours without each of its parts."""

from collections.abc import Iterator

from ..markdown import table, triple
from ..plan import Scale, Wanted
from ..points import BEATEN, HALF_KV, LOADED, Point
from ..standing import ratios, seconds_of
from ..ways import ABLATIONS, OURS, ablations
from .section import Report, Section

TAIL = ("P50", "P95", "P99")


def _points(scale: Scale) -> tuple[Point, ...]:
    return BEATEN if scale.has_all_ways else (*LOADED, *HALF_KV)


def wanted(scale: Scale) -> Wanted:
    for point in _points(scale):
        for way in (OURS, *ablations()):
            yield point, way


def write(report: Report) -> str:
    names = [way.name.removeprefix("ours, ") for way in ablations()]
    same = [name for name in ABLATIONS if name not in names]
    return (
        "How many times as long it takes without each part, P50/P95/P99, and how much longer the engine computes; more "
        "than 1: the part helps."
        + (f" No part of the default, and so left out: {', '.join(same)}." if same else "")
        + "\n\n"
        + table(["", *names], _rows(report))
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for point in _points(report.scale):
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
        yield row


SECTION = Section("ablations", "Ours without each of its parts", wanted, write)
