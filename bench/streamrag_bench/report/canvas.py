"""Helpers for plots: texts, panels, axes in seconds, SVG output. They import matplotlib late: it takes long."""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

from streamrag.display_text import one_line

MAX_POINTS = 300
MAX_IN_PICTURE = 120  # characters of one text, whose length decides the picture's size


def for_picture(text: str) -> str:
    """Return a line for matplotlib, with dollar signs escaped: they would delimit a formula."""
    line = one_line(text)
    line = line if len(line) <= MAX_IN_PICTURE else f"{line[:MAX_IN_PICTURE]}…"
    return line.replace("$", r"\$")


def make_panels(num: int, height: float, num_columns: int = 3) -> tuple[Any, list[Any]]:
    """Return a figure and its `num` styled panels of `height` inches, in at most `num_columns` columns."""
    from matplotlib.figure import Figure as Canvas

    num_columns = min(num, num_columns)
    num_rows = math.ceil(num / num_columns)
    width = {1: 7.0, 2: 9.5}.get(num_columns, 11.0)
    figure = Canvas(figsize=(width, height * num_rows + 0.7), layout="constrained")
    panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for panel in panels[num:]:
        panel.remove()
    for panel in panels[:num]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.xaxis.label.set_size(9)
        panel.yaxis.label.set_size(9)
        panel.set_axisbelow(True)
    return figure, panels[:num]


def plain_log_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, fewer per decade the more it spans, even for less than a decade."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 else 9.0
    subs = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs) if decades > 0.6 else MaxNLocator(4))
    axis.set_major_formatter(formatter(lambda x: f"{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def seconds_upwards(panel: Any) -> None:
    """Label the y axis, and make it logarithmic if its values span more than a factor of 4, else linear from zero."""
    low, high = panel.dataLim.intervaly
    panel.set_ylabel("seconds")
    if not math.isfinite(high):
        return
    if low > 0 and high / low > 4:
        panel.set_yscale("log")
        plain_log_ticks(panel.yaxis)
    else:
        panel.set_ylim(0, 1.08 * high)


def formatter(write: Callable[[float], str]) -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: write(value))


def add_ccdf(panel: Any, values: Sequence[float], least: float, **style: Any) -> None:
    """Draw the share of values above each value, thinned out to about `MAX_POINTS`; nothing without values.

    least: what smaller values are drawn as, because a logarithmic axis has no zero.
    """
    ordered = sorted(max(value, least) for value in values)
    num = len(ordered)
    if not num:
        return
    # Ranks are spaced evenly on the logarithmic axis: all requests of the tail, few of the body.
    steps = {round(num ** (i / MAX_POINTS)) for i in range(MAX_POINTS + 1)}
    ranks = sorted((min(step, num) for step in steps), reverse=True)
    panel.plot([ordered[num - rank] for rank in ranks], [rank / num for rank in ranks], **style)


def as_svg(figure: Any) -> str:
    """Return the figure as SVG; equal figures give equal bytes."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "streamrag"}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()
