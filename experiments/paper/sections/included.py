"""Figures that other experiments have measured, if their results are there."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrag.bench.report_html import figure_text

from ..markdown import table, yes_no
from .section import Report, Section, nothing

MOST_ROWS = 40


class Included(NamedTuple):
    """Results of one experiment: `NAME.json`, with rows of figures in "results", and pictures `NAME*.png`."""

    name: str
    title: str
    how: str


INCLUDED = (
    Included("k_lpm", "k-LPM: P99 TTFT by rate of arrivals (arXiv 2502.04677)", "experiments/k_lpm.py"),
    Included("busy_price", "What it costs to keep the engine less busy", "make bench-busy"),
    Included("step_cost", "What planning a step costs with 50 and 500 requests", "experiments/step_cost.py"),
)


def write(report: Report) -> str:
    folder = report.pictures.report.parent
    return "\n".join(part for each in INCLUDED for part in _parts(each, folder))


def _parts(of: Included, folder: Path) -> Iterator[str]:
    yield f"### {of.title}\n"
    values = results_of(of.name, folder)
    if not values:
        yield f"*Not measured yet: `{of.how}` writes it.*\n"
        return
    yield f"From [{of.name}.json]({of.name}.json), which `{values.get('command', of.how)}` writes.\n"
    for picture in sorted([*folder.glob(f"{of.name}*.png"), *(folder / of.name).glob("*.png")]):
        yield f"![{of.title}]({os.path.relpath(picture, folder)})\n"
    yield "".join(f"{' ' * (len(line) - len(line.lstrip()))}- {line.lstrip()}\n" for line in values.get("verdicts", ()))
    yield rows_table(values.get("results"))


def results_of(name: str, folder: Path) -> Mapping[str, Any]:
    """Nothing if the experiment was not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def planning(folder: Path) -> str:
    """Whether planning a step is quick enough, in a sentence."""
    rows = results_of("step_cost", folder).get("results", ())
    if not rows:
        return "Planning a step, at most 100 and 500 us more with 50 and 500 requests than stock: not measured.\n"
    missed = [f"{row['num_requests']} requests, {row['load']}, {row['policy']}" for row in rows if not row["is_met"]]
    worst = max(rows, key=lambda row: row["more_us"] / row["most_more_us"])
    return (
        "Planning a step, at most 100 and 500 us more with 50 and 500 requests than stock: met in "
        f"{len(rows) - len(missed)} of {len(rows)} rows of [step_cost.json](step_cost.json), at worst "
        f"{worst['more_us']:,.0f} us with {worst['num_requests']}"
        + (f". Missed: {'; '.join(missed)}" if missed else "")
        + ".\n"
    )


def rows_table(rows: Any) -> str:
    """A list of few objects with the same keys as a table; nothing of anything else."""
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, Mapping) for row in rows)
        or not 0 < len(rows) <= MOST_ROWS
    ):
        return ""
    names = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
    return table(names, ([_text(row.get(name)) for name in names] for row in rows))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return yes_no(value)
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else figure_text(value)


SECTION = Section("included", "From other experiments", nothing, write)
