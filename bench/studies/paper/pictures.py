"""The pictures of the report, as PNG files. Needs matplotlib."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from streamrag.support.files import write_atomic
from streamrag_bench.report.canvas import add_ccdf, formatter, make_panels, plain_log_ticks

GREY, GRID = "#8a8a8a", "#e3e3e3"
# After Okabe and Ito, for any colour vision.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "not streaming": {"color": "#000000"},
    "vLLM-S": {"color": "#e69f00"},
    "FCFS": {"color": "#0072b2"},
    "FCFS, no step ahead": {"color": "#0072b2", "linestyle": (0, (1, 1.5))},
    "LCAS": {"color": "#009e73"},
    "LCAS as coded": {"color": "#009e73", "linestyle": (0, (5, 2))},
    "MCPS": {"color": "#cc79a7"},
    "ours": {"color": "#d62728", "linewidth": 2.2},
    "floor": {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1.1},
    "published: not streaming": {"color": "#000000", "linestyle": "", "marker": "x", "markersize": 6},
    "published: FCFS": {"color": "#0072b2", "linestyle": "", "marker": "x", "markersize": 6},
}
MIN_S = 1e-3
"""Shorter times are drawn here: a logarithmic axis has no zero."""
OTHERS = ("#56b4e9", "#8c564b", "#17324d", "#9acd32")


@dataclass(frozen=True)
class Pictures:
    """A folder of pictures, beside the report."""

    folder: Path
    report: Path

    def add(self, name: str, figure: Any, text: str) -> str:
        """Write it; returns what the report says to show it."""
        drawn = BytesIO()
        figure.savefig(drawn, format="png", dpi=110, metadata={"Software": None})
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.png"
        write_atomic(path, drawn.getvalue())
        return f"![{text}]({path.relative_to(self.report.parent)})\n"


class Curves(NamedTuple):
    """One panel of lines or distributions."""

    title: str
    values: Mapping[str, Sequence[float]]
    """By the name of the way."""


class Line(NamedTuple):
    """Points of a line."""

    x: Sequence[float]
    y: Sequence[float]


class Lines(NamedTuple):
    """One panel of lines."""

    title: str
    lines: Mapping[str, Line]


class Pairs(NamedTuple):
    """One panel of values that belong together by twos."""

    title: str
    pairs: Sequence[tuple[float, float]]


def style(name: str) -> dict[str, Any]:
    found = STYLES.get(name) or {"color": OTHERS[sum(map(ord, name)) % len(OTHERS)]}
    return {"linestyle": "-", "linewidth": 1.4, **found}


def draw_ccdfs(panels: Sequence[Curves], label: str, *, num_columns: int = 4, least: float = MIN_S) -> Any:
    """Shares of requests with more than x, both axes logarithmic."""
    figure, axes = make_panels(len(panels), 2.7, num_columns=num_columns)
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=9)
        num = max((len(of) for of in values.values()), default=1)
        for name, of in values.items():
            add_ccdf(axis, of, least, **style(name))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(max(0.7 / max(num, 1), 1e-4), 1.2)
        axis.set_xlim(left=least)
        axis.yaxis.set_major_formatter(formatter(lambda y: f"{100 * y:g} %"))
        axis.xaxis.set_major_formatter(formatter(lambda x: f"{x:,g}"))
        axis.minorticks_off()
        axis.grid(color=GRID, linewidth=0.7)
        for share in (0.5, 0.05, 0.01):
            axis.axhline(share, color="#c9c9c9", linewidth=0.8, zorder=0)
    for axis in axes[-num_columns:]:
        axis.set_xlabel(label)
    for axis in axes[::num_columns]:
        axis.set_ylabel("share of requests with more")
    _legend(figure, [name for panel in panels for name in panel.values])
    return figure


def draw_lines(
    panels: Sequence[Lines],
    x_label: str,
    y_label: str,
    *,
    num_columns: int = 3,
    y_log: bool = True,
) -> Any:
    """Lines over a rate, say."""
    figure, axes = make_panels(len(panels), 2.9, num_columns=num_columns)
    for place, (axis, (title, lines)) in enumerate(zip(axes, panels, strict=True)):
        axis.set_title(title, loc="left", fontsize=9)
        for name, (x, y) in lines.items():
            if any(map(math.isfinite, y)):
                axis.plot(x, y, **{"marker": "o", "markersize": 3, **style(name)})
        axis.set_xticks(sorted({value for line in lines.values() for value in line.x}))
        axis.xaxis.set_major_formatter(formatter(lambda value: f"{value:g}"))
        if y_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(color=GRID, linewidth=0.7)
        axis.set_xlabel(x_label)
        if place % num_columns == 0:
            axis.set_ylabel(y_label)
        if y_log:
            plain_log_ticks(axis.yaxis)
    _legend(figure, [name for panel in panels for name in panel.lines])
    return figure


def draw_ratios(titles: Sequence[str], groups: Sequence[str], bars: Sequence[Sequence[Mapping[str, float]]]) -> Any:
    """One panel a title, one group of bars a point; more than 1 is better for us."""
    figure, axes = make_panels(len(titles), 0.42 * len(groups) + 0.9, num_columns=len(titles))
    colours = ("#9ecae1", "#4292c6", "#08519c")
    for place, (axis, title, of_panel) in enumerate(zip(axes, titles, bars, strict=True)):
        axis.set_title(title, loc="left", fontsize=9)
        for row, by_rank in enumerate(of_panel):
            for number, ((rank, value), colour) in enumerate(zip(by_rank.items(), colours, strict=False)):
                if math.isfinite(value):
                    y = row + (number - 1) * 0.27
                    axis.barh(y, value, height=0.25, color=colour, label=rank if row == 0 else None)
                    axis.annotate(f" {value:.2f}", (value, y), va="center", fontsize=6.5)
        axis.axvline(1, color="#d62728", linewidth=1)
        axis.set_ylim(len(groups) - 0.4, -0.6)
        axis.set_yticks(range(len(groups)), groups if place == 0 else [""] * len(groups))
        axis.set_xlabel("times as fast")
        axis.margins(x=0.15)
        axis.set_xlim(left=0)
        axis.grid(axis="x", color=GRID, linewidth=0.7)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_pairs(panels: Sequence[Pairs], x_label: str, y_label: str) -> Any:
    """A dot a pair on logarithmic axes; below the line, the second is less."""
    figure, axes = make_panels(len(panels), 3.1, num_columns=2)
    for place, (axis, (title, pairs)) in enumerate(zip(axes, panels, strict=True)):
        axis.set_title(title, loc="left", fontsize=9)
        x, y = ([max(value, MIN_S) for value in values] for values in zip(*pairs, strict=True))
        axis.plot(x, y, linestyle="", marker=".", markersize=2.5, alpha=0.5, color="#0072b2")
        ends = min(*x, *y) / 1.3, max(*x, *y) * 1.3
        axis.plot(ends, ends, color="#d62728", linewidth=1)
        for scaled, limited in ((axis.set_xscale, axis.set_xlim), (axis.set_yscale, axis.set_ylim)):
            scaled("log")
            limited(*ends)
        plain_log_ticks(axis.xaxis)
        plain_log_ticks(axis.yaxis)
        axis.set_xlabel(x_label)
        if place % 2 == 0:
            axis.set_ylabel(y_label)
        axis.grid(color=GRID, linewidth=0.7)
    return figure


def _legend(figure: Any, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **style(name)) for name in dict.fromkeys(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, fontsize=8.5)
