"""The plots of a report, as SVG. Needs matplotlib, the extra `plot`."""

import math
from collections.abc import Sequence
from typing import Any

from streamrag_bench.grid import describe_qps
from streamrag_bench.report.canvas import (
    add_ccdf,
    as_svg,
    for_picture,
    formatter,
    make_panels,
    plain_log_ticks,
    seconds_upwards,
)
from streamrag_bench.report.comparison import LoadComparison, Values

GREY = "#8a8a8a"
GRID = "#e3e3e3"
# Okabe and Ito's palette, for all colour vision. In the streaming arm, colours are policies and dashes are evictions.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c564b", "#17324d", "#9acd32")
ARM_COLOURS = {"no-streaming": "#000000", "warming": "#e69f00", "stock-sessions": "#7a4ea3"}
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
FLOOR: dict[str, Any] = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1.1}
MIN_S = 1e-4  # shorter times are clipped to this, because a logarithmic axis has no zero
TIMES: tuple[tuple[str, Values], ...] = (
    ("ttft_after_retrieval_s", lambda d: d.ttft_after_retrieval_s),
    ("ttft_s", lambda d: d.ttft_s),
)


def draw_ccdf(comparison: LoadComparison) -> str:
    """Return an SVG of the CCDF of `ttft_after_retrieval_s` by variant and of the floor, with one panel per rate."""
    figure, panels = make_panels(len(comparison.qps), 3.5)
    for panel, qps in zip(panels, comparison.qps, strict=True):
        panel.set_title(describe_qps(qps), loc="left", fontsize=10)
        floors = comparison.floors(qps)
        add_ccdf(panel, floors.values(lambda d: d.floor_s), MIN_S, **FLOOR)
        for variant in comparison.variants:
            if pool := comparison.pools.get((variant, qps)):
                style = _style(comparison, variant)
                add_ccdf(panel, pool.values(lambda d: d.ttft_after_retrieval_s), MIN_S, **style)
        _share_axis(panel, len(floors.values(lambda d: d.floor_s)))
        plain_log_ticks(panel.xaxis)
        panel.set_xlabel("ttft_after_retrieval_s (seconds)")
    _legend(figure, comparison)
    return as_svg(figure)


def draw_distributions(values_of: Sequence[tuple[str, bool, Sequence[float]]], label: str) -> str:
    """Return an SVG of the CCDF of each run's values, given its name and whether it is simulated: dashed, if so."""
    figure, (panel,) = make_panels(1, 3.5)
    for number, (name, is_simulated, values) in enumerate(values_of):
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[1 if is_simulated else 0]}
        add_ccdf(panel, values, MIN_S, label=for_picture(name), linewidth=1.6, **style)
    _share_axis(panel, max([1, *(len(values) for _, _, values in values_of)]))
    plain_log_ticks(panel.xaxis)
    panel.set_xlabel(f"{label} (seconds)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return as_svg(figure)


def draw_ttft_by_qps(comparison: LoadComparison) -> str | None:
    """Return an SVG of mean and P95 of both times to the first token by rate; None for fewer than two rates."""
    rates = [qps for qps in comparison.qps if qps is not None]
    if len(rates) < 2:
        return None
    figure, panels = make_panels(4, 3.0, num_columns=2)
    drawn = [(time, of, name) for time, of in TIMES for name in ("mean", "P95")]
    for panel, (time, of, name) in zip(panels, drawn, strict=True):
        panel.set_title(f"{time}, {name}", loc="left", fontsize=10)
        for variant in comparison.variants:
            _line(panel, comparison, variant, of, name.lower())
        if time == "ttft_after_retrieval_s":
            floors = [comparison.floors(qps).figure(lambda d: d.floor_s, name.lower()).value for qps in rates]
            panel.plot(rates, floors, **FLOOR)
        seconds_upwards(panel)
        panel.set_xlabel("queries per second (QPS)")
        panel.set_xticks(rates, [f"{qps:g}" for qps in rates])
        panel.minorticks_off()
        panel.grid(color=GRID, linewidth=0.7)
    _legend(figure, comparison)
    return as_svg(figure)


def _style(comparison: LoadComparison, variant: str) -> dict[str, Any]:
    """Return a variant's line style: fixed, or of a streaming arm a colour by policy and dashes by eviction.

    Colours and dashes follow the order in which the comparison's variants first have a policy or an eviction.
    """
    settings = {v: pool.settings for (v, _), pool in comparison.pools.items()}
    own = settings[variant]
    if own.arm != "streaming":
        return {"color": ARM_COLOURS[own.arm], "linestyle": "-", "linewidth": 1.6}
    streaming = [settings[v] for v in comparison.variants if settings[v].arm == "streaming"]
    policies, evictions = (list(dict.fromkeys(getattr(s, name) for s in streaming)) for name in ("policy", "eviction"))
    colour = COLOURS[policies.index(own.policy) % len(COLOURS)]
    dashes = DASHES[evictions.index(own.eviction) % len(DASHES)]
    return {"color": colour, "linestyle": dashes, "linewidth": 1.6}


def _share_axis(panel: Any, num_requests: int) -> None:
    """Make both axes logarithmic, label shares, and mark the percentiles that this number of requests can show."""
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


def _line(panel: Any, comparison: LoadComparison, variant: str, of: Values, name: str) -> None:
    """Plot a statistic of a variant by rate, with vertical lines for its range over seeds; NaN is left out."""
    pools = [(qps, comparison.pools.get((variant, qps))) for qps in comparison.qps if qps is not None]
    figures = [(qps, pool.figure(of, name)) for qps, pool in pools if pool]
    points = [(qps, figure) for qps, figure in figures if math.isfinite(figure.value)]
    rates = [qps for qps, _ in points]
    style = _style(comparison, variant)
    panel.plot(rates, [figure.value for _, figure in points], marker="o", markersize=3.5, **style)
    panel.vlines(rates, [f.low for _, f in points], [f.high for _, f in points], color=style["color"], linewidth=1)


def _legend(figure: Any, comparison: LoadComparison) -> None:
    """Add a legend below the panels, with the style of each variant and of the floor."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=for_picture(v), **_style(comparison, v)) for v in comparison.variants]
    handles.append(Line2D([], [], label="floor: alone", **FLOOR))
    num_columns = 4 if figure.get_size_inches()[0] > 8 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=8.5)
