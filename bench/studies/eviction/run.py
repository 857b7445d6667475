"""Recompute, swap, or what costs less, on the real engine under memory pressure; and did the costs come true?

    python -m studies.eviction.run [--json FILE] [--plot FILE]

Measures a hardware profile of this machine; then the ways of eviction take turns. In each turn each way plays the same
two loads at the same times, whose idle streams hold several times more KV than there is: contexts that grow (a crawler)
and contexts that are replaced (a search). The last way may copy little, so that it has to recompute much. Figures are
medians over turns. Expected costs are those by which the two ways that compare decided. Random weights: the answers
mean nothing, the work is real. About 17 minutes on two cores, on which nothing else should run.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.profile.machine import measure_machine
from streamrag_bench.profile.step_times import warm_up
from streamrag_bench.provenance import versions
from streamrag_bench.summary import PERCENTILES, digest, spread
from streamrag_bench.wall import engine_for, max_model_len, play_cell
from streamrag_bench.workload import longest_prompt, make_load
from studies.eviction.costs import Decision, decisions_of, draw, example, show_decisions, show_example, told
from studies.eviction.loads import busy_s, growing, replaced, token_seconds

NUM_OUTPUT_TOKENS = 4
BUDGET, NUM_SEQS = 1_024, 32
UTILISATION = 0.5
"""Share of the time in which the engine would compute, as the profile has it, if nothing were computed twice: queries
arrive at the rate that makes it so."""
SHARE_OF_KV = 0.3
"""KV memory, as a share of what the streams that live at one time hold."""
AMPLE_HOST, LITTLE_HOST = 4.0, 0.1
"""Host memory, in times of the KV memory."""
NUM_WARM_UP, WARM_UP_PACE = 12, 4.0
"""Queries before each turn, and how much faster they come: host memory that was never written is not really there."""
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 4_096,
}

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass(frozen=True, slots=True)
class Way:
    """How KV is given up."""

    name: str
    eviction: EvictionMode
    host_share: float
    """Host memory, in times of the KV memory."""


COST = Way("cost", "cost", AMPLE_HOST)
WAYS = (
    Way("recompute", "recompute", AMPLE_HOST),
    Way("swap", "swap", AMPLE_HOST),
    COST,
    Way("cost, little host memory", "cost", LITTLE_HOST),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played."""

    model: Path
    profile: TableProfile
    profile_path: Path
    traces: Mapping[str, Trace]
    num_turns: int

    def qps(self, load: str) -> float:
        queries = self.traces[load].queries
        return UTILISATION * len(queries) / sum(busy_s(query, NUM_OUTPUT_TOKENS, self.profile) for query in queries)

    def num_held(self, load: str) -> float:
        """Tokens of all streams that live at one time, on average."""
        queries = self.traces[load].queries
        return self.qps(load) * sum(map(token_seconds, queries)) / len(queries)

    @property
    def kv_tokens(self) -> int:
        size = self.profile.block_size
        longest = longest_prompt([query for trace in self.traces.values() for query in trace.queries])
        wanted = int(SHARE_OF_KV * min(map(self.num_held, self.traces)))
        return max(wanted, longest + NUM_OUTPUT_TOKENS) // size * size + 2 * size

    def settings(self, load: str, way: Way) -> CellSettings:
        assert self.profile.copies is not None
        num_blocks = self.kv_tokens // self.profile.block_size
        host = int(way.host_share * num_blocks) * self.profile.copies.block_bytes
        return CellSettings(
            "wall",
            load,
            "streaming",
            eviction=way.eviction,
            host_kv_bytes=None if way.eviction == "recompute" else host,
            qps=self.qps(load),
            kv_tokens=self.kv_tokens,
            num_output_tokens=NUM_OUTPUT_TOKENS,
            model=str(self.model),
            max_num_batched_tokens=BUDGET,
            max_num_seqs=NUM_SEQS,
            scheduler_options={"profile": str(self.profile_path)} if way.eviction == "cost" else {},
        )


def warming(plan: Plan, settings: CellSettings) -> tuple[CellSettings, tuple[TracedQuery, ...]]:
    """A few queries in quick succession, so that KV is copied."""
    assert settings.qps is not None
    cell = replace(settings, qps=WARM_UP_PACE * settings.qps, delay=1 / WARM_UP_PACE, num_queries=NUM_WARM_UP)
    return cell, make_load(cell, plan.traces[settings.workload])


Results = dict[tuple[str, Way], list[CellResult]]
"""The results of each load and way, one a turn."""


async def play(plan: Plan, done: Callable[[str], None]) -> Results:
    results: Results = {(load, way): [] for load in plan.traces for way in WAYS}
    every = [query for trace in plan.traces.values() for query in trace.queries]
    for turn in range(plan.num_turns):
        for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:  # none always follows the same one
            first = plan.settings(next(iter(plan.traces)), way)
            async with engine_for(first, every) as client:
                await warm_up(client, BUDGET, max_model_len(first, every))
                await play_cell(*warming(plan, first), client, plan.profile)
                for load, trace in plan.traces.items():
                    await client.reset_prefix_cache()
                    cell = plan.settings(load, way)
                    results[load, way].append(await play_cell(cell, make_load(cell, trace), client, plan.profile))
                    done(f"turn {turn + 1}: {way.name}")
            gc.collect()  # vLLM's engine, before the next one starts
    return results


