"""Plot a trace: times and sizes of its queries and chunks."""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from math import log10
from pathlib import Path
from typing import Any

from streamrag.support.files import write_atomic
from streamrag.trace.values import Trace
from streamrag_bench.report.canvas import for_picture
from streamrag_bench.trace.statistics import Distribution, TraceStatistics

BARS, LINE = "#8fb8de", "#35618e"
MAX_BINS = 30
NUM_QUERIES_SHOWN = 40
WIDE = 50  # a distribution gets a logarithmic axis if it spans this factor, and a fifth of it above the median

PANELS = (
    ("tokens_per_query", "Size of a query's final context", "tokens"),
    ("tokens_per_chunk", "Size of a chunk", "tokens"),
    ("chunks_per_query", "Chunk events of a query", "events"),
    ("retrieval_s", "Retrieval of a query", "seconds"),
    ("gap_ms", "Gap between chunk events of a query", "milliseconds"),
    ("first_chunk_to_end_s", "From first chunk to end of retrieval", "seconds"),
    ("changed_share", "Share of a context changed by an update", "share of its tokens"),
    ("num_invalidated", "Tokens invalidated in a query", "tokens"),
    ("num_output_tokens", "Length of an answer", "tokens"),
)
"""Histograms: a field of the statistics, a title and a unit."""


def draw_trace(path: Path, trace: Trace, statistics: TraceStatistics, *, title: str) -> None:
    """Write a PNG with the arrivals, the events of the first queries, and a histogram of each distribution.

    There is no panel for events if no query has several, nor for a distribution of equal values.

    :raises ConfigurationError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    draw: list[Callable[[Any], None]] = [partial(_draw_arrivals, trace=trace, statistics=statistics)]
    if statistics.mode != "plain":
        draw.append(partial(_draw_events, trace=trace))
    for name, heading, unit in PANELS:
        values: Distribution = getattr(statistics, name)
        if values.max > values.min:
            draw.append(partial(_draw_histogram, values=values, title=heading, unit=unit))
    num_rows = (len(draw) + 2) // 3
    figure = Figure(figsize=(13, 3.1 * num_rows + 0.6), layout="constrained", dpi=110)
    figure.suptitle(for_picture(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
    for number, draw_panel in enumerate(draw, start=1):
        axes = figure.add_subplot(num_rows, 3, number)
        draw_panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    write_atomic(path, drawn.getvalue())


def _draw_histogram(axes: Any, *, values: Distribution, title: str, unit: str) -> None:
    """Draw a histogram with lines at mean, P50 and P95, and with these figures and the maximum below it.

    The axis is logarithmic, and leaves out 0, if the values spread wide. Few different whole numbers get a bin each.
    """
    positive = [value for value in values.values if value > 0]
    spread = values.max / positive[0] if len(positive) > 0.9 * values.num else 1.0
    is_wide = spread > WIDE and values.max > WIDE / 5 * values.percentile(50)
    num_bins = min(MAX_BINS, 2 + round(2 * values.num**0.5))
    if is_wide:
        low, high = log10(positive[0]), log10(positive[-1])
        edges = [10 ** (low + (high - low) * step / num_bins) for step in range(num_bins + 1)]
        edges[0], edges[-1] = positive[0], positive[-1]
        axes.hist(positive, bins=edges, color=BARS)
        axes.set_xscale("log")
    else:
        is_count = all(value == int(value) for value in values.values) and values.max - values.min < MAX_BINS
        bins = [low - 0.5 for low in range(int(values.min), int(values.max) + 2)] if is_count else num_bins
        axes.hist(values.values, bins=bins, color=BARS)
        axes.xaxis.get_major_locator().set_params(integer=is_count)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("how many", fontsize=8)
    for name, value in (("mean", values.mean), ("P50", values.percentile(50)), ("P95", values.percentile(95))):
        if value > 0 or not is_wide:
            axes.axvline(value, color=LINE, linewidth=1, linestyle=":" if name == "mean" else "-")
    axes.set_title(title, loc="left", fontsize=10)
    figures = f"P50 {_short(values.percentile(50))}, P95 {_short(values.percentile(95))}, max {_short(values.max)}"
    axes.set_xlabel(f"{unit}\nmean {_short(values.mean)} (dotted), {figures}", fontsize=8)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _draw_arrivals(axes: Any, *, trace: Trace, statistics: TraceStatistics) -> None:
    """Draw the number of queries that have arrived as steps over the seconds, and write the rate below."""
    arrivals = [query.arrival_s for query in trace.queries]
    axes.step(arrivals, range(1, len(arrivals) + 1), where="post", color=LINE)
    axes.set_title("Arrivals of queries", loc="left", fontsize=10)
    rate = f"{statistics.qps:.3g} per second" if statistics.qps else "all at once"
    axes.set_xlabel(f"seconds\n{rate}", fontsize=8)
    axes.set_ylabel("queries so far", fontsize=8)
    axes.set_ylim(bottom=0)


def _draw_events(axes: Any, *, trace: Trace) -> None:
    """Draw the first queries with events in rows: a line until the end of retrieval, and a tick for each event."""
    shown = [query for query in trace.queries if query.events][:NUM_QUERIES_SHOWN]
    for y, query in enumerate(shown):
        axes.hlines(y, 0, query.end_s, color=BARS, linewidth=1.5)
        axes.plot([event.at_s for event in query.events], [y] * len(query.events), "|", color=LINE, markersize=4)
    axes.set_title(f"Chunk events of the first {len(shown)} queries", loc="left", fontsize=10)
    axes.set_xlabel(
        "seconds from the query's arrival\na tick for each event, a line to the end of retrieval", fontsize=8
    )
    axes.set_yticks([])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(left=0)
