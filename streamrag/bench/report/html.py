"""The HTML of a report: its page and its tables."""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrag.bench.report.comparison import Figure
from streamrag.errors import MissingDependencyError
from streamrag.support.display_text import one_line


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: a text, and a smaller one below it."""

    text: str
    small: str = ""
    is_number: bool = False
    is_group: bool = False
    """Whether its row heads those below it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below the names of their columns, and above these `groups` of so many columns each."""

    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()


def figure_text(value: float | None) -> str:
    """Write three significant digits, in plain notation; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.0005:
        return "0" if value == 0 else f"{value:.1e}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{min(digits, 3)}f}"


def cell(value: Figure | float | None, unit: str = "") -> Cell:
    """Make a cell of a number; a figure brings its spread over seeds, where there is one."""
    if not isinstance(value, Figure):
        text = figure_text(value)
        return Cell(text if text == "–" else text + unit, is_number=True)
    low, high = figure_text(value.low), figure_text(value.high)
    small = f"({low}–{high})" if low != high else ""
    return Cell(figure_text(value.value) + unit, small, is_number=True)


def render(**values: Any) -> str:
    """Return the page as HTML. Every text in it is one line without control characters, whatever its source.

    :raises MissingDependencyError: Jinja is not installed.
    """
    require_jinja()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("streamrag.bench.report"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["base64"] = lambda svg: b64encode(svg.encode()).decode()
    return templates.get_template("report.html").render(values)


def _finalize(value: object) -> object:
    """Clean a value before it is escaped; what macros return is part of the page already."""
    return value if hasattr(value, "__html__") else one_line(str(value))


def require_jinja() -> None:
    """Raise MissingDependencyError without Jinja."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise MissingDependencyError("jinja2", "pip install 'streamrag[bench]'") from None
