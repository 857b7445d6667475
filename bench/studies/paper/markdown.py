"""Tables and texts of the report."""

import math
from collections.abc import Iterable, Sequence

from streamrag_bench.report.html import figure_text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A Markdown table; the first columns to the left, the others to the right. Nothing if there are no rows."""
    lines = [list(row) for row in rows]
    if not lines:
        return "*Not simulated yet.*\n"
    rule = ["---" if index < num_left else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(head), rule, *lines]) + "\n"


def triple(values: Iterable[float | None]) -> str:
    """P50/P95/P99, say."""
    return "/".join(figure_text(value) for value in values)


def times(value: float | None) -> str:
    """A ratio."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def span(low: float, high: float, unit: str = "x") -> str:
    """A range, or one figure."""
    return f"{low:g}{unit}" if low == high else f"{low:g}–{high:g}{unit}"


def percent(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.1%}"


def yes_no(value: bool) -> str:
    return "yes" if value else "**no**"


def command(only: str) -> str:
    """How to run one section alone."""
    return f"`python -m studies.paper.run --only {only}`\n"