def row(load: str, way: Way, results: Sequence[CellResult], kv_bytes_per_token: float) -> dict[str, Any]:
    """What one way did in all its turns."""
    digests = [digest(result) for result in results]
    spreads = [spread(d.ttft_after_retrieval_s) for d in digests]
    saved = [sum(p.num_tokens_saved for r in of.requests if r.record for p in r.record.preemptions) for of in results]
    return {
        "load": load,
        "way": way.name,
        "eviction": way.eviction,
        "host_kv_bytes": results[0].settings.host_kv_bytes,
        "num_queries": sum(len(result.requests) for result in results),
        "ttft_after_retrieval_s": {
            name: {"median": median(of[name] for of in spreads), "all": [of[name] for of in spreads]}
            for name in PERCENTILES
        },
        "num_preemptions": [dict(d.num_preemptions or {}) for d in digests],
        "recompute_tax": [d.recompute_tax for d in digests],
        "num_bytes_out": [int(num * kv_bytes_per_token) for num in saved],
        "num_bytes_in": [int(d.num_loaded * kv_bytes_per_token) for d in digests],
        "busy_s": [d.busy_s for d in digests],
        "busy_share": [d.busy_s / d.completion_s for d in digests],
    }


def show(rows: Sequence[dict[str, Any]], num_turns: int) -> None:
    table = Table(title=f"ttft_after_retrieval_s, medians of {num_turns} turns", title_justify="left")
    for name in ("load", "eviction"):
        table.add_column(name)
    for name in (*(p.upper() for p in PERCENTILES), "recompute", "swap", "tax", "MB out", "MB in", "busy s", "busy"):
        table.add_column(name, justify="right")
    for of, after in zip(rows, [*rows[1:], None], strict=True):
        seconds = (of["ttft_after_retrieval_s"][name] for name in PERCENTILES)
        table.add_row(
            of["load"],
            of["way"],
            *(f"{s['median']:.3f}\n{min(s['all']):.3f}..{max(s['all']):.3f}" for s in seconds),
            *(f"{median(num[fate] for num in of['num_preemptions']):.0f}" for fate in ("recompute", "swap")),
            f"{median(of['recompute_tax']):.1%}",
            *(f"{median(of[name]) / 1e6:.0f}" for name in ("num_bytes_out", "num_bytes_in")),
            f"{median(of['busy_s']):.1f}",
            f"{median(of['busy_share']):.0%}",
            end_section=after is None or after["load"] != of["load"],
        )
    console.print(table)


def made(plan: Plan, rows: Sequence[dict[str, Any]], decisions: Sequence[Decision], one: Any) -> dict[str, Any]:
    loads = {load: {"qps": plan.qps(load), "num_tokens_held": plan.num_held(load)} for load in plan.traces}
    return {
        "command": "make -C bench eviction",
        "machine": {"system": f"{platform.system()} {platform.machine()}", "num_cpus": os.cpu_count()},
        "versions": versions(),
        "model": MODEL,
        "kv_tokens": plan.kv_tokens,
        "loads": loads,
        "results": rows,
        "decisions": told(decisions),
        "example": one,
        "profile": asdict(replace(plan.profile, unsteadiness=())),
    }


def run(folder: Path, arguments: argparse.Namespace, bar: Progress) -> tuple[Plan, Results]:
    task = bar.add_task("", total=None)
    model = make_tiny_llama(folder / "model", **MODEL)
    traces = {"append": growing(arguments.queries), "update": replaced(arguments.queries)}
    limits = {"max_num_batched_tokens": BUDGET, "max_num_seqs": NUM_SEQS}
    profile = asyncio.run(
        measure_machine(str(model), limits, lambda what, num, of: bar.update(task, description=f"profile: {what}"))
    )
    path = folder / "profile.json"
    save_profile(profile, path)
    plan = Plan(model, profile, path, traces, arguments.repetitions)
    bar.update(task, description="turns", total=arguments.repetitions * len(WAYS) * len(traces), completed=0)
    return plan, asyncio.run(play(plan, lambda what: bar.update(task, description=what, advance=1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=40, help="of each load, per turn (default: 40)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each way (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw expected and observed costs there")
    arguments = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console, transient=True) as bar:
        plan, results = run(Path(folder), arguments, bar)
    assert plan.profile.copies is not None
    bytes_per_token = plan.profile.copies.block_bytes / plan.profile.block_size
    rows = [row(load, way, found, bytes_per_token) for (load, way), found in results.items()]
    show(rows, arguments.repetitions)
    records = {
        key: [r.record for result in found for r in result.requests if r.record] for key, found in results.items()
    }
    by_cost = [record for (_, way), found in records.items() if way.eviction == "cost" for record in found]
    decisions = decisions_of(by_cost)
    one = example(records["append", COST], plan.profile, BUDGET)
    show_decisions(decisions, console)
    show_example(one, console)
    if arguments.plot:
        draw(arguments.plot, decisions)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(made(plan, rows, decisions, one), indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
