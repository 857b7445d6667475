"""Does the simulator agree with the engine? The same loads on a real CPU engine and on its simulation, side by side.

    python bench/validity.py [--json FILE] [--profile FILE]

Measures a hardware profile of vLLM on this machine, with vLLM's own scheduler and with ours; plays one load on the
real engine in each arm, repeatedly; simulates it with that profile, which also says how unsteady the machine is; and
compares the medians of P50 and P95 of `ttft_after_retrieval_s`. Random weights: the answers mean nothing, the work is
real. About fifteen minutes on two cores.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag.bench import simulate
from streamrag.bench.cell import ARMS, Arm, CellResult, CellSettings
from streamrag.bench.profiling import Pass, measure, table_profile, warm_up
from streamrag.bench.summary import percentile
from streamrag.bench.wall import engine_for, max_model_len, play_cell
from streamrag.bench.workload import NUM_TAIL_TOKENS, make_load
from streamrag.engine.costs import TableProfile, save_profile
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery

NUM_QUERIES, NUM_CHUNKS = 40, 6
MEAN_GAP_S = 0.6
CHUNK_TOKENS = (50, 250)
UTILISATION = 0.5
"""Of the engine, as the profile has it: queries arrive at the rate that makes it so, whatever the machine."""
NUM_OUTPUT_TOKENS = 4
BUDGET, NUM_SEQS = 1_024, 32
TOLERANCE = 0.15
NUM_SIMULATIONS = 15
PERCENTILES = {"p50": 0.5, "p95": 0.95}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 4_096,
}

console = Console(highlight=False)
Done = Callable[[], None]


def load() -> Trace:
    """Queries whose context grows chunk by chunk; when they arrive, the rate says."""
    rng = random.Random(0)
    queries = []
    for number in range(NUM_QUERIES):
        at_s, events = 0.0, []
        for index in range(NUM_CHUNKS):
            events.append(TracedAppend(at_s, TracedChunk(f"{number}.{index}", rng.randrange(*CHUNK_TOKENS))))
            at_s += min(rng.expovariate(1 / MEAN_GAP_S), 4 * MEAN_GAP_S)
        queries.append(TracedQuery(f"q{number}", float(number), "", tuple(events), events[-1].at_s))
    return Trace(tuple(queries))


def rate(trace: Trace, profile: TableProfile) -> float:
    """Queries per second that keep the engine busy for `UTILISATION` of the time, if their chunks come one by one."""
    busy_s = 0.0
    for query in trace.queries:
        num_before = 0
        for event in query.events:
            assert isinstance(event, TracedAppend)
            busy_s += profile.step_s([(event.chunk.num_tokens, num_before)])
            num_before += event.chunk.num_tokens
        busy_s += profile.step_s([(NUM_TAIL_TOKENS, num_before)]) - profile.step_s([(1, num_before)])
        busy_s += NUM_OUTPUT_TOKENS * profile.step_s([(1, num_before)])
    return UTILISATION * len(trace.queries) / busy_s


@dataclass
class Runs:
    """What was measured on the real engine."""

    passes: list[Pass] = field(default_factory=list)
    profile: TableProfile | None = None
    qps: float | None = None
    results: dict[Arm, list[CellResult]] = field(default_factory=lambda: {arm: [] for arm in ARMS})


def settings(arm: Arm, qps: float | None, *, model: Path | None = None, profile: Path | None = None) -> CellSettings:
    return CellSettings(
        "wall" if model else "virtual",
        f"{NUM_QUERIES} queries of {NUM_CHUNKS} chunks",
        arm,
        qps=qps,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        model=str(model) if model else None,
        profile=str(profile) if profile else None,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=NUM_SEQS,
    )


async def run_real(model: Path, trace: Trace, num_repetitions: int, done: Done) -> Runs:
    """Arms take turns, and the profile is measured in between: a machine that becomes slower does so for all."""
    runs = Runs()
    groups: tuple[tuple[Arm, ...], ...] = (("no-streaming", "warming", "stock-sessions"), ("streaming",))
    for arms in groups:
        first = settings(arms[0], runs.qps, model=model)
        longest = max_model_len(first, trace.queries)
        async with engine_for(first, trace.queries) as client:
            await warm_up(client, BUDGET, longest)
            for _ in range(num_repetitions):
                runs.passes.append(await measure(client, BUDGET, longest, NUM_SEQS))
                runs.profile = table_profile(runs.passes, client, "cpu-tiny-llama")
                runs.qps = runs.qps or rate(trace, runs.profile)
                for arm in arms:
                    await client.reset_prefix_cache()
                    cell = settings(arm, runs.qps, model=model)
                    queries = make_load(cell, trace)
                    runs.results[arm].append(await play_cell(cell, queries, client, runs.profile, keep_steps=True))
                    done()
    return runs


def with_provenance(profile: TableProfile) -> TableProfile:
    of_here = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "model": f"Llama with random weights, {MODEL}",
        "dtype": "float32",
    }
    return replace(profile, device=of_here["device"], provenance={**of_here, **profile.provenance})


def row(arm: Arm, real: Sequence[CellResult], simulated: Sequence[CellResult]) -> dict[str, Any]:
    made: dict[str, Any] = {"arm": arm, "num_queries": len(simulated[0].requests)}
    for name, fraction in PERCENTILES.items():
        found, expected = (
            [percentile([r.ttft_after_retrieval_s for r in result.requests], fraction) for result in results]
            for results in (real, simulated)
        )
        ratio = median(expected) / median(found)
        made[name] = {
            "real_s": found,
            "simulated_s": expected,
            "real_median_s": median(found),
            "simulated_median_s": median(expected),
            "ratio": ratio,
            "is_within_tolerance": abs(ratio - 1) <= TOLERANCE,
        }
    for name, results in (("real", real), ("simulated", simulated)):
        made[f"busy_s, {name}"] = [r.busy_s for r in results]
        made[f"num_steps, {name}"] = [len(r.steps) for r in results]
    return made


def show(rows: Sequence[dict[str, Any]], num_repetitions: int) -> None:
    table = Table(title=f"ttft_after_retrieval_s, real engine ({num_repetitions} times) and simulation")
    table.add_column("arm")
    for name in ("", "real", "least .. most", "simulated", "least .. most", "simulated/real"):
        table.add_column(name, justify="right")
    for found in rows:
        for name in PERCENTILES:
            of = found[name]
            mark = "" if of["is_within_tolerance"] else f"  over {TOLERANCE:.0%} off"
            cells = [
                text
                for kind in ("real", "simulated")
                for text in (
                    f"{of[f'{kind}_median_s']:.3f}",
                    f"{min(of[f'{kind}_s']):.3f} .. {max(of[f'{kind}_s']):.3f}",
                )
            ]
            table.add_row(found["arm"] if name == "p50" else "", name.upper(), *cells, f"{of['ratio']:.2f}{mark}")
    console.print(table)


def compare(runs: Runs, trace: Trace, profile: TableProfile, path: Path) -> list[dict[str, Any]]:
    """Simulate what was run, with `profile`, which is kept at `path`."""
    save_profile(profile, path)
    rows = []
    for arm in ARMS:
        cell = settings(arm, runs.qps, profile=path)
        simulated = [
            simulate.run_cell(cell, trace=trace, keep_steps=True, unsteady_seed=seed) for seed in range(NUM_SIMULATIONS)
        ]
        rows.append(row(arm, runs.results[arm], simulated))
    return rows


def write(path: Path, runs: Runs, profile: TableProfile, rows: list[dict[str, Any]]) -> None:
    made = {
        "command": "make bench-validity",
        "machine": {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()},
        "model": MODEL,
        "qps": runs.qps,
        "tolerance": TOLERANCE,
        "results": rows,
        "profile": asdict(profile),
    }
    path.write_text(json.dumps(made, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of each arm on the real engine (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the hardware profile there")
    arguments = parser.parse_args()
    trace = load()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        task = progress.add_task("real engine", total=len(ARMS) * arguments.repetitions)
        model = make_tiny_llama(Path(folder, "model"), **MODEL)
        runs = asyncio.run(run_real(model, trace, arguments.repetitions, lambda: progress.advance(task)))
        assert runs.profile is not None
        profile = with_provenance(runs.profile)
        rows = compare(runs, trace, profile, arguments.profile or Path(folder, "profile.json"))
    show(rows, arguments.repetitions)
    if arguments.json:
        write(arguments.json, runs, profile, rows)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
