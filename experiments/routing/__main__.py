"""Routers on simulated replicas: time to the first token, cache hits and balance, in virtual time.

    .venv/bin/python -m experiments.routing [--scale S] [--mooncake FILE] [--azure FILE] [--json FILE] [--plot FILE]

Two, eight and 64 replicas with the profile of two A40s and Llama 3.1 8B each, driven by the routers and books that run
in production. Without the files of the traces, arrivals are generated in their likeness. Each run is a process's; the
same seed gives the same figures.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from streamrag.bench.provenance import versions
from streamrag.files import write_whole

from .cells import KV_TOKENS, PROFILE, RATES, cells, run_cell
from .decisions import held_bytes, microseconds
from .report import draw, show


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", type=float, default=1.0, help="stretches the number of queries of each run (default: 1)")
    add("--mooncake", type=Path, metavar="FILE", help="Mooncake's conversation_trace.jsonl")
    add("--azure", type=Path, metavar="FILE", help="Azure's AzureLLMInferenceTrace_conv.csv")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG there")
    add("--show", type=Path, metavar="FILE", help="only show, and draw, the figures in a file that --json wrote")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    console = Console(highlight=False, width=None if Console().is_terminal else 200)
    made = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    show(made["results"], console)
    for line in made["decisions"]:
        console.print(f"{line['what']}, {line['num_replicas']} replicas: {line['us']:.0f} us")
    console.print(f"bytes held: { {name: round(num) for name, num in made['held_bytes'].items()} }")
    if arguments.json:
        write_whole(arguments.json, json.dumps(made, indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, made["results"])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    paths = {name: path for name in ("mooncake", "azure") if (path := getattr(arguments, name))}
    decisions, held = list(microseconds()), held_bytes()
    todo = sorted(cells(arguments.scale), key=lambda cell: -cell.num_queries)
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(arguments.processes) as pool:
        task = progress.add_task("runs", total=len(todo))
        running = {pool.submit(run_cell, cell, paths): n for n, cell in enumerate(todo)}
        found = {}
        for future in as_completed(running):
            found[running[future]] = future.result()
            progress.advance(task)
    return {
        "command": "make bench-routing",
        "profile": PROFILE,
        "kv_tokens": KV_TOKENS,
        "queries_per_s_and_replica": RATES,
        "traces": sorted(paths),
        "scale": arguments.scale,
        "versions": versions(),
        "decisions": decisions,
        "held_bytes": held,
        "results": [found[n] for n in sorted(found)],
    }


if __name__ == "__main__":
    main()
