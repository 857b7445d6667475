"""The HTML that a report is made of: its page, its tables."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamrag.bench.compare import Figure
from streamrag.showing import for_html

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1d1d1f;
  background: #fff; max-width: 1060px; margin: 2rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.7rem; margin: 0 0 .6rem; }}
h2 {{ font-size: 1.3rem; margin: 2.6rem 0 .4rem; padding-top: .5rem; border-top: 2px solid #1d1d1f; }}
h3 {{ font-size: 1.05rem; margin: 1.8rem 0 .3rem; }}
p, figcaption, li {{ max-width: 52rem; }}
figure {{ margin: .4rem 0 1rem; }}
figure img {{ max-width: 100%; height: auto; }}
figcaption {{ color: #555; font-size: .87rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .83rem; font-variant-numeric: tabular-nums; margin: .5rem 0 1rem; }}
th {{ font-weight: 600; text-align: right; }}
thead tr:last-child th {{ border-bottom: 1px solid #1d1d1f; }}
thead th.span {{ text-align: center; border-bottom: 1px solid #bbb; }}
th, td {{ padding: .2rem .55rem; white-space: nowrap; }}
td {{ text-align: right; border-bottom: 1px solid #eee; }}
td.text, th.text {{ text-align: left; }}
tr.group td {{ border-top: 1px solid #999; background: #f6f6f6; color: #444; }}
tr.group td:first-child {{ font-weight: 600; color: #1d1d1f; }}
td small {{ color: #777; display: block; font-size: .72rem; line-height: 1.1; }}
table.facts td {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
table.facts th {{ vertical-align: top; }}
.failed {{ border-left: 4px solid #c0392b; background: #fdf3f2; padding: .5rem 1rem; }}
code {{ font-size: .92em; }}
@media print {{
  body {{ max-width: none; margin: 0; font-size: 11px; }}
  h2 {{ break-before: page; }} h2:first-of-type {{ break-before: auto; }}
  h3 {{ break-after: avoid; }} figure, tr {{ break-inside: avoid; }}
  .wide {{ overflow: visible; }} table {{ font-size: 7.5pt; }} th, td {{ padding: .1rem .3rem; }}
}}
</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: a text, and a smaller one below it."""

    text: str
    small: str = ""
    is_number: bool = False
    is_group: bool = False
    """Whether its row heads those below it."""


def figure_text(value: float | None) -> str:
    """Three significant digits, in plain notation; a dash for what is not there."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.0005:
        return "0" if value == 0 else f"{value:.1e}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{min(digits, 3)}f}"


def cell(value: Figure | float | None, unit: str = "") -> Cell:
    """A number; a figure brings its spread over seeds, where there is one."""
    if not isinstance(value, Figure):
        text = figure_text(value)
        return Cell(text if text == "–" else text + unit, is_number=True)
    low, high = figure_text(value.low), figure_text(value.high)
    small = f"({low}–{high})" if low != high else ""
    return Cell(figure_text(value.value) + unit, small, is_number=True)


def head(groups: Sequence[tuple[str, int]], names: Sequence[str]) -> str:
    """A table's head: `names`, and above them `groups` of so many columns each."""
    texts = sum(name in ("load", "arm", "") for name in names)
    spans = "".join(
        f'<th colspan="{width}"{" class=span" if name else ""}>{for_html(name)}</th>' for name, width in groups if width
    )
    columns = "".join(f"<th{' class=text' if i < texts else ''}>{for_html(name)}</th>" for i, name in enumerate(names))
    return f"{f'<tr>{spans}</tr>' if spans else ''}<tr>{columns}</tr>"


def table(head: str, rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls by itself where the page is narrow."""
    body = "".join(
        f"<tr{' class=group' if any(c.is_group for c in row) else ''}>{''.join(map(_td, row))}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _td(cell: Cell) -> str:
    small = f"<small>{for_html(cell.small)}</small>" if cell.small else ""
    return f"<td{'' if cell.is_number else ' class=text'}>{for_html(cell.text)}{small}</td>"
