"""Tables and pictures of the results, for a terminal and for bench/studies/routing/README.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from streamrag.support.files import write_atomic
from streamrag_bench.report.canvas import make_panels, plain_log_ticks
from studies.page_tables import table

from .cells import ROUTERS, SEVERAL, SHARED
from .loads import LOADS

Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = Sequence[Row]
Written: TypeAlias = Callable[[Row], str]
COLOURS = (
    "#8a8a8a",
    "#222222",
    "#56b4e9",
    "#0072b2",
    "#cc79a7",
    "#d55e00",
    "#009e73",
)
USUAL = {"rate": 0.0, "engine": "lean", "fault": "", "num_callers": 1, "seed": 1}
"""What a run is if nothing else is said of it."""
Column: TypeAlias = tuple[str, Mapping[str, Any]]
"""Its heading, and which runs it shows."""


@dataclass(frozen=True)
class Grid:
    """A table: a line for each router, a column for each load or fleet."""

    name: str
    """In bench/studies/routing/README.md it stands behind a comment with this name; empty: only in a terminal."""
    title: str
    corner: str
    header: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]


def chosen(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def number(value: float) -> str:
    """Three digits that count."""
    text = f"{value:.3g}" if value < 1_000 else f"{value:,.0f}"
    return text.removeprefix("0") if text != "0" else text


def full(row: Row) -> str:
    shown = " / ".join(number(row[name]) for name in ("mean_s", "p50_s", "p95_s", "p99_s"))
    return f"{shown}, {row['hit_rate']:.0%}"


def mean_and_tail(row: Row) -> str:
    return f"{number(row['mean_s'])} / {number(row['p99_s'])}, {row['hit_rate']:.0%}"


def balance(row: Row) -> str:
    return f"{number(row['tokens_per_s'])}, {row['imbalance']:.2f}, {row['hot_share']:.0%}"


def faulty(row: Row) -> str:
    told = f"{number(row['mean_s'])} / {number(row['p99_s'])}"
    if row["fault"] == "killed":
        told += f", {row['num_failed']} failed, {row['num_replays']} replayed"
    return told


FULL = "TTFT mean / P50 / P95 / P99 in seconds, prompt tokens not computed"
MEAN = "TTFT mean / P99 in seconds, prompt tokens not computed"
BALANCE = "tokens of answers a second, busiest replica against the mean, share of the time with a hot spot"


def grid(
    rows: Rows,
    title: str,
    names: Sequence[str],
    columns: Sequence[Column],
    written: Written,
    *,
    name: str = "",
    corner: str = "",
    best: str = "",
) -> Grid:
    """A run in each cell; the least of `best`, if that is told, is bold, and all that look the same."""
    found = {
        (router, head): next(iter(chosen(rows, **{**USUAL, **wanted}, router=router)), None)
        for head, wanted in columns
        for router in names
    }
    least = {
        head: min((row[best] for router in names if (row := found[router, head])), default=0.0) if best else None
        for head, _ in columns
    }
    lines = []
    for router in names:
        cells = []
        for head, _ in columns:
            row, lowest = found[router, head], least[head]
            text = "" if row is None else written(row)
            is_best = row is not None and lowest is not None and number(row[best]) == number(lowest)
            cells.append(f"**{text}**" if is_best else text)
        if any(cells):
            lines.append((router, cells))
    return Grid(name, title, corner, [head for head, _ in columns], lines)


def grids(rows: Rows) -> Iterator[Grid]:
    """All tables."""
    routers = tuple(ROUTERS)
    for num in (2, 8, 64):
        there = [(load, {"load": load, "num_replicas": num}) for load in LOADS]
        of_size = _largest(rows) if num == 2 else rows
        yield grid(of_size, f"{num} replicas: {FULL}", routers, there, full)
        name, corner = f"routers-{num}", f"{num} replicas"
        yield grid(of_size, f"{corner}: {MEAN}", routers, there, mean_and_tail, name=name, corner=corner, best="mean_s")
        yield grid(of_size, f"{num} replicas: {BALANCE}", routers, there, balance)
    hot = [(f"{num} replicas", {"load": "hot document", "num_replicas": num}) for num in (2, 8, 64)]
    yield grid(_largest(rows), f"hot document: {BALANCE}", routers, hot, balance, name="balance")
    broken = {"num_replicas": 8}
    faults = [
        ("one slow", {**broken, "load": "conversations", "fault": "slow"}),
        ("one killed", {**broken, "load": "conversations", "fault": "killed"}),
        ("one killed, trees", {**broken, "load": "trees", "fault": "killed"}),
    ]
    yield grid(rows, "8 replicas: TTFT mean / P99, queries failed and replayed", routers, faults, faulty,
               name="faults", best="mean_s")  # fmt: skip
    yield from _checks(rows)
    yield from _callers(rows)


def _largest(rows: Rows) -> Rows:
    """Without the shorter runs that the whole engine is compared on."""
    most: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        cell = tuple(row[name] for name in (*USUAL, "load", "num_replicas", "router", "is_sticky"))
        most[cell] = max(most.get(cell, row), row, key=lambda each: int(each["num_queries"]))
    return list(most.values())


def _checks(rows: Rows) -> Iterator[Grid]:
    """The lean engine beside the whole one."""
    lines = []
    for load in SHARED:
        for router in ROUTERS:
            whole = chosen(rows, load=load, router=router, engine="whole")
            lean = [
                row
                for each in whole
                for row in chosen(rows, load=load, router=router, num_replicas=2,
                                  num_queries=each["num_queries"], **{**USUAL, "engine": "lean"})
            ]  # fmt: skip
            if whole and lean:
                cells = [
                    f"{number(row['mean_s'])} / {number(row['p95_s'])}, {row['hit_rate']:.0%}"
                    for row in (lean[0], whole[0])
                ]
                lines.append((f"{load}, {router}", cells))
    yield Grid("whole", "2 replicas: TTFT mean / P95, prompt tokens not computed", "", ("lean", "whole"), lines)


def _callers(rows: Rows) -> Iterator[Grid]:
    heads = [*SHARED, "conversations, each at one caller"]
    lines = []
    for router in SEVERAL:
        for num in (1, 2, 4):
            there = chosen(rows, num_replicas=8, router=router, **{**USUAL, "num_callers": num})
            found = [chosen(there, load=load, is_sticky=False) for load in SHARED]
            found.append(chosen(there, load="conversations", is_sticky=True))
            lines.append((f"{router}, {num}", [mean_and_tail(each[0]) if each else "" for each in found]))
    if any(any(cells) for _, cells in lines):
        yield Grid("callers", f"8 replicas, several callers: {MEAN}", "router, callers", heads, lines)


def show(rows: Rows, console: Console) -> None:
    """Print all tables."""
    for each in grids(rows):
        shown = Table(title=each.title, title_justify="left")
        shown.add_column(each.corner or "router")
        for head in each.header:
            shown.add_column(head, justify="right")
        for name, cells in each.lines:
            shown.add_row(name, *[cell.replace("**", "") for cell in cells])
        if each.lines:
            console.print(shown)


def tables(rows: Rows) -> dict[str, str]:
    """The tables of the study's page, by name."""
    return {
        each.name: table([each.corner, *each.header], ([name, *cells] for name, cells in each.lines))
        for each in grids(rows)
        if each.name
    }


def draw(path: Path, rows: Rows) -> None:
    """Write a PNG: mean TTFT of each router by the number of replicas, a panel for each load. Needs matplotlib."""
    main = chosen(_largest(rows), **USUAL)
    figure, panels = make_panels(len(LOADS), height=2.6)
    for panel, load in zip(panels, LOADS, strict=True):
        for router, colour in zip(ROUTERS, COLOURS, strict=True):
            found = {row["num_replicas"]: row["mean_s"] for row in chosen(main, load=load, router=router)}
            width = 2.6 if router == "soonest" else 1.3
            panel.plot(
                *zip(*sorted(found.items()), strict=True), color=colour, label=router, marker="o", lw=width, ms=3
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks([2, 8, 64], ["2", "8", "64"])
        panel.set_xlim(1.7, 75)
        panel.set_yscale("log")
        plain_log_ticks(panel.yaxis)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_title(load, loc="left", fontsize=10)
        panel.set_xlabel("replicas")
        panel.set_ylabel("mean TTFT (s)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    write_atomic(path, drawn.getvalue())
