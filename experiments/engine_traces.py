"""The recorded traces on the real engine and in its simulation: five ways to serve them, and their order in both.

    python experiments/engine_traces.py [--json FILE]

    pass ─▶ load ─▶ pass ─▶ load ─▶ pass ...     a pass measures steps; each load is simulated with a profile of all
            not     │       warming              passes, as slow as the machine was in the two beside it
            streaming

Contexts are cut to 6,000 tokens, which two cores can do, and queries come at a rate that keeps the engine busy for half
of the time if nothing streams. Random weights: the answers mean nothing, the work is real. `ttft_after_retrieval_s` is
the median over turns of each turn's percentile. A pair of ways is told apart where one takes a tenth longer.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import validity
from paper.ways import PAPER_OPTIONS
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from validity import BUDGET, MODEL, NUM_OUTPUT_TOKENS, NUM_SEQS, PERCENTILES, Done, of_run, play_in_turns, simulate_runs

from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedQuery
from streamrag_bench.cell import Arm, CellSettings
from streamrag_bench.workload import NUM_TAIL_TOKENS, fit_contexts, make_load

TRACES = ("crawl-python-docs", "search-python-docs")
FOLDER = Path(__file__).parent.parent / "traces"
MAX_CONTEXT_TOKENS = 6_000
UTILISATION = 0.5
NUM_SIMULATIONS = 3
"""Of each run: the machine is slow for a moment now and then, in each of them at other times."""
TIE = 1.1
"""Ways whose times differ by less are not told apart."""

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Way(NamedTuple):
    """How the load is served."""

    name: str
    arm: Arm
    policy: str = SchedulerOptions().policy
    options: Mapping[str, Any] = {}


STOCK = (
    Way("not streaming", "no-streaming"),
    Way("warming", "warming"),
    Way("vLLM's own sessions", "stock-sessions"),
)
OURS = (Way("the paper's FCFS", "streaming", "fcfs", PAPER_OPTIONS), Way("streamrag", "streaming"))


@dataclass
class Measured(validity.Measured[Way]):
    """One trace on the real engine."""

    path: Path = field(kw_only=True)

    def cell(self, way: Way, **where: Any) -> CellSettings:
        """In wall time with a model, in virtual time with a profile."""
        return CellSettings(
            "wall" if "model" in where else "virtual",
            str(self.path),
            way.arm,
            policy=way.policy,
            qps=self.qps or 1.0,
            num_output_tokens=NUM_OUTPUT_TOKENS,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=NUM_SEQS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            scheduler_options=dict(way.options),
            **where,
        )

    def simulated_cell(self, way: Way, profile: Path) -> CellSettings:
        """In virtual time."""
        return self.cell(way, profile=str(profile))


def groups_of(trace: Trace) -> list[tuple[Way, ...]]:
    """The ways that share an engine. vLLM's own sessions can only append."""
    only_appends = all(isinstance(event, TracedAppend) for query in trace.queries for event in query.events)
    return [tuple(way for way in STOCK if only_appends or way.arm != "stock-sessions"), *((way,) for way in OURS)]


def rate(queries: Sequence[TracedQuery], profile: TableProfile) -> float:
    """Queries a second that keep the engine busy for `UTILISATION` of the time if nothing streams."""
    busy_s = 0.0
    for query in queries:
        chunks = [chunk for event in query.events for chunk in _chunks(event)]
        last = query.events[-1]
        num_tokens = sum(c.num_tokens for c in (chunks if isinstance(last, TracedAppend) else last.chunks))
        num_tokens += NUM_TAIL_TOKENS
        for start in range(0, num_tokens, BUDGET):
            busy_s += profile.step_s([(min(BUDGET, num_tokens - start), start)])
        busy_s += (NUM_OUTPUT_TOKENS - 1) * profile.step_s([(1, num_tokens)])
    return UTILISATION * len(queries) / busy_s


def _chunks(event: Any) -> Sequence[Any]:
    return (event.chunk,) if isinstance(event, TracedAppend) else event.chunks


async def run_real(model: Path, path: Path, num_repetitions: int, done: Done) -> Measured:
    """Each way on the engine that it needs."""
    trace, found = read_trace(path), Measured(path=path)
    for ways in groups_of(trace):
        await play_in_turns(
            found,
            ways,
            num_repetitions,
            lambda way: found.cell(way, model=str(model)),
            lambda cell: fit_contexts(cell, make_load(cell, trace), None).queries,
            rate,
            done,
        )
    return found


