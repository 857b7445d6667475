"""Tables and pictures of what was found."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrag.bench.report_canvas import make_panels, plain_log_ticks
from streamrag.files import write_whole

from .cells import FLOWGUARD_WITHOUT, PARAMETERS, PROFILES, ROUTERS, SOONEST_WITHOUT
from .loads import LOADS

Rows = Sequence[dict[str, Any]]
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


def chosen(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def show(rows: Rows, console: Console) -> None:
    main = chosen(rows, of="routers", rate=0.0, engine="lean")
    for fault in ("", "slow", "killed"):
        for num_replicas in (2, 8, 64):
            of_size = chosen(main, num_replicas=num_replicas, fault=fault)
            of_size = [row for row in of_size if num_replicas != 2 or row["num_queries"] == _most_queries(of_size)]
            if of_size:
                _table(console, of_size, f"{num_replicas} replicas{', one ' + fault if fault else ''}")
    for of, names in (("FlowGuard", FLOWGUARD_WITHOUT), ("soonest", SOONEST_WITHOUT)):
        for fault in ("", "slow"):
            _table(
                console, chosen(rows, of=of, fault=fault), f"8 replicas{', one slow' if fault else ''}", tuple(names)
            )
    _table(
        console,
        chosen(rows, engine="looks once"),
        "8 replicas, if streams looked into the prefix cache once, as vLLM's requests do",
    )
    for engine in ("lean", "whole"):
        checked = [row for row in rows if row["engine"] == engine and _is_check(rows, row)]
        _table(console, checked, f"2 replicas, fewer queries, {engine} engine")
    _parameters(console, rows)
    for rate in (1.0, 3.0):
        _table(console, chosen(rows, rate=rate), f"2 replicas, {rate:g} chats a second and replica")


def _parameters(console: Console, rows: Rows) -> None:
    """Mean TTFT with other parameters, as a share of that with ours: over seeds the mean, the least and the most."""
    for profile in PROFILES:
        there = chosen(rows, of="parameters", profile=profile)
        if not there:
            continue
        table = Table(title=f"soonest, {profile}: mean TTFT against the default's", title_justify="left")
        columns = [(load, num) for load in LOADS for num in (8, 64) if chosen(there, load=load, num_replicas=num)]
        for name in ("parameter", *(f"{load}, {num}" for load, num in columns)):
            table.add_column(name, justify="right")
        for router in PARAMETERS:
            cells = []
            for load, num in columns:
                usual, other = (
                    {row["seed"]: row["mean_s"] for row in chosen(there, load=load, num_replicas=num, router=name)}
                    for name in ("soonest", router)
                )
                shares = [other[seed] / usual[seed] for seed in usual if seed in other]
                cells.append(f"{sum(shares) / len(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})")
            table.add_row(router, *cells)
        console.print(table)


def _most_queries(rows: Rows) -> int:
    return max(int(row["num_queries"]) for row in rows)


def _is_check(rows: Rows, row: dict[str, Any]) -> bool:
    same = {name: row[name] for name in ("load", "num_replicas", "router", "num_queries")}
    return {"lean", "whole"} <= {other["engine"] for other in chosen(rows, **same)}


def _table(console: Console, rows: Rows, title: str, names: Sequence[str] = tuple(ROUTERS)) -> None:
    """Mean and P99 TTFT in seconds, and the share of the prompts' tokens that was not computed."""
    loads = [load for load in LOADS if chosen(rows, load=load)]
    if not loads:
        return
    table = Table(title=f"{title}: TTFT mean, P95, P99 (s), tokens not computed", title_justify="left")
    table.add_column("router")
    for load in loads:
        table.add_column(load, justify="right")
    for name in names:
        found = [row for load in loads for row in chosen(rows, load=load, router=name)[:1]]
        cells = [
            f"{row['mean_s']:.3g} {row['p95_s']:.3g} {row['p99_s']:.3g} [dim]{row['hit_rate']:.0%}[/]" for row in found
        ]
        if cells:
            table.add_row(name, *cells)
    console.print(table)


def draw(path: Path, rows: Rows) -> None:
    """Write a PNG: mean TTFT of each router by the number of replicas, a panel for each load. Needs matplotlib."""
    main = chosen(rows, of="routers", rate=0.0, engine="lean", fault="")
    figure, panels = make_panels(len(LOADS), height=2.6)
    for panel, load in zip(panels, LOADS, strict=True):
        for router, colour in zip(ROUTERS, COLOURS, strict=True):
            found: dict[int, float] = {}
            for row in chosen(main, load=load, router=router):
                found.setdefault(row["num_replicas"], row["mean_s"])
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
    write_whole(path, drawn.getvalue())
