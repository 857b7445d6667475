"""What planning a step costs: figures that another study has measured, if its results are there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrag_bench.report.html import figure_text

from ..markdown import table, yes_no
from ..published import SORT_P99_US, SORT_US
from .section import Report, Section, nothing


def sorting(rows: Sequence[Mapping[str, Any]], num_requests: int, name: str) -> tuple[float, float] | None:
    """The least and the most microseconds of a sort, over loads and policies; None if there are no such rows."""
    found = [row[name] for row in rows if row.get("num_requests") == num_requests and name in row]
    return (min(found), max(found)) if found else None


def sorting_published(values: Mapping[str, Any]) -> str:
    """What the paper says that sorting takes, beside ours."""
    few_us = " and ".join(f"{least}–{most}" for least, most in SORT_US.values())
    text = (
        f"Published (6.5): sorting 50 requests takes {few_us} us ({'; '.join(SORT_US)}), and 500 less than "
        f"{SORT_P99_US} us at P99."
    )
    rows = values.get("results", ())
    few, many, usual = (
        sorting(rows, num, name) for num, name in ((50, "order_p50_us"), (500, "order_p99_us"), (500, "order_p50_us"))
    )
    if few:
        text += f" Ours: 50 take {few[0]:.0f}–{few[1]:.0f} us in the median"
    if few and many and usual:
        text += f", 500 take {usual[0]:.0f}–{usual[1]:.0f} us in the median and {many[0]:.0f}–{many[1]:.0f} us at P99"
        if many[1] > SORT_P99_US:
            text += (
                ", which is worse than published: a sort keeps the places of requests that have not changed, and the "
                "first of each round, when all 500 are new, is more than one in a hundred"
            )
    return f"{text}.\n" if few else f"{text}\n"


WHY_PLANNING_MISSED = {
    "k_lpm": "it asks the prefix cache for every waiting prompt in every step, and sorts by age and by prefix anew",
    "above high water": "what each session's data need is worked out, to tell those that must wait from those that fit",
}
"""By the policy's name without its parameters, or by the way."""


def write(report: Report) -> str:
    values = results_of(report.pictures.report.parent.parent)
    if not values:
        return "*Not measured yet: `make -C bench step-cost` writes it.*\n"
    written = "From [its study](../step_cost/results.json), which `make -C bench step-cost` writes. "
    return f"{written}{sorting_published(values)}\n{rows_table(values['results'])}"


def results_of(folder: Path) -> Mapping[str, Any]:
    """Return the results of the study of steps; nothing if it was not run."""
    path = folder / "step_cost" / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def planning(folder: Path) -> str:
    """Whether planning a step is quick enough, in a sentence."""
    measured = results_of(folder)
    rows = measured.get("results", ())
    if not rows:
        return "Planning a step, at most 100 and 500 us more with 50 and 500 requests than stock: not measured.\n"
    missed = [_missed(row) for row in rows if not row["is_met"]]
    worst = max(rows, key=lambda row: row["more_us"] / row["most_more_us"])
    return (
        "Planning a step, at most 100 and 500 us more with 50 and 500 requests than stock: met in "
        f"{len(rows) - len(missed)} of {len(rows)} rows of [its study](../step_cost/results.json), at worst "
        f"{worst['more_us']:,.0f} us with {worst['num_requests']}"
        + (f". Missed: {'; '.join(missed)}" if missed else "")
        + f". Measured on {measured['date']}.\n"
    )


def _missed(row: Mapping[str, Any]) -> str:
    why = WHY_PLANNING_MISSED.get(row["policy"].partition("(")[0]) or WHY_PLANNING_MISSED.get(row.get("way", ""))
    names = filter(None, (f"{row['num_requests']} requests", row["load"], row["policy"], row.get("way")))
    return ", ".join(names) + (f" ({row['more_us']:,.0f} us: {why})" if why else f" ({row['more_us']:,.0f} us)")


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name, value in rows[0].items() if isinstance(value, str | int | float | None)]
    return table(names, ([_text(row.get(name)) for name in names] for row in rows))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return yes_no(value)
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else figure_text(value)


SECTION = Section("planning-cost", "What planning a step costs with 50 and 500 requests", nothing, write)
