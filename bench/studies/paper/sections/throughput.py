"""Throughput: figure 10, and what it does not show."""

from collections.abc import Iterator

from streamrag_bench.report.html import figure_text

from ..markdown import table, times
from ..pictures import Line, Lines, draw_lines
from ..plan import Scale, Wanted
from ..points import LADDERS
from ..ways import NOT_STREAMING, OURS, Way, with_our_budget
from . import ttft
from .section import Report, Section
from .ttft import WAYS


def wanted(scale: Scale) -> Wanted:
    yield from ttft.wanted(scale)
    for points in LADDERS.values():
        for point in points:
            yield point, with_our_budget(NOT_STREAMING, point)


def write(report: Report) -> str:
    return (
        "When the last request ended, and below it for how long the engine computed; over those of not streaming, in "
        "the mean of the seeds. The arrivals alone take most of the completion time, so that it proves little: "
        "published, all are within about 1 %. Of busy times nothing is published. Not streaming and the paper's ways "
        "have the published token budget, 2,048 a step for crawls, and ours 8,192: the last column is over not "
        "streaming with as many as ours.\n\n"
        + table(["", "not streaming, s", *(way.name for way in WAYS[1:]), "ours, equal budgets"], _rows(report))
        + "\n"
        + report.pictures.add(
            "throughput",
            draw_lines(list(_lines(report)), "queries per second (QPS)", "seconds", y_log=False),
            "Completion and busy time",
        )
    )


def _total(report: Report, workload: str, qps: float, way: Way, name: str) -> float | None:
    point = next(point for point in LADDERS[workload] if point.qps == qps)
    pool = report.results.pool(point, way)
    return pool.total(lambda d: getattr(d, name)).value if pool else None


def _rows(report: Report) -> Iterator[list[str]]:
    for workload, points in LADDERS.items():
        for point in points:
            for name in ("completion_s", "busy_s"):
                found = [_total(report, workload, point.qps, way, name) for way in WAYS]
                ratios = [times(each / found[0] if each and found[0] else None) for each in found[1:]]
                same = _total(report, workload, point.qps, with_our_budget(NOT_STREAMING, point), name)
                mine = _total(report, workload, point.qps, OURS, name)
                ratios.append(times(mine / same if mine and same else None))
                yield [f"{point.name}, `{name}`", figure_text(found[0]), *ratios]


def _lines(report: Report) -> Iterator[Lines]:
    for name in ("completion_s", "busy_s"):
        for workload, points in LADDERS.items():
            rates = [point.qps for point in points]
            lines = {}
            for way in WAYS:
                found = [(qps, _total(report, workload, qps, way, name)) for qps in rates]
                known = [(qps, value) for qps, value in found if value]
                lines[way.name] = Line([qps for qps, _ in known], [value for _, value in known])
            yield Lines(f"{workload}, {name}", lines)


SECTION = Section("throughput", "Throughput (figure 10)", wanted, write)
