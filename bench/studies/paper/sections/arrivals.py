"""How chunks arrive: figures 6 and 7, table 2."""

from streamrag_bench.report.html import figure_text
from streamrag_bench.trace.generate import anns, crawler
from streamrag_bench.trace.statistics import Distribution, TraceStatistics, describe

from ..markdown import table
from ..pictures import draw_histograms
from ..published import WORKLOADS
from .section import Report, Section, nothing

SEED = 1


def write(report: Report) -> str:
    found = {"crawler": describe(crawler(seed=SEED)), "anns": describe(anns(seed=SEED))}
    panels = []
    for name, statistics in found.items():
        gaps, chunks = statistics.gap_ms, statistics.chunks_per_query
        published = WORKLOADS[name]
        median = f"median {gaps.percentile(50):.1f} ms, published {published.gap_ms['p50']:g} ms"
        panels.append((f"{name}: gaps between chunks, {median}", "milliseconds", gaps.values, False))
        panels.append((f"{name}: chunks per query", "chunks", chunks.values, True))
    picture = report.pictures.add("arrivals", draw_histograms(panels), "Gaps between chunks, and chunks per query")
    few = found["anns"].chunks_per_query
    some = found["crawler"].chunks_per_query
    return (
        "The loads are generated from the published percentiles (docs/traces.md), so that they agree by "
        "construction; ours are of seed 1.\n\n"
        + table(["", *(f"{name}, {whose}" for name in found for whose in ("published", "ours"))], _rows(found))
        + f"\nFigure 7: {1 - few.share_over(3):.0%} of the searches have 1 to 3 chunks (published: more than half), "
        f"{some.share_over(5) - some.share_over(10):.0%} of the crawls 6 to 10 (published: most).\n\n" + picture
    )


def _rows(found: dict[str, TraceStatistics]) -> list[list[str]]:
    rows = [["queries"], ["tokens per query: mean, P50, P75, P95"], ["retrieval, s: mean, P50, P95"]]
    rows += [["gap between chunks, ms: mean, P50, P95, P99"], ["chunks per query: mean, max"]]
    for name, ours in found.items():
        theirs = WORKLOADS[name]
        rows[0] += [f"{theirs.num_queries:,}", f"{ours.num_queries:,}"]
        published = (theirs.tokens, theirs.retrieval_s, theirs.gap_ms, theirs.chunks)
        drawn = (ours.tokens_per_query, ours.retrieval_s, ours.gap_ms, ours.chunks_per_query)
        for row, figures, distribution in zip(rows[1:], published, drawn, strict=True):
            row += [" / ".join(map(figure_text, figures.values())), _figures(distribution, list(figures))]
    return rows


def _figures(distribution: Distribution, names: list[str]) -> str:
    summary = distribution.summary()
    return " / ".join(figure_text(summary[name]) for name in names)


SECTION = Section("arrivals", "How chunks arrive (figures 6 and 7, table 2)", nothing, write)
