"""Time to the first token on the real engine, for four ways to use context that arrives in chunks.

    python experiments/engine_arms.py [--json FILE]

Sixteen streams at once append six chunks each, in rounds; every arm gets the same chunks at the same times, once with
ample memory and once with memory for a third of them. `ttft_after_retrieval_s` runs from the last chunk to the first
token. Random weights: the answers mean nothing, the work is real. The arms take turns, repeatedly: the same step can
take a third longer a minute later where a machine is shared, so a figure is the median of all turns, with its spread.
"""

import argparse
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag_bench.cell import ARMS, Arm, CellResult, CellSettings, RequestResult
from streamrag_bench.summary import percentile
from streamrag_bench.wall import run_cell

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
PERCENTILES = {"p50": 0.5, "p95": 0.95}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


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


Turns = dict[tuple[int, Arm], list[CellResult]]
"""The results of each memory and arm."""


def measure(
    model: Path, trace: Trace, kv_tokens: Sequence[int], num_repetitions: int, done: Callable[[CellResult], None]
) -> Turns:
    turns: Turns = {(num_tokens, arm): [] for num_tokens in kv_tokens for arm in ARMS}
    for _ in range(num_repetitions):
        for (num_tokens, arm), results in turns.items():
            if results and results[-1].num_unfinished:
                continue  # it stood still, which takes a minute to find out
            settings = CellSettings(
                "wall",
                "16 streams of 6 chunks",
                arm,
                kv_tokens=num_tokens,
                num_output_tokens=4,
                model=str(model),
                max_num_batched_tokens=1_024,
                max_num_seqs=NUM_STREAMS,
            )
            results.append(run_cell(settings, trace=trace))
            done(results[-1])
    return turns


def row(results: Sequence[CellResult]) -> dict[str, Any]:
    """What one arm did in all its turns."""
    settings = results[0].settings
    is_complete = not any(result.num_unfinished for result in results)
    made: dict[str, Any] = {
        "arm": settings.arm,
        "policy": settings.policy if settings.arm == "streaming" else None,
        "kv_tokens": settings.kv_tokens,
        "num_queries": sum(len(result.requests) for result in results),
        "num_unfinished": sum(result.num_unfinished for result in results),
        "floor_s": {name: of_turns(results, lambda r: r.floor_s, q)[0] for name, q in PERCENTILES.items()},
        "num_preemptions": [sum(len(r.record.preemptions) for r in of.requests if r.record) for of in results],
        "busy_s": [result.busy_s for result in results],
    }
    if is_complete:
        for name, fraction in PERCENTILES.items():
            found, all_found = of_turns(results, lambda r: r.ttft_after_retrieval_s, fraction)
            made[name] = {"median_s": found, "all_s": all_found}
    return made


def of_turns(
    results: Sequence[CellResult], seconds: Callable[[RequestResult], float], fraction: float
) -> tuple[float, list[float]]:
    """The percentile in each turn, and the median of these."""
    found = [percentile([seconds(request) for request in result.requests], fraction) for result in results]
    return median(found), found


def show(kv_tokens: dict[str, int], found: list[dict[str, Any]]) -> None:
    for label, num_tokens in kv_tokens.items():
        table = Table(title=f"{label}: {num_tokens:,} KV tokens", title_justify="left")
        table.add_column("ttft_after_retrieval_s")
        for name in ("P50", "least .. most", "P95", "least .. most", "of the floor", "preempted", "busy s"):
            table.add_column(name, justify="right")
        for row in (row for row in found if row["kv_tokens"] == num_tokens):
            cells = ["never answered", "", "", "", ""]
            if not row["num_unfinished"]:
                cells = [cell for p in PERCENTILES for cell in (f"{row[p]['median_s']:.3f}", spread(row[p]["all_s"]))]
                cells.append(" / ".join(f"{row[p]['median_s'] / row['floor_s'][p]:.1f}x" for p in PERCENTILES))
            name = row["arm"] + (f", {row['policy']}" if row["policy"] else "")
            table.add_row(name, *cells, f"{median(row['num_preemptions']):.0f}", f"{median(row['busy_s']):.1f}")
        console.print(table)


def spread(seconds: list[float]) -> str:
    return f"{min(seconds):.3f} .. {max(seconds):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of 16 streams each, per turn (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each arm (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    trace = load(arguments.rounds)
    num_at_once = sum(num_prompt_tokens(query) for query in trace.queries) // arguments.rounds
    kv_tokens = {"ample memory": 2 * num_at_once // 32 * 32, "memory for a third": num_at_once // 3 // 32 * 32}
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=len(kv_tokens) * len(ARMS) * arguments.repetitions)
        model = make_tiny_llama(Path(folder, "model"), **MODEL)

        def done(result: CellResult) -> None:
            progress.advance(task)

        turns = measure(model, trace, tuple(kv_tokens.values()), arguments.repetitions, done)
    found = [row(results) for results in turns.values()]
    show(kv_tokens, found)
    if arguments.json:
        machine = {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()}
        made = {"command": "make bench-engine", "machine": machine, "model": MODEL, "results": found}
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
