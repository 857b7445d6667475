"""Memory pressure: table 3, what becomes of evicted KV under each policy, and table 4, how often it is evicted."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from streamrag_bench.report.comparison import Pool

from ..markdown import percent, table, triple
from ..pictures import Curves, draw_ccdfs
from ..plan import Scale, Wanted
from ..points import HALF_KV, TWICE_FULL, Point, demand
from ..published import EVICTIONS, KV_TOKENS, PREEMPTIONS, PRESSURE, PRESSURE_NOT_STREAMING, WORKLOADS
from ..standing import floor_of, ratios, seconds_of
from ..ways import NOT_STREAMING, OURS, PAPER_SWAPPING, PAPER_WAYS, TABLE_POLICIES, Way, paper, without_prefix_cache
from .section import Report, Section

UNCACHED = tuple(without_prefix_cache(paper(policy)) for policy in TABLE_POLICIES)
WAYS = (NOT_STREAMING, *PAPER_WAYS, *PAPER_SWAPPING, *UNCACHED, OURS)


def wanted(scale: Scale) -> Wanted:
    for point in TWICE_FULL:
        for way in WAYS:
            yield point, way


class Column(NamedTuple):
    """Of tables 3 and 4: how evicted KV is treated."""

    title: str
    published: int
    """Index into the published figures."""
    ways: dict[str, Way]


COPYING = ("swap", "cost")
COLUMNS = (
    Column("recompute, no prefix cache", 0, {p: without_prefix_cache(paper(p)) for p in TABLE_POLICIES}),
    *(Column(e, EVICTIONS.index(e), {p: paper(p, e) for p in TABLE_POLICIES}) for e in ("recompute", "swap", "cost")),
)


def write(report: Report) -> str:
    parts = [
        "The paper stretches the gaps between chunks, 10x for crawls at 4 QPS and 30x for searches at 2 QPS. How far "
        "that fills memory depends on what a stream holds and for how long, which the paper does not tell; here the "
        "KV cache is as large as makes the streams of one time want twice of it, and half of that:\n\n",
        table(
            [
                "point",
                "KV cache",
                "residency of a stream",
                "wanted at one time",
                "over-subscription",
                "by their formula",
            ],
            map(_point_row, (*TWICE_FULL, *HALF_KV)),
        ),
        "\n*Residency*: of a stream, from its first chunk to its end, in the mean. "
        "*Wanted at one time*: tokens that live streams have sent, in the mean. *Their formula*: tokens per query x "
        f"duration x QPS, over the KV cache; with their own {KV_TOKENS / 1e6:.2f} M tokens it says "
        f"{_by_formula(TWICE_FULL[0]) / KV_TOKENS:.1f} and {_by_formula(TWICE_FULL[1]) / KV_TOKENS:.1f}, where the "
        f"streams of one time want {demand(TWICE_FULL[0]).num_tokens / KV_TOKENS:.2f} and "
        f"{demand(TWICE_FULL[1]).num_tokens / KV_TOKENS:.2f} of it.\n\n"
        "Prefix caching was off there. Here it is off in the first column only: our host memory knows KV by the hashes "
        "of the prefix cache, so that `swap` and `cost` need it; the second column is recomputation with it, where "
        "what nobody has overwritten is found again. Copies run beside compute here, and block it there.\n",
        _extent(report),
    ]
    for point in TWICE_FULL:
        parts += [f"\n### {point.name}\n\n", *_ablation(report, point)]
    panels = [panel for point in TWICE_FULL if (panel := _ccdf(report, point)).values]
    if panels:
        figure = draw_ccdfs(panels, "ttft_after_retrieval_s (seconds)", num_columns=2)
        parts += ["\n" + report.pictures.add("pressure-ccdf", figure, "CCDFs of the TTFT under memory pressure")]
    return "".join(parts)


def _extent(report: Report) -> str:
    num_crawls = report.scale.num_queries(TWICE_FULL[0])
    seeds = ", ".join(map(str, report.scale.seeds(TWICE_FULL[0])))
    crawls, searches = (WORKLOADS[name].num_queries for name in ("crawler", "anns"))
    return (
        f"\nCrawls are the first {num_crawls:,} of {crawls:,}, where the paper has all: cells that copy take four "
        f'times as long to simulate. Searches are all {searches}. Seeds {seeds}; targets and "With more seeds" have '
        "more.\n"
    )


def _by_formula(point: Point) -> float:
    return demand(point).published_formula


def _point_row(point: Point) -> list[str]:
    wants = demand(point)
    kv_tokens = point.kv_tokens or KV_TOKENS
    return [
        f"{point.workload} {point.qps:g} QPS, gaps {point.delay:g}x",
        f"{kv_tokens:,}",
        f"{wants.residency_s:.0f} s",
        f"{wants.num_tokens / 1e6:.2f} M",
        f"{wants.num_tokens / kv_tokens:.2f}",
        f"{wants.published_formula / kv_tokens:.2f}",
    ]


def _ablation(report: Report, point: Point) -> list[str]:
    workload = point.workload.removesuffix("-last")
    baseline = report.results.pool(point, NOT_STREAMING)
    p50, p99 = PRESSURE_NOT_STREAMING[workload]
    if baseline is None:
        return ["*Not simulated yet.*\n"]
    seconds = seconds_of(baseline)
    mine = _speed_ups(baseline, report.results.pool(point, OURS))
    head = ["", *(f"{column.title}: {whose}" for column in COLUMNS for whose in ("published", "ours"))]
    return [
        "Speed-ups over not streaming, P50 / P99 (table 3), and in brackets the ratios to the floor. Not streaming "
        f"takes {triple((seconds['P50'], seconds['P99']))} s, published {p50}/{p99} s. Ours, with its defaults: "
        f"{mine}.\n\n",
        table(head, _table_3(report, point, workload, baseline)),
        "\nPreemptions, and the share swapped (table 4):\n\n",
        table(head, _table_4(report, point, workload)),
    ]


def _speed_ups(baseline: Pool, pool: Pool | None) -> str:
    """And in brackets the ratio to the floor."""
    if pool is None:
        return "–"
    before, after = seconds_of(baseline), seconds_of(pool)
    to_floor = ratios(after, floor_of(pool))
    speed_ups = " / ".join(f"{before[rank] / after[rank]:.2f}" for rank in ("P50", "P99"))
    return f"{speed_ups} ({triple(to_floor[rank] for rank in ('P50', 'P99'))})"


def _table_3(report: Report, point: Point, workload: str, baseline: Pool) -> Iterator[list[str]]:
    for policy in TABLE_POLICIES:
        row = [policy]
        for column in COLUMNS:
            published = PRESSURE[workload][policy][column.published]
            found = _speed_ups(baseline, report.results.pool(point, column.ways[policy]))
            row += [" / ".join(f"{value:.2f}" for value in published), found]
        yield row


def _table_4(report: Report, point: Point, workload: str) -> Iterator[list[str]]:
    for policy in TABLE_POLICIES:
        row = [policy]
        for column in COLUMNS:
            published = PREEMPTIONS[workload][policy]
            share = f" ({published[3]:.0%} swapped)" if column.title == "cost" else ""
            pool = report.results.pool(point, column.ways[policy])
            row += [f"{published[column.published]:,}{share}", _preempted(pool, can_swap=column.title in COPYING)]
        yield row


def _preempted(pool: Pool | None, *, can_swap: bool) -> str:
    """In the mean of a seed."""
    if pool is None:
        return "–"
    num = preemptions(pool)
    share = f" ({percent(num['swap'] / num.total())} swapped)" if can_swap and num.total() else ""
    return f"{num.total() / len(pool.digests):,.0f}{share}"


def preemptions(pool: Pool) -> Counter[str]:
    """By fate, in all seeds."""
    num = Counter[str]()
    for digest in pool.digests:
        num.update(digest.num_preemptions or {})
    return num


def _ccdf(report: Report, point: Point) -> Curves:
    shown = (NOT_STREAMING, *PAPER_WAYS, OURS)
    found = report.results.at(point, shown)
    return Curves(point.name, {w.name: pool.values(lambda d: d.ttft_after_retrieval_s) for w, pool in found})


SECTION = Section("pressure", "Memory pressure (tables 3 and 4)", wanted, write)
