"""The pictures of a report, as SVG. Needs matplotlib: `pip install 'streamrag[plot]'`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from streamrag.bench.compare import Comparison, Figure, Values
from streamrag.bench.grid import describe_qps
from streamrag.bench.report_canvas import as_svg, formatter, make_panels, plain_log_ticks, seconds_upwards
from streamrag.bench.report_html import figure_text
from streamrag.bench.summary import percentile
from streamrag.support.display_text import for_picture

GREY = "#8a8a8a"
GRID = "#e3e3e3"
# After Okabe and Ito, for any colour vision. Of the streaming arm a policy has a colour and an eviction its dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c564b", "#17324d", "#9acd32")
ARM_COLOURS = {"no-streaming": "#000000", "warming": "#e69f00", "stock-sessions": "#7a4ea3"}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
MAX_POINTS = 300
MIN_S = 1e-4
"""Shorter times are drawn here: a logarithmic axis has no zero."""


def draw_ccdf(comparison: Comparison) -> str:
    """Share of requests whose `ttft_after_retrieval_s` is longer than x, one panel a rate of arrivals."""
    figure, panels = make_panels(len(comparison.qps), 3.5)
    for panel, qps in zip(panels, comparison.qps, strict=False):
        panel.set_title(describe_qps(qps), loc="left", fontsize=10)
        floors = [p.values(lambda d: d.floor_s) for (_, at), p in comparison.pools.items() if at == qps]
        _ccdf(panel, max(floors, key=len), color=GREY, linestyle=(0, (2, 2)), linewidth=1.1)
        for variant in comparison.variants:
            if pool := comparison.pools.get((variant, qps)):
                _ccdf(panel, pool.values(lambda d: d.ttft_after_retrieval_s), **_style(comparison, variant))
        _share_axis(panel, max(len(floor) for floor in floors))
        plain_log_ticks(panel.xaxis)
        panel.set_xlabel("ttft_after_retrieval_s (seconds)")
    _legend(figure, comparison, comparison.variants, floor=True)
    return as_svg(figure)


def draw_invalidated(comparison: Comparison) -> str | None:
    """Share of requests that had more than x computed tokens invalidated; None if there were none."""

    def values(variant: str, qps: float | None) -> list[float]:
        pool = comparison.pools.get((variant, qps))
        return pool.values(lambda d: d.num_invalidated) if pool else []

    drawn = [variant for variant in comparison.variants if any(any(values(variant, qps)) for qps in comparison.qps)]
    shown = [qps for qps in comparison.qps if any(any(values(variant, qps)) for variant in drawn)]
    if not shown:
        return None
    figure, panels = make_panels(len(shown), 3.2)
    for panel, qps in zip(panels, shown, strict=False):
        panel.set_title(describe_qps(qps), loc="left", fontsize=10)
        num = 1
        for variant in drawn:
            tokens = values(variant, qps)
            num = max(num, len(tokens))
            if tokens:
                _ccdf(panel, [max(n, 0.5) for n in tokens], **_style(comparison, variant))
        _share_axis(panel, num)
        panel.set_xlim(left=1)
        panel.xaxis.set_major_formatter(formatter(lambda x: f"{x:,.0f}"))
        panel.set_xlabel("tokens invalidated, per request")
    _legend(figure, comparison, drawn)
    return as_svg(figure)


def draw_ttft_by_qps(comparison: Comparison) -> str:
    """Mean and P95 of both times to the first token against the rate of arrivals; bars if there is one rate only."""
    rates = [qps for qps in comparison.qps if qps is not None]
    if len(rates) < 2:
        return _bars(
            comparison,
            [(f"{time}, {name}", _statistic(comparison, of, name)) for time, of in _TIMES for name in ("mean", "P95")],
        )
    figure, panels = make_panels(4, 3.0, num_columns=2)
    drawn = [(time, of, name) for time, of in _TIMES for name in ("mean", "P95")]
    for panel, (time, of, name) in zip(panels, drawn, strict=True):
        panel.set_title(f"{time}, {name}", loc="left", fontsize=10)
        for variant in comparison.variants:
            _line(panel, comparison, variant, _statistic(comparison, of, name), rates)
        if time == "ttft_after_retrieval_s":
            floors = [_floor_at(comparison, qps, name) for qps in rates]
            panel.plot(rates, floors, color=GREY, linestyle=(0, (2, 2)), linewidth=1.1)
        seconds_upwards(panel)
        panel.set_xlabel("queries per second (QPS)")
        panel.set_xticks(rates, [f"{qps:g}" for qps in rates])
        panel.minorticks_off()
        panel.grid(color=GRID, linewidth=0.7)
    _legend(figure, comparison, comparison.variants, floor=True)
    return as_svg(figure)


def draw_times(comparison: Comparison) -> str:
    """When the last request ended, and for how long the engine computed."""

    def total(name: str) -> "_FigureOf":
        def of(variant: str, qps: float | None) -> Figure | None:
            pool = comparison.pools.get((variant, qps))
            return pool.total(lambda d: getattr(d, name)) if pool else None

        return of

    return _bars(comparison, [("completion_s", total("completion_s")), ("busy_s", total("busy_s"))])


def draw_arrivals(gaps_s: Sequence[float], num_chunks: Sequence[int], num_tokens: Sequence[int]) -> str | None:
    """Histograms of what arrived: gaps between chunks, chunks per query, tokens per query; None without any."""
    shown: list[tuple[str, Sequence[float], Callable[[Any], None]]] = []
    if gaps := [max(gap, MIN_S) for gap in gaps_s]:
        shown.append(("gap between chunks (seconds)", gaps, lambda panel: _log_histogram(panel, gaps)))
    if num_chunks:
        shown.append(("chunks per query", num_chunks, lambda panel: _count_histogram(panel, num_chunks)))
    if num_tokens:
        shown.append(("tokens of the complete prompt", num_tokens, lambda panel: _log_histogram(panel, num_tokens)))
    if not shown:
        return None
    figure, panels = make_panels(len(shown), 2.6, num_columns=3)
    for panel, (label, values, draw) in zip(panels, shown, strict=False):
        draw(panel)
        marks = ", ".join(f"P{q} {figure_text(percentile(values, q / 100))}" for q in (50, 95))
        panel.set_title(marks, loc="left", fontsize=9, color="#555555")
        panel.set_xlabel(label)
        panel.grid(axis="y", color=GRID, linewidth=0.7)
    panels[0].set_ylabel("how many")
    return as_svg(figure)


_TIMES: tuple[tuple[str, Values], ...] = (
    ("ttft_after_retrieval_s", lambda d: d.ttft_after_retrieval_s),
    ("ttft_s", lambda d: d.ttft_s),
)
_FigureOf = Callable[[str, float | None], Figure | None]


def _statistic(comparison: Comparison, of: Values, name: str) -> _FigureOf:
    def figure(variant: str, qps: float | None) -> Figure | None:
        pool = comparison.pools.get((variant, qps))
        return pool.figure(of, name.lower()) if pool else None

    return figure


def _floor_at(comparison: Comparison, qps: float | None, name: str) -> float:
    pools = [pool for (_, at), pool in comparison.pools.items() if at == qps]
    return (
        max(pools, key=lambda pool: len(pool.values(lambda d: d.floor_s)))
        .figure(lambda d: d.floor_s, name.lower())
        .value
    )


def _style(comparison: Comparison, variant: str) -> dict[str, Any]:
    settings = {v: pool.settings for (v, _), pool in comparison.pools.items()}
    own = settings[variant]
    if own.arm != "streaming":
        return {"color": ARM_COLOURS[own.arm], "linestyle": "-", "linewidth": 1.6}
    streaming = [settings[v] for v in comparison.variants if settings[v].arm == "streaming"]
    policies, evictions = (list(dict.fromkeys(getattr(s, name) for s in streaming)) for name in ("policy", "eviction"))
    colour = COLOURS[policies.index(own.policy) % len(COLOURS)]
    dashes = DASHES[evictions.index(own.eviction) % len(DASHES)]
    return {"color": colour, "linestyle": dashes, "linewidth": 1.6}


def _ccdf(panel: Any, values: Sequence[float], **style: Any) -> None:
    ordered = sorted(max(value, MIN_S) for value in values)
    num = len(ordered)
    if not num:
        return
    # Ranks from the top, evenly on the logarithmic axis: every single request of the tail, few of the body.
    steps = {round(num ** (i / MAX_POINTS)) for i in range(MAX_POINTS + 1)}
    ranks = sorted((min(step, num) for step in steps), reverse=True)
    panel.plot([ordered[num - rank] for rank in ranks], [rank / num for rank in ranks], **style)


def _share_axis(panel: Any, num_requests: int) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_ylim(max(0.6 / num_requests, 1e-5), 1.15)
    panel.yaxis.set_major_formatter(formatter(lambda y: f"{100 * y:g} %"))
    panel.set_ylabel("share of requests with more")
    panel.minorticks_off()
    for share, name in ((0.5, "P50"), (0.05, "P95"), (0.01, "P99")):
        if share > 1 / num_requests:
            panel.axhline(share, color="#c9c9c9", linewidth=0.8, zorder=0)
            panel.annotate(
                name, (1.0, share), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7, color=GREY
            )
    panel.grid(axis="x", color=GRID, linewidth=0.7)


def _line(panel: Any, comparison: Comparison, variant: str, figure_of: _FigureOf, rates: Sequence[float]) -> None:
    points = [(qps, figure) for qps in rates if (figure := figure_of(variant, qps)) and math.isfinite(figure.value)]
    x = [qps for qps, _ in points]
    style = _style(comparison, variant)
    panel.plot(x, [figure.value for _, figure in points], marker="o", markersize=3.5, **style)
    panel.vlines(x, [f.low for _, f in points], [f.high for _, f in points], color=style["color"], linewidth=1)


def _bars(comparison: Comparison, columns: Sequence[tuple[str, _FigureOf]]) -> str:
    """One panel a column, one group of bars a rate of arrivals, one bar a variant; a whisker spans the seeds."""
    rows: list[tuple[str, float | None]] = []  # a variant, or the title of a group and NaN
    for qps in comparison.qps:
        rows.append((describe_qps(qps), math.nan))
        rows += [(variant, qps) for variant in comparison.variants if (variant, qps) in comparison.pools]
    figure, panels = make_panels(len(columns), 0.2 * len(rows) + 0.6, num_columns=2)
    for place, (panel, (title, figure_of)) in enumerate(zip(panels, columns, strict=True)):
        panel.set_title(f"{title} (seconds)", loc="left", fontsize=10)
        for y, (variant, qps) in enumerate(rows):
            if (shown := figure_of(variant, qps)) and math.isfinite(shown.value):
                panel.barh(y, shown.value, height=0.7, color=_style(comparison, variant)["color"], alpha=0.75)
                panel.hlines(y, shown.low, shown.high, color="#333333", linewidth=1)
                panel.annotate(f"  {figure_text(shown.value)}", (shown.high, y), va="center", fontsize=7)
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.margins(x=0.14)
        panel.set_xlim(left=0)
        panel.set_yticks(
            range(len(rows)), [for_picture(name) for name, _ in rows] if place % 2 == 0 else [""] * len(rows)
        )
        for label, (_, qps) in zip(panel.get_yticklabels(), rows, strict=True):
            if qps is not None and math.isnan(qps):
                label.set_fontweight("bold")
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color=GRID, linewidth=0.7)
    return as_svg(figure)


def _log_histogram(panel: Any, values: Sequence[float]) -> None:
    low, high = math.log10(max(min(values), MIN_S)), math.log10(max(*values, 2 * MIN_S))
    num = 30
    panel.hist(values, bins=[10 ** (low + (high + 1e-9 - low) * i / num) for i in range(num + 1)], color=COLOURS[4])
    panel.set_xscale("log")
    plain_log_ticks(panel.xaxis)


def _count_histogram(panel: Any, values: Sequence[int]) -> None:
    panel.hist(values, bins=[n - 0.5 for n in range(min(values), max(values) + 2)], color=COLOURS[4], rwidth=0.85)


def _legend(figure: Any, comparison: Comparison, variants: Sequence[str], *, floor: bool = False) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=for_picture(variant), **_style(comparison, variant)) for variant in variants]
    if floor:
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (2, 2)), linewidth=1.1, label="floor: alone"))
    num_columns = 4 if figure.get_size_inches()[0] > 8 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=8.5)
