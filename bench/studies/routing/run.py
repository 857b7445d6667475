"""Routers on simulated replicas: time to the first token, cache hits and balance, in virtual time.

    python -m studies.routing.run [--scale S] [--mooncake FILE] [--azure FILE] [--json FILE] [--plot FILE]

Two, eight and 64 replicas with the profile of two A40s and Llama 3.1 8B each, driven by the routers that run in
production. Without the files of the traces, arrivals are generated in their likeness. Finished runs stay in a file,
and the same command goes on there; those of other code, or of traces with other contents, are run again.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from studies.folders import KEPT
from studies.page_tables import with_tables

from .cells import KV_TOKENS, PROFILE, RATES, Cell, cells, code_digest, digest, run_cell
from .report import draw, show, tables


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studies.routing.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scale", type=float, default=1.0, help="stretches the number of queries of each run (default: 1)")
    add("--mooncake", type=Path, metavar="FILE", help="Mooncake's conversation_trace.jsonl")
    add("--azure", type=Path, metavar="FILE", help="Azure's AzureLLMInferenceTrace_conv.csv")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=KEPT / "routing.jsonl", metavar="FILE", help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG there")
    add("--docs", type=Path, metavar="FILE", help="write the tables into that page, behind comments with their names")
    add("--show", type=Path, metavar="FILE", help="only show, and draw, the figures in a file that --json wrote")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    console = Console(highlight=False, width=None if Console().is_terminal else 200)
    made = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    rows = made["results"]
    show(rows, console)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, rows)
    if arguments.docs:
        write_atomic(arguments.docs, with_tables(arguments.docs.read_text(), tables(rows)))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    paths = {name: path for name in ("mooncake", "azure") if (path := getattr(arguments, name))}
    code = code_digest()
    finished = read(arguments.output, code)
    planned = sorted(cells(arguments.scale, paths), key=lambda cell: -cell.num_queries)
    todo = [cell for cell in planned if cell not in finished]
    with (
        Progress(console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(arguments.processes) as pool,
        arguments.output.open("a") as lines,
    ):
        task = progress.add_task("runs", total=len(planned), completed=len(planned) - len(todo))
        running = {pool.submit(run_cell, cell, paths): cell for cell in todo}
        for future in as_completed(running):
            row = {**future.result(), "code": code}
            finished[running[future]] = row
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            progress.advance(task)
    return {
        "command": f"python -m studies.routing.run --scale {arguments.scale:g}",
        "profile": PROFILE,
        "kv_tokens": KV_TOKENS,
        "queries_per_s_and_replica": RATES,
        "code": code,
        "traces": {name: {"file": path.name, "sha256": digest(path)} for name, path in paths.items()},
        "scale": arguments.scale,
        "versions": versions(),
        "results": [finished[cell] for cell in planned],
    }


def read(path: Path, code: str) -> dict[Cell, dict[str, Any]]:
    """What earlier runs of that code have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    names = [field.name for field in fields(Cell)]
    return {Cell(**{name: row[name] for name in names}): row for row in rows if row["code"] == code}


if __name__ == "__main__":
    main()
