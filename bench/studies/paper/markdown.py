"""Tables and texts of the report."""

import math
from collections.abc import Iterable, Sequence

from streamrag_bench.report.html import figure_text
from studies import markdown_tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A Markdown table; a note if there are no rows."""
    lines = list(rows)
    return markdown_tables.table(head, lines, num_left=num_left) if lines else "*Not simulated yet.*\n"


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
