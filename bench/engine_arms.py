"""Time to the first token on the real engine, for four ways to use context that arrives in chunks.

    python bench/engine_arms.py [--json FILE]

Sixteen streams at once append six chunks each, in rounds; every arm gets the same chunks at the same times, once with
ample memory and once with memory for a third of them. `ttft_after_retrieval_s` runs from the last chunk to the first
token. Random weights: the answers mean nothing, the work is real.
"""

import argparse
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag.bench.cell import Arm, CellResult, CellSettings
from streamrag.bench.summary import percentile
from streamrag.bench.wall import run_cell
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery

NUM_STREAMS, NUM_CHUNKS = 16, 6
ROUND_S = 20.0
SPREAD_S = 4.0
MEAN_GAP_S = 1.5
CHUNK_TOKENS = (60, 300)
MAX_GAP_S = 3.0
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 4_096,
}
ARMS: tuple[tuple[Arm, str], ...] = (
    ("no-streaming", "fcfs"),
    ("warming", "fcfs"),
    ("stock-sessions", "fcfs"),
    ("streaming", "fcfs"),
)

console = Console(highlight=False)


def load(num_rounds: int) -> Trace:
    """Rounds that do not overlap, of `NUM_STREAMS` queries each."""
    rng = random.Random(0)
    queries = []
    for number in range(num_rounds * NUM_STREAMS):
        start_s = number // NUM_STREAMS * ROUND_S + rng.uniform(0, SPREAD_S)
        at_s, events = 0.0, []
        for index in range(NUM_CHUNKS):
            events.append(TracedAppend(at_s, TracedChunk(f"{number}.{index}", rng.randrange(*CHUNK_TOKENS))))
            at_s += min(rng.expovariate(1 / MEAN_GAP_S), MAX_GAP_S)
        queries.append(TracedQuery(f"q{number}", start_s, "", tuple(events), events[-1].at_s))
    return Trace(tuple(sorted(queries, key=lambda q: q.arrival_s)))


def num_prompt_tokens(query: TracedQuery) -> int:
    return sum(event.chunk.num_tokens for event in query.events if isinstance(event, TracedAppend))


def measure(
    model: Path, trace: Trace, kv_tokens: dict[str, int], done: Callable[[CellResult], None]
) -> list[CellResult]:
    results = []
    for num_tokens in kv_tokens.values():
        for arm, policy in ARMS:
            settings = CellSettings(
                "wall",
                "16 streams of 6 chunks",
                arm,
                policy=policy,
                kv_tokens=num_tokens,
                num_output_tokens=4,
                model=str(model),
                max_num_batched_tokens=1_024,
                max_num_seqs=NUM_STREAMS,
            )
            results.append(run_cell(settings, trace=trace))
            done(results[-1])
    return results


def rows(results: list[CellResult]) -> list[dict[str, Any]]:
    made = []
    for result in results:
        times_s = [request.ttft_after_retrieval_s for request in result.requests]
        floors_s = [request.floor_s for request in result.requests]
        records = [request.record for request in result.requests if request.record]
        is_complete = not result.num_unfinished
        made.append(
            {
                "arm": result.settings.arm,
                "policy": result.settings.policy if result.settings.arm == "streaming" else None,
                "kv_tokens": result.settings.kv_tokens,
                "num_queries": len(times_s),
                "num_unfinished": result.num_unfinished,
                "ttft_after_retrieval_s": {
                    name: percentile(times_s, q) if is_complete else None for name, q in (("p50", 0.5), ("p95", 0.95))
                },
                "floor_s": {name: percentile(floors_s, q) for name, q in (("p50", 0.5), ("p95", 0.95))},
                "num_preemptions": sum(len(record.preemptions) for record in records),
                "busy_s": result.busy_s,
            }
        )
    return made


def show(kv_tokens: dict[str, int], found: list[dict[str, Any]]) -> None:
    for label, num_tokens in kv_tokens.items():
        table = Table(title=f"{label}: {num_tokens:,} KV tokens", title_justify="left")
        table.add_column("ttft_after_retrieval_s")
        for name in ("P50", "P95", "of the floor", "", "preempted", "busy s"):
            table.add_column(name, justify="right")
        for row in (row for row in found if row["kv_tokens"] == num_tokens):
            times, floors = row["ttft_after_retrieval_s"], row["floor_s"]
            cells = [f"{row['num_unfinished']} never answered", "", "", ""]
            if times["p50"] is not None:
                cells = [f"{times[p]:.3f}" for p in times] + [f"{times[p] / floors[p]:.1f}x" for p in times]
            name = row["arm"] + (f", {row['policy']}" if row["policy"] else "")
            table.add_row(name, *cells, str(row["num_preemptions"]), f"{row['busy_s']:.1f}")
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of 16 streams each, per arm (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    trace = load(arguments.rounds)
    num_at_once = sum(num_prompt_tokens(query) for query in trace.queries) // arguments.rounds
    kv_tokens = {"ample memory": 2 * num_at_once // 32 * 32, "memory for a third": num_at_once // 3 // 32 * 32}
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(kv_tokens) * len(ARMS))
        model = make_tiny_llama(Path(folder, "model"), **MODEL)

        def done(result: CellResult) -> None:
            progress.advance(task)
            (row,) = rows([result])
            progress.console.print(row["arm"], row["kv_tokens"], row["ttft_after_retrieval_s"], row["num_preemptions"])

        found = rows(measure(model, trace, kv_tokens, done))
    show(kv_tokens, found)
    if arguments.json:
        machine = {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()}
        made = {"command": "make bench-engine", "machine": machine, "model": MODEL, "results": found}
        arguments.json.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
