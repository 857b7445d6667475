"""Figures that other studies have measured, if their results are there."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamrag_bench.report.html import figure_text

from ..markdown import table, yes_no
from ..published import SORT_P99_US, SORT_US
from .section import Report, Section, nothing

MOST_ROWS = 40


class Included(NamedTuple):
    """A study beside this one: its results, with rows of figures in "results", and its pictures."""

    name: str
    title: str
    how: str
    beside: Callable[[Mapping[str, Any]], str] = lambda values: ""
    """Given the results, what is published beside them."""


def k_lpm_published(values: Mapping[str, Any]) -> str:
    """What figure 2 of its paper found, and with how many prompts."""
    num_prompts = values.get("shape", {}).get("num_prompts")
    return (
        "Published (figure 2, a picture without figures in the text): over a wide range of rates k = 2 has a lower P99 "
        "than FCFS, which is k = 1, and than LPM, which is k = ∞. That was on 2,000 prompts of a benchmark, SGLang and "
        "eight A100"
        + (f"; here it is {num_prompts:,} made ones" if num_prompts else "")
        + ", so that a P99 is fewer requests and queues have less time to grow.\n"
    )


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


INCLUDED = (
    Included("k_lpm", "k-LPM: P99 TTFT by rate of arrivals (arXiv 2502.04677)", "make -C bench k-lpm", k_lpm_published),
    Included(
        "step_cost", "What planning a step costs with 50 and 500 requests", "make -C bench step-cost", sorting_published
    ),
)
WHY_PLANNING_MISSED = {
    "k_lpm": "it asks the prefix cache for every waiting prompt in every step, and sorts by age and by prefix anew",
    "above high water": "what each session's data need is worked out, to tell those that must wait from those that fit",
}
"""By the policy's name without its parameters, or by the way."""


def write(report: Report) -> str:
    folder = report.pictures.report.parent.parent
    return "\n".join(part for each in INCLUDED for part in _parts(each, folder))


def _parts(of: Included, folder: Path) -> Iterator[str]:
    yield f"### {of.title}\n"
    values = results_of(of.name, folder)
    if not values:
        yield f"*Not measured yet: `{of.how}` writes it.*\n"
        return
    written = f"From [its results](../{of.name}/results.json), which `{values.get('command', of.how)}` writes. "
    yield (written + of.beside(values)).rstrip() + "\n"
    for picture in sorted((folder / of.name).glob("*.png")):
        yield f"![{of.title}](../{of.name}/{picture.name})\n"
    yield "".join(f"{' ' * (len(line) - len(line.lstrip()))}- {line.lstrip()}\n" for line in values.get("verdicts", ()))
    yield rows_table(values.get("results"))


def results_of(name: str, folder: Path) -> Mapping[str, Any]:
    """Nothing if the study was not run."""
    path = folder / name / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def planning(folder: Path) -> str:
    """Whether planning a step is quick enough, in a sentence."""
    measured = results_of("step_cost", folder)
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


SECTION = Section("included", "From other studies", nothing, write)
