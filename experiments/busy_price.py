"""What it costs to keep the engine less busy: chunks are sent later, and less is computed that an update replaces.

    python experiments/busy_price.py [--seeds N] [--json FILE] [--plot FILE]

Streaming keeps an engine busy for longer than waiting does: steps are shorter, and of a search what the next update
replaces was computed in vain. Whoever pays for that can have it from the client's side, in two ways:

    as they come      c0 c1 u2  u3        u4 end
    near the end      ··········(u3)······u4 end     the newest is sent T before the end, as `DelayedUpdates`
                                                     does by hints. Here the end is known, which no
                                                     retriever knows: it is the least price.
    paced             c0 ·····(c1 u2)····u4 end      the newest is sent when T has passed since the last was

In virtual time, on the loads of `make paper`. Busy time is over that of not streaming, with the published token budget
and with ours: the longer its steps, the less overhead it has. Prices are by the harder of the two. Finished cells stay
in a folder, and the same command goes on there.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from missing_cells import run_missing
from rich.console import Console
from rich.table import Table

from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.support.files import write_atomic
from streamrag.trace.read import read_trace
from streamrag.trace.values import TracedEvent, TracedQuery, TracedUpdate
from streamrag.trace.write import write_trace
from streamrag_bench.cell import CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.report.canvas import make_panels, plain_log_ticks
from streamrag_bench.report.comparison import Pool
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import digest, percentile
from streamrag_bench.workload import load_trace

PROFILE = "h200-llama8b-tp2"
BUDGET = 8_192
PUBLISHED_BUDGETS = {"crawler": 2_048, "anns": 8_192, "anns-last": 8_192}
"""Tokens in a step of not streaming, as in the paper's report."""
NOT_STREAMING, EQUAL = "not streaming", f"not streaming, {BUDGET:,} a step"
RANKS = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
COLOURS = {"p50": "#0072b2", "p95": "#d55e00", "p99": "#009e73"}
DASHES = {"near the end": "-", "paced": (0, (2, 1.5))}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Load(NamedTuple):
    """A workload at a rate."""

    workload: str
    qps: float
    num_queries: int
    most_busy: float
    """What was set out to be reached, over not streaming."""

    @property
    def name(self) -> str:
        return f"{self.workload} {self.qps:g} QPS"


LOADS = (Load("crawler", 4.0, 700, 1.02), Load("anns", 2.0, 500, 1.25), Load("anns-last", 2.0, 500, 1.25))


class Sending(NamedTuple):
    """When chunks are sent."""

    rule: str
    seconds: float

    @property
    def name(self) -> str:
        return "as they come" if self == AS_THEY_COME else f"{self.rule}, {self.seconds:g} s"


Times: TypeAlias = Callable[[Sequence[float], float, float], list[float]]


def near_the_end(arrivals: Sequence[float], end_s: float, lead_s: float) -> list[float]:
    """When each is sent: not before `lead_s` is left."""
    return [max(at_s, end_s - lead_s) for at_s in arrivals]


def paced(arrivals: Sequence[float], end_s: float, pause_s: float) -> list[float]:
    """When each is sent: the first at once, and what comes within a pause at its end, together."""
    sent: list[float] = []
    for at_s in arrivals:
        if sent and at_s <= sent[-1]:
            sent.append(sent[-1])
        else:
            sent.append(max(at_s, min(sent[-1] + pause_s, end_s)) if sent else at_s)
    return sent


RULES: Mapping[str, Times] = {"near the end": near_the_end, "paced": paced}
AS_THEY_COME = Sending("near the end", inf)
SENDINGS = (
    AS_THEY_COME,
    *(Sending("near the end", seconds) for seconds in (4.0, 2.0, 1.0, 0.7, 0.5, 0.35, 0.25)),
    *(Sending("paced", seconds) for seconds in (0.5, 1.0, 2.0)),
)


