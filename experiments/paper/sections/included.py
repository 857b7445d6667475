"""Figures that other experiments have measured, if their results are there."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrag.bench.report_html import figure_text

from ..markdown import table
from .section import Report, Section, nothing


class Included(NamedTuple):
    """Results of one experiment: `NAME.json`, with rows of figures in "results", and pictures `NAME*.png`."""

    name: str
    title: str
    how: str


INCLUDED = (
    Included("k_lpm", "k-LPM: P99 TTFT by rate of arrivals (arXiv 2502.04677)", "experiments/k_lpm.py"),
    Included("step_cost", "What planning a step costs with 50 and 500 requests", "experiments/step_cost.py"),
)


def write(report: Report) -> str:
    folder = report.pictures.report.parent
    return "\n".join(part for each in INCLUDED for part in _parts(each, folder))


def _parts(of: Included, folder: Path) -> Iterator[str]:
    yield f"### {of.title}\n"
    path = folder / f"{of.name}.json"
    if not path.is_file():
        yield f"*Not measured yet: `{of.how}` writes it.*\n"
        return
    values = json.loads(path.read_text())
    yield f"From [{path.name}]({path.name}), which `{values.get('command', of.how)}` writes.\n"
    yield rows_table(values.get("results"))
    for picture in sorted([*folder.glob(f"{of.name}*.png"), *(folder / of.name).glob("*.png")]):
        yield f"![{of.title}]({os.path.relpath(picture, folder)})\n"


def rows_table(rows: Any) -> str:
    """A list of objects with the same keys as a table; nothing of anything else."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return ""
    names = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
    return table(names, ([_text(row.get(name)) for name in names] for row in rows))


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else figure_text(value)


SECTION = Section("included", "From other experiments", nothing, write)
