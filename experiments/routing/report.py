"""Tables and pictures of the results, for a terminal and for experiments/studies/routing.md."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from streamrag.support.files import write_atomic
from streamrag_bench.report.canvas import make_panels, plain_log_ticks

from .cells import BEYOND, FLOWGUARD_WITHOUT, PARAMETERS, PROFILES, RATES, ROUTERS, SEVERAL, SHARED, SOONEST_WITHOUT
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
    "#e69f00",
    "#d55e00",
    "#b8a000",
    "#d0a8f0",
    "#5b3a8c",
    "#009e73",
)
USUAL = {"rate": 0.0, "engine": "lean", "fault": "", "kv_share": 1.0, "num_callers": 1, "is_foretold": False, "seed": 1}
"""What a run is if nothing else is said of it."""
Column: TypeAlias = tuple[str, Mapping[str, Any]]
"""Its heading, and which runs it shows."""


@dataclass(frozen=True)
class Grid:
    """A table: a line for each router, a column for each load or fleet."""

    name: str
    """In experiments/studies/routing.md it stands behind a comment with this name; empty: only in a terminal."""
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


def latency(row: Row) -> str:
    return f"{number(row['latency_s'])} ({number(row['mean_s'])})"


def throughput(row: Row) -> str:
    return f"{number(row['latency_s'])}, {number(row['tokens_per_s'])}"


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
        there = [(load, {"of": "routers", "load": load, "num_replicas": num}) for load in LOADS]
        of_size = _largest(rows) if num == 2 else rows
        yield grid(of_size, f"{num} replicas: {FULL}", routers, there, full)
        name, corner = f"routers-{num}", f"{num} replicas"
        yield grid(of_size, f"{corner}: {MEAN}", routers, there, mean_and_tail, name=name, corner=corner, best="mean_s")
        yield grid(of_size, f"{num} replicas: {BALANCE}", routers, there, balance)
    hot = [(f"{num} replicas", {"of": "routers", "load": "hot document", "num_replicas": num}) for num in (2, 8, 64)]
    yield grid(_largest(rows), f"hot document: {BALANCE}", routers, hot, balance, name="balance")
    broken = {"of": "routers", "num_replicas": 8}
    faults = [
        ("one slow", {**broken, "load": "conversations", "fault": "slow"}),
        ("one killed", {**broken, "load": "conversations", "fault": "killed"}),
        ("one killed, trees", {**broken, "load": "trees", "fault": "killed"}),
    ]
    yield grid(rows, "8 replicas: TTFT mean / P99, queries failed and replayed", routers, faults, faulty,
               name="faults", best="mean_s")  # fmt: skip
    for of, without in (("soonest", SOONEST_WITHOUT), ("FlowGuard", FLOWGUARD_WITHOUT)):
        yield from _ablations(rows, of, tuple(without))
    short = [
        (load, {"of": "FlowGuard", "load": load, "num_replicas": 8, "kv_share": 0.2}) for load in ("mooncake", *SHARED)
    ]
    yield grid(rows, f"8 replicas with a fifth of the KV: {MEAN}", tuple(FLOWGUARD_WITHOUT), short, mean_and_tail,
               name="short-kv", best="mean_s")  # fmt: skip
    chats = [
        (f"{rate or RATES['azure']:g} chats a second", {"load": "azure", "num_replicas": 2, "rate": rate})
        for rate in (1.0, 3.0, 0.0)
    ]
    papers = [(head, {"of": "routers", **wanted}) for head, wanted in chats]
    papers += [(load, {"of": "routers", "load": load, "num_replicas": 8}) for load in ("conversations", "trees")]
    yield grid(rows, "mean seconds to the last token (to the first)", routers, papers, latency,
               name="latency", corner="latency (TTFT of it)", best="latency_s")  # fmt: skip
    yield from _checks(rows)
    once = [("rag", {"of": "routers", "load": "rag", "num_replicas": 8, "engine": "looks once"})]
    yield grid(rows, f"8 replicas, if streams looked into the prefix cache once: {MEAN}", routers, once, mean_and_tail,
               name="looks-once")  # fmt: skip
    told = [
        (f"{load}, {what}", {"of": "soonest", "load": load, "num_replicas": 8, "is_foretold": is_foretold})
        for load in ("rag", "hot document")
        for what, is_foretold in (("usual", False), ("foretold", True))
    ]
    yield grid(rows, f"8 replicas, if the router knew all documents: {MEAN}", ("soonest",), told, mean_and_tail)
    yield from _callers(rows)
    yield from _parameters(rows)


def _largest(rows: Rows) -> Rows:
    """Without the shorter runs that the whole engine is compared on."""
    most: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        cell = tuple(row[name] for name in (*USUAL, "of", "load", "num_replicas", "router", "profile", "is_sticky"))
        most[cell] = max(most.get(cell, row), row, key=lambda each: int(each["num_queries"]))
    return list(most.values())


def _ablations(rows: Rows, of: str, names: Sequence[str]) -> Iterator[Grid]:
    there = [(load, {"of": of, "load": load, "num_replicas": 8}) for load in SHARED]
    there.append(("conversations, one slow", {"of": of, "load": "conversations", "num_replicas": 8, "fault": "slow"}))
    title = f"each signal of {of}, 8 replicas"
    yield grid(rows, f"{title}: {MEAN}", names, there, mean_and_tail, name=f"signals-{of.lower()}", best="mean_s")
    yield grid(rows, f"{title}: {BALANCE}", names, there, balance)
    pair: list[Column] = [(load, {"of": of, "load": load, "num_replicas": 2}) for load in SHARED]
    pair += [
        (f"{load}, x{BEYOND:g}", {"of": of, "load": load, "num_replicas": 2, "rate": BEYOND * RATES[load]})
        for load in SHARED
    ]
    yield grid(rows, f"each signal of {of}, 2 replicas: mean seconds to the last token, tokens of answers a second",
               names, pair, throughput, name=f"pairs-{of.lower()}", best="latency_s")  # fmt: skip


def _checks(rows: Rows) -> Iterator[Grid]:
    """The lean engine beside the whole one."""
    lines = []
    for load in SHARED:
        for router in ROUTERS:
            whole = chosen(rows, of="routers", load=load, router=router, engine="whole")
            lean = [
                row
                for each in whole
                for row in chosen(rows, of="routers", load=load, router=router, num_replicas=2,
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
            there = chosen(rows, of="callers", router=router, num_callers=num)
            found = [chosen(there, load=load, is_sticky=False) for load in SHARED]
            found.append(chosen(there, load="conversations", is_sticky=True))
            lines.append((f"{router}, {num}", [mean_and_tail(each[0]) if each else "" for each in found]))
    if any(any(cells) for _, cells in lines):
        yield Grid("callers", f"8 replicas, several callers: {MEAN}", "router, callers", heads, lines)


def _parameters(rows: Rows) -> Iterator[Grid]:
    """Mean TTFT with other parameters, as a share of that with ours: over seeds the mean, the least and the most."""
    for profile in PROFILES:
        there = chosen(rows, of="parameters", profile=profile)
        columns = [(load, num) for load in LOADS for num in (8, 64) if chosen(there, load=load, num_replicas=num)]
        lines = []
        for router in PARAMETERS:
            cells = []
            for load, num in columns:
                usual, other = (
                    {row["seed"]: row["mean_s"] for row in chosen(there, load=load, num_replicas=num, router=name)}
                    for name in ("soonest", router)
                )
                shares = [other[seed] / usual[seed] for seed in usual if seed in other]
                if router == "soonest":
                    cells.append(", ".join(number(usual[seed]) for seed in sorted(usual)))
                elif len(shares) == 1:
                    cells.append(f"{shares[0]:.2f}")
                else:
                    cells.append(f"{sum(shares) / len(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})")
            lines.append((router, cells))
        header = [load if num == 8 else f"{load}, {num}" for load, num in columns]
        if columns:
            title = f"soonest, {profile}: mean TTFT, and as a share of ours"
            yield Grid(f"parameters-{profile.partition('-')[0]}", title, profile, header, lines)


def show(rows: Rows, console: Console) -> None:
    """Print all tables."""
    for each in grids(rows):
        table = Table(title=each.title, title_justify="left")
        table.add_column(each.corner or "router")
        for head in each.header:
            table.add_column(head, justify="right")
        for name, cells in each.lines:
            table.add_row(name, *[cell.replace("**", "") for cell in cells])
        if each.lines:
            console.print(table)


def written(page: str, rows: Rows, decisions: Rows) -> str:
    """A page with its tables anew: each is behind a comment with its name, up to an empty line."""
    found = [*grids(rows), _decisions(decisions)]
    for each in found:
        if each.name and each.lines:
            lines = [(each.corner, *each.header), ("---",) * (1 + len(each.header)), *((n, *c) for n, c in each.lines)]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            pattern = rf"(<!-- table: {re.escape(each.name)} -->\n\n)(?:\|.*\n)*\n?"
            page = re.sub(pattern, lambda match, table=table: f"{match[1]}{table}\n\n", page)  # type: ignore[misc]
    return page


def _decisions(decisions: Rows) -> Grid:
    sizes = sorted({line["num_replicas"] for line in decisions})
    us = {(line["what"], line["num_replicas"]): f"{line['us']:.0f}" for line in decisions}
    lines = [(f"`{what}`", [us[what, num] for num in sizes]) for what in dict.fromkeys(what for what, _ in us)]
    return Grid("decisions", "microseconds", "", [f"{num:,} replicas" for num in sizes], lines)


def draw(path: Path, rows: Rows) -> None:
    """Write a PNG: mean TTFT of each router by the number of replicas, a panel for each load. Needs matplotlib."""
    main = chosen(_largest(rows), of="routers", rate=0.0, engine="lean", fault="")
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