def sent(query: TracedQuery, sending: Sending) -> TracedQuery:
    """The query as its client sends it. Of updates that go together, only the last is sent."""
    times = RULES[sending.rule]([event.at_s for event in query.events], query.end_s, sending.seconds)
    events: list[TracedEvent] = []
    for event, at_s in zip(query.events, times, strict=True):
        if isinstance(event, TracedUpdate):
            while events and events[-1].at_s == at_s:
                events.pop()
        events.append(replace(event, at_s=at_s))
    return replace(query, events=tuple(events))


def cells_of(load: Load, seeds: Sequence[int], folder: Path) -> dict[str, tuple[CellSettings, ...]]:
    """By the name of the sending, one for each seed; writes what the cells read, too."""
    options = SchedulerOptions()
    of = CellSettings(
        "virtual", load.workload, "streaming", qps=load.qps, num_queries=load.num_queries, profile=PROFILE
    )
    waiting = replace(of, arm="no-streaming", max_num_batched_tokens=PUBLISHED_BUDGETS[load.workload])
    ours = replace(of, policy=options.policy, eviction=options.eviction, max_num_batched_tokens=BUDGET)
    cells = {NOT_STREAMING: tuple(replace(waiting, seed=seed) for seed in seeds)}
    if waiting.max_num_batched_tokens != BUDGET:
        waiting = replace(waiting, max_num_batched_tokens=BUDGET)
        cells[EQUAL] = tuple(replace(waiting, seed=seed) for seed in seeds)
    for sending in SENDINGS:
        made = []
        for seed in seeds:
            cell = replace(ours, seed=seed)
            if sending != AS_THEY_COME:
                cell = replace(cell, workload=str(trace_of(cell, sending, folder)))
            made.append(cell)
        cells[sending.name] = tuple(made)
    return cells


def trace_of(cell: CellSettings, sending: Sending, folder: Path) -> Path:
    """The path of the load as it is sent."""
    rule = sending.rule.replace(" ", "-")
    path = folder / f"{cell.workload}-{cell.qps:g}-{cell.num_queries}-seed{cell.seed}-{rule}-{sending.seconds:g}.jsonl"
    trace = load_trace(cell)
    later = replace(trace, queries=tuple(sent(query, sending) for query in trace.queries))
    if not path.exists() or read_trace(path).queries != later.queries:
        folder.mkdir(parents=True, exist_ok=True)
        write_trace(later, path, overwrite=True)  # with its date, so that finished cells would be of another file
    return path


Rows: TypeAlias = list[dict[str, Any]]


def rows_of(load: Load, cells: Mapping[str, Sequence[CellSettings]], store: CellStore) -> Iterator[dict[str, Any]]:
    """Percentiles are of all requests of all seeds."""
    pools = {
        name: Pool(tuple(digest(read_cell(path)) for cell in settings if (path := store.find(cell))))
        for name, settings in cells.items()
    }
    busy = {name: sum(d.busy_s for d in pool.digests) for name, pool in pools.items()}
    for name, pool in pools.items():
        seconds = pool.values(lambda d: d.ttft_after_retrieval_s)
        invalidated = pool.values(lambda d: d.num_invalidated)
        yield {
            "load": load.name,
            "sent": name,
            "busy": busy[name] / busy[NOT_STREAMING],
            "busy_equal": busy[name] / busy.get(EQUAL, busy[NOT_STREAMING]),
            **{rank: percentile(seconds, fraction) for rank, fraction in RANKS.items()},
            "invalidated_a_query": round(sum(invalidated) / len(seconds)),
        }


def prices(load: Load, rows: Rows) -> Iterator[str]:
    """Of each tenth of busy time, by the cheapest of the points measured that is no busier."""
    waiting = (NOT_STREAMING, EQUAL)
    found = sorted((row for row in rows if row["load"] == load.name and row["sent"] not in waiting), key=_busy)
    first = next(row for row in found if row["sent"] == AS_THEY_COME.name)
    tenths = [number / 10 for number in range(int(_busy(first) * 10), 10, -1)]
    previous = first
    for limit in [*(tenth for tenth in tenths if load.most_busy < tenth < _busy(first)), load.most_busy]:
        fit = [row for row in found if _busy(row) <= limit]
        if not fit:
            yield f"{load.name}: nothing measured is as little busy as {limit:.2f} times not streaming"
            return
        best = min(fit, key=lambda row: (row["p95"], row["p50"]))
        if best is previous:
            continue
        more = ", ".join(f"{rank.upper()} {best[rank] / first[rank]:.2f}x" for rank in RANKS)
        yield f"{load.name}, at most {limit:.2f} times as busy as not streaming: {more} of as they come, {best['sent']}"
        previous = best


