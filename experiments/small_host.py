"""Does `eviction="cost"` hold its 2 % where host memory is small? Against recomputing, on two loads under pressure.

    python experiments/small_host.py [--seeds 101,102] [--json FILE]

Host memory that holds little is soon full of what is never asked for again: copies out take time, and little is had
back. So `cost` could lose to `recompute`, which copies nothing. Both are our defaults otherwise, with 8,192 tokens a
step, in virtual time; the loads, their seeds and their KV memory are those with which `cost` lost once. Finished cells
stay in a folder, and the same command goes on there.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from missing_cells import run_missing
from rich.console import Console
from rich.table import Table

from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.support.files import write_atomic
from streamrag_bench.cell import CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.report.comparison import Pool
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import digest, percentile

PROFILE = "h200-llama8b-tp2"
BUDGET = 8_192
RANKS = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MOST_WORSE = 1.02
"""Times as long as recomputing, at each rank."""
HOSTS: Mapping[str, int | None] = {"4 GiB": 4 << 30, "16 GiB": 16 << 30, "default": None}
"""Of each worker; the default is 128 GiB in simulation, and six times the KV cache at most, as on a real machine."""

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Load(NamedTuple):
    """A workload under memory pressure."""

    workload: str
    qps: float
    delay: float
    num_queries: int
    kv_tokens: int = 420_000

    @property
    def name(self) -> str:
        return f"{self.workload} {self.qps:g} QPS, gaps {self.delay:g}x, KV {self.kv_tokens / 1e6:.2f} M"


LOADS = (Load("crawler", 3.0, 6.0, 600), Load("anns-last", 1.5, 20.0, 300))

Key: TypeAlias = tuple[Load, str]
"""A load, and the host memory with `cost`; "" is `recompute`."""
Cells: TypeAlias = Mapping[Key, tuple[CellSettings, ...]]
"""One for each seed."""


def make_cells(loads: Sequence[Load], seeds: Sequence[int]) -> dict[Key, tuple[CellSettings, ...]]:
    cells: dict[Key, tuple[CellSettings, ...]] = {}
    for load in loads:
        recompute = CellSettings(
            "virtual",
            load.workload,
            "streaming",
            policy=SchedulerOptions().policy,
            eviction="recompute",
            qps=load.qps,
            delay=load.delay,
            kv_tokens=load.kv_tokens,
            num_queries=load.num_queries,
            profile=PROFILE,
            max_num_batched_tokens=BUDGET,
        )
        ways = {"": recompute}
        ways |= {name: replace(recompute, eviction="cost", host_kv_bytes=size) for name, size in HOSTS.items()}
        cells |= {(load, host): tuple(replace(way, seed=seed) for seed in seeds) for host, way in ways.items()}
    return cells


def rows_of(cells: Cells, store: CellStore) -> Iterator[dict[str, Any]]:
    """Percentiles are of all requests of all seeds; `worse` is the worst rank over `recompute`."""
    before: dict[str, float] = {}
    for (load, host), settings in cells.items():
        pool = Pool(tuple(digest(read_cell(path)) for cell in settings if (path := store.find(cell))))
        seconds = pool.values(lambda d: d.ttft_after_retrieval_s)
        found = {rank: percentile(seconds, fraction) for rank, fraction in RANKS.items()}
        before = found if not host else before
        worse = {rank: found[rank] / before[rank] for rank in RANKS}
        copies = [d.copy_totals for d in pool.digests if d.copy_totals]
        yield {
            "load": load.name,
            "eviction": "cost" if host else "recompute",
            "host": host or "none",
            **found,
            "recomputed": sum(d.num_taxed for d in pool.digests) / sum(d.num_computed for d in pool.digests),
            "busy_s": pool.total(lambda d: d.busy_s).value,
            "gb_out": sum(c.num_bytes_out for c in copies) / 1e9,
            "gb_in": sum(c.num_bytes_in for c in copies) / 1e9,
            "worst_rank": max(worse, key=worse.__getitem__) if host else None,
            "worse": max(worse.values()) if host else None,
            "is_met": max(worse.values()) <= MOST_WORSE,
        }


def verdicts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row["worse"] is None:
            continue
        verdict = "kept" if row["is_met"] else "MISSED"
        yield (
            f"{row['load']}, host memory {row['host']}: at worst {row['worse']:.2f} times as long as recompute "
            f"({str(row['worst_rank']).upper()}), {verdict}"
        )


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="seconds from the last chunk to the first token", title_justify="left")
    names = (
        "load",
        "eviction",
        "host memory",
        "P50",
        "P95",
        "P99",
        "recomputed",
        "busy, s",
        "GB out",
        "GB in",
        "kept?",
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < 3 else "right")
    for row in rows:
        seconds = (f"{row[rank]:.3f}" for rank in RANKS)
        copied = (f"{row[name]:,.0f}" for name in ("busy_s", "gb_out", "gb_in"))
        kept = "" if row["worse"] is None else "yes" if row["is_met"] else "NO"
        table.add_row(row["load"], row["eviction"], row["host"], *seconds, f"{row['recomputed']:.1%}", *copied, kept)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", default="101,102", metavar="LIST", help="default: %(default)s")
    add("--queries", type=int, metavar="N", help="at most so many queries a cell: to try it out")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=Path("bench-results/small-host"), metavar="FOLDER", help="default: %(default)s")
    add("--force", action="store_true", help="run finished cells again")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    store, seeds = CellStore(arguments.output), [int(seed) for seed in arguments.seeds.split(",")]
    loads = [load._replace(num_queries=min(load.num_queries, arguments.queries or 9_999)) for load in LOADS]
    cells = make_cells(loads, seeds)
    flat = [cell for of_seeds in cells.values() for cell in of_seeds]
    run_missing(flat, store, arguments.processes, console, is_forced=arguments.force)
    rows = list(rows_of(cells, store))
    show(rows)
    told = list(verdicts(rows))
    for line in told:
        console.print(line)
    if arguments.json:
        made: dict[str, Any] = {"command": "make bench-small-host", "seeds": seeds, "profile": PROFILE}
        made |= {"versions": versions(), "max_num_batched_tokens": BUDGET}
        made |= {"num_queries": {load.name: load.num_queries for load in loads}}
        write_atomic(arguments.json, json.dumps({**made, "results": rows, "verdicts": told}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
