"""How much sooner is an answer complete if it is drafted while retrieval runs, on two H200s under load? Simulated.

    python experiments/answer_ahead_simulated.py [--only REGEX] [--seeds N] [--queries N] [--json FILE]

The crawls and searches of `make paper`, with answers of 50, 200 and 500 tokens, each load served in three ways with
the same arrivals: without drafts as engines schedule by default (off) and as engines with `answer_ahead` do (sync), and
with drafts (ahead). Answers change with their contexts as those of a real model did (`answer_revisions.py`), or never.
The answer must be the same in every way. `--only` runs the loads whose names it is found in, and leaves the others in
FILE as they are.

Two bounds stand beside each ratio. A draft saves at most the time that decoding the answer takes, and drafts that run
only where nothing else could compute save at most the time for which the engine idled between the query's first context
and the end of its retrieval, as seen without drafts.
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from answer_ahead_replay import PROFILE, WAYS, Load, Replay, Row, Totals, Way
from answer_ahead_tables import MOST_WORSE, SIMULATED_TABLES
from rich.console import Console
from rich.progress import track

from streamrag.engine import rules
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

POINTS: tuple[tuple[str, float], ...] = (
    ("crawler", 1),
    ("crawler", 2),
    ("crawler", 4),
    ("anns", 1),
    ("anns", 2),
    ("anns-last", 1),
    ("anns-last", 2),
)
OVERLOAD: tuple[tuple[str, float], ...] = (("crawler", 6), ("crawler", 10.3), ("anns-last", 7.2))
"""Beyond saturation, as in `make paper`; the last two are twice that."""
NUM_QUERIES = {1: 150, 2: 150, 4: 300, 6: 600, 7.2: 600, 10.3: 600}
"""Of one seed, by rate: a load lasts one or two minutes."""
LOADS = (
    *(Load(*point, 200, NUM_QUERIES[point[1]]) for point in POINTS + OVERLOAD),
    *(Load(*point, num_tokens, NUM_QUERIES[point[1]]) for num_tokens in (50, 500) for point in POINTS),
    *(Load(*point, 200, NUM_QUERIES[point[1]], quality="right") for point in POINTS),
)
RANKS = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

console = Console(highlight=False, width=None if Console().is_terminal else 160)

Served: TypeAlias = dict[Way, tuple[dict[str, Row], Totals]]
"""Rows by query and totals of each way, of one seed."""
Summary: TypeAlias = dict[str, Any]


def serve(load: Load) -> Served:
    """Serve a load in each way. Collects garbage rarely: all that vLLM's modules hold would be looked at each time."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    return {way: Replay(load, way).run() for way in WAYS}


def least_s(row: Row, *, is_idle_only: bool) -> float:
    """Return the least seconds to the last token that a draft could have given a query, which had none."""
    decode_s = row.last_token_s - row.first_token_s
    return row.last_s - (min(row.idle_s, decode_s) if is_idle_only else decode_s)


def summarize(seeds: Sequence[Served], num_tokens: int) -> Summary:
    """Return what the ways gave, over all queries of all seeds."""
    rows = {way: [row for served in seeds for row in served[way][0].values()] for way in WAYS}
    totals = {way: [served[way][1] for served in seeds] for way in WAYS}
    seconds = {
        **{f"first_{way}": [row.first_s for row in rows[way]] for way in WAYS},
        **{f"last_{way}": [row.last_s for row in rows[way]] for way in WAYS},
        "last_bound_idle": [least_s(row, is_idle_only=True) for row in rows["sync"]],
        "last_bound_decode": [least_s(row, is_idle_only=False) for row in rows["sync"]],
    }
    ahead, of = rows["ahead"], totals["ahead"]
    computing_s, held_s = sum(each.computing_s for each in of), sum(each.held_s for each in of)
    drafted, accepted = sum(each.num_drafted for each in of), sum(row.num_accepted for row in ahead)
    return {
        "date": date.today().isoformat(),
        "num_seeds": len(seeds),
        "num_queries": len(ahead),
        **{
            f"{name}_{rank}": percentile(values, share)
            for name, values in seconds.items()
            for rank, share in RANKS.items()
        },
        "later_share": sum(is_later(served, query_id) for served in seeds for query_id in served["sync"][0])
        / len(ahead),
        "complete": sum(row.is_complete for row in ahead) / len(ahead),
        "num_tokens": num_tokens * len(ahead),
        "num_drafted_of_all_contexts": drafted,
        "num_drafted": sum(row.num_drafted for row in ahead),
        "num_verified": sum(row.num_verified for row in ahead),
        "num_accepted": accepted,
        "num_wasted": drafted - accepted,
        "draft_s": sum(each.draft_s for each in of),
        **{f"busy_s_{way}": sum(each.busy_s for each in totals[way]) for way in WAYS},
        **{f"end_s_{way}": sum(each.end_s for each in totals[way]) for way in WAYS},
        "idle_share": 1 - sum(each.busy_s for each in totals["sync"]) / sum(each.end_s for each in totals["sync"]),
        "held_share": held_s / (held_s + computing_s) if held_s else 0.0,
    }


def is_later(served: Served, query_id: str) -> bool:
    """Whether the last token of a query came more than `MOST_WORSE` later with drafts, in the same load."""
    return served["ahead"][0][query_id].last_s > (1 + MOST_WORSE) * served["sync"][0][query_id].last_s


def run(loads: Sequence[Load], num_seeds: int, num_processes: int) -> Iterator[tuple[Load, Summary]]:
    """Serve each load with each seed, in processes, and yield each load when all of its seeds are served."""
    jobs = [(load, replace(load, seed=seed)) for load in loads for seed in range(1, num_seeds + 1)]
    served: dict[Load, list[Served]] = {load: [] for load in loads}
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(serve, job): load for load, job in jobs}
        done = as_completed(futures)
        for future in track(done, "simulating", total=len(jobs), console=console, transient=True):
            load = futures[future]
            served[load].append(future.result())
            if len(served[load]) == num_seeds:
                yield load, summarize(served.pop(load), load.num_output_tokens)


def write(path: Path, found: Mapping[str, Summary]) -> None:
    """Write the figures, with how they were made. Rows of an earlier run have its date and number of seeds."""
    about = {"is_simulated": True, "command": "make bench-ahead-simulated", "date": date.today().isoformat()}
    about |= {"profile": PROFILE, "versions": versions()}
    about["rules"] = [name for name in vars(rules) if "Draft" in name]
    write_atomic(path, json.dumps({**about, "loads": found}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help='only the loads whose names have this, for example "200 tokens$"')
    add("--seeds", type=int, default=2, help="how many, from 1 on (default: %(default)s)")
    add("--queries", type=int, metavar="N", help="at most so many of each load and seed: to try it out")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    most = arguments.queries or sys.maxsize
    loads = [
        replace(load, num_queries=min(load.num_queries, most)) for load in LOADS if re.search(arguments.only, load.name)
    ]
    path: Path | None = arguments.json
    known = json.loads(path.read_text())["loads"] if path and path.exists() else {}
    for load, summary in run(loads, arguments.seeds, arguments.processes):
        known[load.name] = summary
        known = {load.name: known[load.name] for load in LOADS if load.name in known}
        if path:
            write(path, known)
    for make in SIMULATED_TABLES.values():
        console.print(make(known))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
