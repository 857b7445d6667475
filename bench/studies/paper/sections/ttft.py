"""Time to the first token without memory pressure: figures 8 and 9."""

from collections.abc import Iterator

from streamrag_bench.report.comparison import Pool, mean

from ..markdown import span, table, triple
from ..pictures import Curves, Line, Lines, draw_ccdfs, draw_lines
from ..plan import Scale, Wanted
from ..points import LADDERS, Point
from ..published import SECONDS, SPEED_UPS
from ..standing import floor_of, ratios, seconds_of
from ..ways import FCFS, FCFS_SYNC, NOT_STREAMING, OURS, PAPER_WAYS, Way
from .section import Report, Section

WAYS = (NOT_STREAMING, *PAPER_WAYS, OURS)
TAIL = ("P50", "P95", "P99")


def wanted(scale: Scale) -> Wanted:
    for points in LADDERS.values():
        for point in points:
            for way in WAYS:
                yield point, way
        yield points[-1], FCFS_SYNC


def write(report: Report) -> str:
    return (
        "`ttft_after_retrieval_s`, P50/P95/P99 in seconds of all requests of all seeds. Published figures in "
        "parentheses; those of the searches stand beside both readings. `FCFS, no step ahead` is the same on an engine "
        "that plans a step when the one before has ended, as theirs does; all others plan one ahead, as vLLM does "
        "today. The *floor* is that of a request alone, with the published token budget and with ours; the pictures "
        f"have ours. Seeds {', '.join(map(str, report.scale.seeds(LADDERS['crawler'][0])))}.\n\n"
        + table(
            ["", *(way.name for way in (*WAYS, FCFS_SYNC)), "floor", "floor, our budget", "ours/floor, our budget"],
            _rows(report),
        )
        + "\n### CCDFs (figure 8)\n\n"
        + report.pictures.add(
            "ttft-ccdf", draw_ccdfs(list(_ccdfs(report)), "ttft_after_retrieval_s (seconds)"), "CCDFs of the TTFT"
        )
        + "\n### Against the rate of arrivals (figure 9)\n\n"
        + report.pictures.add(
            "ttft-qps", draw_lines(list(_lines(report)), "queries per second (QPS)", "seconds"), "Mean and P95 by QPS"
        )
        + "\nSpeed-ups that the paper's text has:\n\n"
        + table(["", "published", "ours"], speed_up_rows(report), num_left=1)
    )


def _rows(report: Report) -> Iterator[list[str]]:
    for workload, points in LADDERS.items():
        for point in points:
            row = [f"{workload} {point.qps:g} QPS"]
            pools = [report.results.pool(point, way) for way in (*WAYS, FCFS_SYNC)]
            for way, pool in zip((*WAYS, FCFS_SYNC), pools, strict=True):
                published = SECONDS.get((workload.removesuffix("-last"), point.qps, way.name))
                text = triple(seconds_of(pool)[rank] for rank in TAIL) if pool else "–"
                row.append(f"{text} ({triple(published)})" if published else text)
            by_way = dict(zip((*WAYS, FCFS_SYNC), pools, strict=True))
            row += [_floor(by_way[NOT_STREAMING]), _floor(by_way[OURS])]
            mine = by_way[OURS]
            to_floor = ratios(seconds_of(mine), floor_of(mine)) if mine else None
            yield [*row, triple(to_floor[rank] for rank in TAIL) if to_floor else "–"]


def _floor(pool: Pool | None) -> str:
    return triple(floor_of(pool)[rank] for rank in TAIL) if pool else "–"


def _ccdfs(report: Report) -> Iterator[Curves]:
    for points in LADDERS.values():
        for point in points:
            pools = dict(report.results.at(point, WAYS))
            values = {way.name: pool.values(lambda d: d.ttft_after_retrieval_s) for way, pool in pools.items()}
            if OURS in pools:
                values["floor"] = pools[OURS].values(lambda d: d.floor_s)
            yield Curves(point.name, values)


def _lines(report: Report) -> Iterator[Lines]:
    for name in ("mean", "P95"):
        for workload, points in LADDERS.items():
            lines = {}
            for way in WAYS:
                found = [(point.qps, pool) for point in points if (pool := report.results.pool(point, way))]
                lines[way.name] = Line([qps for qps, _ in found], [_statistic(pool, name) for _, pool in found])
            if name == "P95":
                for way in (NOT_STREAMING, FCFS):
                    lines[f"published: {way.name}"] = _published(workload.removesuffix("-last"), way)
            yield Lines(f"{workload}, {name}", lines)


def _statistic(pool: Pool, name: str) -> float:
    return mean(pool.values(lambda d: d.ttft_after_retrieval_s)) if name == "mean" else seconds_of(pool)[name]


def _published(workload: str, way: Way) -> Line:
    """P95 by QPS, as far as there are any."""
    found = [
        (qps, seconds[1])
        for (of, qps, name), seconds in SECONDS.items()
        if of == workload and name == way.name and seconds[1] is not None
    ]
    return Line([qps for qps, _ in found], [second for _, second in found])


def speed_up(report: Report, point: Point, rank: str, way: Way, over: Way) -> float | None:
    """How many times as fast as `over`."""
    pool, other = report.results.pool(point, way), report.results.pool(point, over)
    return seconds_of(other)[rank] / seconds_of(pool)[rank] if pool and other else None


def speed_up_rows(report: Report) -> Iterator[list[str]]:
    by_name = {way.name: way for way in WAYS}
    for each in SPEED_UPS:
        for workload, points in LADDERS.items():
            if workload.removesuffix("-last") != each.workload:
                continue
            point = next(point for point in points if point.qps == each.qps)
            named = [way for way in PAPER_WAYS if each.way in (way.name, "streaming")]
            found = [speed_up(report, point, each.rank, way, by_name[each.over]) for way in named]
            known = [ratio for ratio in found if ratio is not None]
            spread = (round(min(known), 2), round(max(known), 2)) if known else None
            what = f"{point.name}, {each.rank}, {each.way} over {each.over}"
            yield [what, span(each.least, each.most), span(*spread) if spread else "–"]


SECTION = Section("ttft", "Time to the first token (figures 8 and 9)", wanted, write)
