"""The HTML of a report: tables, number formats, and the page template."""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from streamrag.display_text import one_line
from streamrag_bench.report.comparison import Figure


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: a text, and a smaller text below it."""

    text: str
    small: str = ""
    is_number: bool = False
    is_group: bool = False
    """Whether this cell's row is a heading for the rows below."""


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table with column names, and above these optional `groups`: titles with their number of columns."""

    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()


def figure_text(value: float | None) -> str:
    """Format a number with about three digits, such as 1,234, 12.3 or 1.2e-04; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.0005:
        return "0" if value == 0 else f"{value:.1e}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{min(digits, 3)}f}"


def cell(value: Figure | float | None, unit: str = "") -> Cell:
    """Return a cell with a number and its unit, or a dash; for a `Figure`, also its range over seeds, if any."""
    low, high = (figure_text(value.low), figure_text(value.high)) if isinstance(value, Figure) else ("", "")
    text = figure_text(value.value if isinstance(value, Figure) else value)
    small = f"({low}–{high})" if low != high else ""
    return Cell(text if text == "–" else text + unit, small, is_number=True)


def render(template: str = "report.html", **values: Any) -> str:
    """Return the page as HTML, each text on one line and sanitized."""
    templates = Environment(
        loader=PackageLoader("streamrag_bench.report"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["base64"] = lambda svg: b64encode(svg.encode()).decode()
    return templates.get_template(template).render(values)


def _finalize(value: object) -> object:
    """Sanitize a value before it is escaped; the output of macros is HTML already."""
    return value if hasattr(value, "__html__") else one_line(str(value))