def rows_of(found: Measured) -> Iterator[dict[str, Any]]:
    """One a way."""
    for name in dict.fromkeys(run.way.name for run in found.runs):
        runs = [run for run in found.runs if run.way.name == name]
        row: dict[str, Any] = {"trace": found.path.name.partition(".")[0], "way": name, "num_turns": len(runs)}
        row["num_unfinished"] = sum(result.num_unfinished for run in runs for result in (run.real, *run.simulated))
        for rank, fraction in PERCENTILES.items():
            row[f"{rank}_real"] = median(of_run(run.real, fraction) for run in runs)
            row[f"{rank}_simulated"] = median(of_run(each, fraction) for run in runs for each in run.simulated)
        row["busy_real"] = median(run.real.busy_s for run in runs)
        row["busy_simulated"] = median(each.busy_s for run in runs for each in run.simulated)
        yield row


def orders(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whether pairs of ways have the same order in both."""
    for trace in dict.fromkeys(row["trace"] for row in rows):
        for rank in PERCENTILES:
            pairs = list(combinations([row for row in rows if row["trace"] == trace], 2))
            told = [_told(one, other, rank) for one, other in pairs]
            clear = [each for each in told if each is not None]
            wrong = [f"{a['way']} and {b['way']}" for (a, b), each in zip(pairs, told, strict=True) if each is False]
            yield (
                f"{trace}, {rank.upper()}: {sum(clear)} of {len(clear)} pairs that are told apart in both have the "
                f"same order, {len(pairs) - len(clear)} are not told apart"
                + (f"; not: {', '.join(wrong)}" if wrong else "")
            )


def _told(one: Mapping[str, Any], other: Mapping[str, Any], rank: str) -> bool | None:
    """Whether the order is the same; None where it is not clear in one of both."""
    real, simulated = (one[f"{rank}_{where}"] / other[f"{rank}_{where}"] for where in ("real", "simulated"))
    if any(1 / TIE < ratio < TIE for ratio in (real, simulated)):
        return None
    return bool((real > 1) == (simulated > 1))


def show(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float]) -> None:
    for trace in dict.fromkeys(row["trace"] for row in rows):
        table = Table(
            title=f"{trace}, {rates[trace]:.2f} queries a second: seconds, real / simulated", title_justify="left"
        )
        table.add_column("")
        for name in ("P50", "P95", "busy"):
            table.add_column(name, justify="right")
        for row in (row for row in rows if row["trace"] == trace):
            pairs = ((row[f"{name}_real"], row[f"{name}_simulated"]) for name in (*PERCENTILES, "busy"))
            late = f" ({row['num_unfinished']} not answered)" if row["num_unfinished"] else ""
            table.add_row(row["way"] + late, *(f"{real:.3f} / {simulated:.3f}" for real, simulated in pairs))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each way (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    paths = [FOLDER / f"{name}.jsonl.gz" for name in TRACES]
    num_runs = arguments.repetitions * sum(len(ways) for path in paths for ways in groups_of(read_trace(path)))
    rows: list[dict[str, Any]] = []
    rates = {}
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        real = progress.add_task("real engine", total=num_runs)
        simulated = progress.add_task("simulation", total=num_runs * NUM_SIMULATIONS)
        longest = MAX_CONTEXT_TOKENS + NUM_TAIL_TOKENS + NUM_OUTPUT_TOKENS + 1
        model = make_tiny_llama(Path(folder, "model"), **{**MODEL, "max_model_len": longest})
        for path in paths:
            found = asyncio.run(run_real(model, path, arguments.repetitions, lambda: progress.advance(real)))
            simulate_runs(found, NUM_SIMULATIONS, found.simulated_cell, lambda: progress.advance(simulated))
            rows += rows_of(found)
            rates[path.name.partition(".")[0]] = found.qps or 0.0
    show(rows, rates)
    verdicts = list(orders(rows))
    for line in verdicts:
        console.print(line)
    if arguments.json:
        machine = {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()}
        made = {"command": "make bench-engine", "machine": machine, "model": MODEL, "queries a second": rates}
        write_atomic(arguments.json, json.dumps({**made, "results": rows, "verdicts": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
