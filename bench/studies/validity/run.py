"""Does the simulator agree with the engine? The same loads on a real CPU engine and on its simulation, side by side.

    python -m studies.validity.run [--json FILE] [--profile FILE]

    pass ─▶ load ─▶ pass ─▶ load ─▶ pass ...     a pass measures steps; each load is simulated with a profile of all
            not     │       warming              passes, as slow as the machine was in the two beside it
            streaming

Plays one load on the real engine in each arm, repeatedly, with vLLM's own scheduler and with ours; simulates each of
these runs; and compares P50 and P95 of `ttft_after_retrieval_s`. Nothing is taken from the loads themselves. Random
weights: the answers mean nothing, the work is real. About twenty minutes on two cores.
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
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag_bench import simulate
from streamrag_bench.cell import ARMS, Arm, CellResult, CellSettings
from streamrag_bench.profile.step_times import MeasurementPass, measure, table_profile, warm_up
from streamrag_bench.summary import percentile
from streamrag_bench.wall import engine_for, max_model_len, play_cell
from streamrag_bench.workload import NUM_TAIL_TOKENS, make_load
from studies.validity.machine_speed import at_speed, slowness

NUM_QUERIES, NUM_CHUNKS = 40, 6
MEAN_GAP_S = 0.6
CHUNK_TOKENS = (50, 250)
UTILISATION = 0.5
"""Share of the time in which the engine computes, as the profile has it: queries arrive at the rate that makes it so,
whatever the machine."""
NUM_OUTPUT_TOKENS = 4
BUDGET, NUM_SEQS = 1_024, 32
TOLERANCE = 0.15
NUM_SIMULATIONS = 9
"""Simulations of each run: the machine is slow for a moment now and then, in each of them at other times."""
PERCENTILES = {"p50": 0.5, "p95": 0.95}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 4_096,
}

console = Console(highlight=False, width=None if Console().is_terminal else 140)
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


def rate(queries: Sequence[TracedQuery], profile: TableProfile) -> float:
    """Queries per second that keep the engine busy for `UTILISATION` of the time, if their chunks come one by one."""
    busy_s = 0.0
    for query in queries:
        num_before = 0
        for event in query.events:
            assert isinstance(event, TracedAppend)
            busy_s += profile.step_s([(event.chunk.num_tokens, num_before)])
            num_before += event.chunk.num_tokens
        busy_s += profile.step_s([(NUM_TAIL_TOKENS, num_before)]) - profile.step_s([(1, num_before)])
        busy_s += NUM_OUTPUT_TOKENS * profile.step_s([(1, num_before)])
    return UTILISATION * len(queries) / busy_s


@dataclass
class Run:
    """A load on the real engine, between two passes, and in simulations."""

    arm: Arm
    num_passes_before: int
    real: CellResult
    simulated: list[CellResult] = field(default_factory=list)

    def slowness(self, of_passes: Sequence[float]) -> float:
        return mean(of_passes[self.num_passes_before - 1 : self.num_passes_before + 1])


class Engine(NamedTuple):
    """The real one."""

    kv_tokens: int
    block_size: int
    is_async: bool
    dtype: str


@dataclass
class Measured:
    """What was measured on the real engine."""

    passes: list[MeasurementPass] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    qps: float | None = None
    engine: Engine | None = None

    def profile(self, at: float | None = None) -> TableProfile:
        """The profile of all passes; on a machine that is always as slow as `at`, or sometimes slower, as it was."""
        assert self.engine
        passes = self.passes
        if at is not None:
            passes = [at_speed(one, at / of_it) for one, of_it in zip(passes, slowness(passes), strict=True)]
        return with_provenance(table_profile(passes, self.engine, "cpu-tiny-llama"), self.engine.dtype)


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


async def play_in_turns(
    found: Measured, model: Path, trace: Trace, arms: Sequence[Arm], num_repetitions: int, done: Done
) -> None:
    """Those that share an engine take turns, and steps are measured in between: a machine that becomes slower does so
    for all."""
    first = settings(arms[0], found.qps, model=model)
    queries = make_load(first, trace)
    longest = max_model_len(first, queries)
    async with engine_for(first, queries) as client:
        found.engine = Engine(client.kv_tokens, client.block_size, client.is_async, client.facts.dtype)
        await warm_up(client, BUDGET, longest)
        found.passes.append(await measure(client, BUDGET, longest, NUM_SEQS))
        profile = found.profile()
        found.qps = found.qps or rate(queries, profile)
        for arm in [*arms] * num_repetitions:
            await client.reset_prefix_cache()
            cell = settings(arm, found.qps, model=model)
            real = await play_cell(cell, make_load(cell, trace), client, profile, keep_steps=True)
            found.runs.append(Run(arm, len(found.passes), real))
            found.passes.append(await measure(client, BUDGET, longest, NUM_SEQS))
            done()


async def run_real(model: Path, trace: Trace, num_repetitions: int, done: Done) -> Measured:
    """Each arm on the engine that it needs."""
    found = Measured()
    groups: tuple[tuple[Arm, ...], ...] = (("no-streaming", "warming", "stock-sessions"), ("streaming",))
    for arms in groups:
        await play_in_turns(found, model, trace, arms, num_repetitions, done)
    return found


def with_provenance(profile: TableProfile, dtype: str) -> TableProfile:
    of_here = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "model": f"Llama with random weights, {MODEL}",
        "dtype": dtype,
    }
    return replace(profile, device=of_here["device"], provenance={**of_here, **profile.provenance})


def simulate_runs(found: Measured, trace: Trace, done: Done) -> None:
    """Each as slow as the machine was, `NUM_SIMULATIONS` times."""
    of_passes = slowness(found.passes)
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(found.runs):
            path = Path(folder, f"{number}.json")
            save_profile(found.profile(run.slowness(of_passes)), path)
            cell = settings(run.arm, found.qps, profile=path)
            for seed in range(number * NUM_SIMULATIONS, (number + 1) * NUM_SIMULATIONS):
                run.simulated.append(simulate.run_cell(cell, unsteady_seed=seed, trace=trace, keep_steps=True))
                done()


def row(arm: Arm, runs: Sequence[Run], of_passes: Sequence[float]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "arm": arm,
        "num_queries": NUM_QUERIES,
        "slowness": [run.slowness(of_passes) for run in runs],
        "busy_s, real": [run.real.busy_s for run in runs],
        "busy_s, simulated": [median(result.busy_s for result in run.simulated) for run in runs],
        "num_steps, real": [len(run.real.steps) for run in runs],
        "num_steps, simulated": [median(len(result.steps) for result in run.simulated) for run in runs],
    }
    for name, fraction in PERCENTILES.items():
        real = [of_run(run.real, fraction) for run in runs]
        simulated = [[of_run(result, fraction) for result in run.simulated] for run in runs]
        ratios = [median(expected) / seen for expected, seen in zip(simulated, real, strict=True)]
        made[name] = {
            "real_s": real,
            "simulated_s": simulated,
            "ratios": ratios,
            "ratio": median(ratios),
            "is_within_tolerance": abs(median(ratios) - 1) <= TOLERANCE,
        }
    return made


def of_run(result: CellResult, fraction: float) -> float:
    return percentile([request.ttft_after_retrieval_s for request in result.requests], fraction)


def show(rows: Sequence[dict[str, Any]], num_repetitions: int) -> None:
    table = Table(title=f"ttft_after_retrieval_s: {num_repetitions} runs on the real engine, and simulations of each")
    table.add_column("arm")
    for name in ("", "real, s", "least .. most", "simulated, s", "least .. most", "simulated/real", "of the runs"):
        table.add_column(name, justify="right")
    for found in rows:
        for name in PERCENTILES:
            of = found[name]
            mark = "" if of["is_within_tolerance"] else f", over {TOLERANCE:.0%} off"
            simulated_s = [median(of_run) for of_run in of["simulated_s"]]
            cells = [text for values in (of["real_s"], simulated_s) for text in (f"{median(values):.3f}", span(values))]
            ratio = f"{of['ratio']:.2f}{mark}"
            table.add_row(found["arm"] if name == "p50" else "", name.upper(), *cells, ratio, span(of["ratios"]))
    console.print(table)


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} .. {max(values):.2f}"


def write(path: Path, found: Measured, rows: list[dict[str, Any]]) -> None:
    made = {
        "command": "make -C bench validity",
        "machine": {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()},
        "model": MODEL,
        "qps": found.qps,
        "tolerance": TOLERANCE,
        "slowness of each pass": slowness(found.passes),
        "results": rows,
        "profile": asdict(found.profile()),
    }
    write_atomic(path, json.dumps(made, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of each arm on the real engine (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the hardware profile there")
    arguments = parser.parse_args()
    trace, num_runs = load(), len(ARMS) * arguments.repetitions
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        real = progress.add_task("real engine", total=num_runs)
        simulated = progress.add_task("simulation", total=num_runs * NUM_SIMULATIONS)
        model = make_tiny_llama(Path(folder, "model"), **MODEL)
        found = asyncio.run(run_real(model, trace, arguments.repetitions, lambda: progress.advance(real)))
        simulate_runs(found, trace, lambda: progress.advance(simulated))
    of_passes = slowness(found.passes)
    rows = [row(arm, [run for run in found.runs if run.arm == arm], of_passes) for arm in ARMS]
    show(rows, arguments.repetitions)
    if arguments.profile:
        save_profile(found.profile(), arguments.profile)
    if arguments.json:
        write(arguments.json, found, rows)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