def _busy(row: Mapping[str, Any]) -> float:
    """The harder of the two."""
    return float(max(row["busy"], row["busy_equal"]))


def show(rows: Rows) -> None:
    for load in LOADS:
        table = Table(title=f"{load.name}: seconds from the last chunk to the first token", title_justify="left")
        table.add_column("chunks are sent")
        for name in ("busy", "equal budgets", "P50", "P95", "P99", "invalidated a query"):
            table.add_column(name, justify="right")
        for row in rows:
            if row["load"] == load.name:
                seconds = (f"{row[rank]:.3f}" for rank in RANKS)
                busy = (f"{row[name]:.2f}x" for name in ("busy", "busy_equal"))
                table.add_row(row["sent"], *busy, *seconds, f"{row['invalidated_a_query']:,}")
        console.print(table)


def draw(path: Path, rows: Rows) -> None:
    """Write a PNG: a panel for each load. Needs matplotlib."""
    figure, panels = make_panels(len(LOADS), height=3.4)
    for panel, load in zip(panels, LOADS, strict=True):
        of = {row["sent"]: row for row in rows if row["load"] == load.name}
        for rank, colour in COLOURS.items():
            panel.axhline(of[NOT_STREAMING][rank], color=colour, linewidth=0.8, alpha=0.4)
            for rule, dashes in DASHES.items():
                names = [AS_THEY_COME.name, *(s.name for s in SENDINGS if s.rule == rule and s != AS_THEY_COME)]
                line = [(_busy(of[name]), of[name][rank]) for name in names]
                label = f"{rank.upper()}, {rule}"
                panel.plot(
                    *zip(*line, strict=True), color=colour, linestyle=dashes, marker="o", markersize=3, label=label
                )
        panel.axvline(load.most_busy, color="#8a8a8a", linewidth=1, linestyle=(0, (1, 1.5)))
        panel.set_yscale("log")
        plain_log_ticks(panel.yaxis)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_title(load.name, loc="left", fontsize=10)
        panel.set_xlabel(f"busy time over not streaming's, {BUDGET:,} a step")
    panels[0].set_ylabel("seconds to the first token")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    write_atomic(path, drawn.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, default=2, help="how many, from 1 on (default: 2)")
    add("--queries", type=int, metavar="N", help="at most so many queries a cell: to try it out")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=Path("bench-results/busy-price"), metavar="FOLDER", help="default: %(default)s")
    add("--force", action="store_true", help="run finished cells again")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG there")
    arguments = parser.parse_args()
    store, seeds = CellStore(arguments.output), range(1, arguments.seeds + 1)
    loads = [load._replace(num_queries=min(load.num_queries, arguments.queries or 9_999)) for load in LOADS]
    cells = {load: cells_of(load, seeds, arguments.output / "traces") for load in loads}
    flat = [cell for of in cells.values() for of_seeds in of.values() for cell in of_seeds]
    run_missing(flat, store, arguments.processes, console, is_forced=arguments.force)
    rows = [row for load, of in cells.items() for row in rows_of(load, of, store)]
    show(rows)
    told = [line for load in loads for line in prices(load, rows)]
    for line in told:
        console.print(line)
    if arguments.json:
        made = {"command": "make bench-busy", "num_seeds": arguments.seeds, "profile": PROFILE, "versions": versions()}
        made["num_queries"] = {load.name: load.num_queries for load in loads}
        write_atomic(arguments.json, json.dumps({**made, "results": rows, "verdicts": told}, indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, rows)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
