"""Streaming beside not streaming on the real engine, and what the simulator predicts from what is measured beside them.

    python -m studies.gpu.loads --device cuda|cpu [--engine-args JSON] --json FILE
    python -m studies.gpu.loads --predict --json FILE

Crawls and searches are generated with the paper's statistics; gaps between chunks are a quarter of the paper's, so that
a run takes seconds. One user asks when the last answer is there; many keep an engine that does not stream busy for 60 %
of the time, by its measured profile. Both arms run on one engine with our scheduler and its defaults. FILE is written
after each run, and the same command goes on there. Copies are measured at the end, once the engine has stopped. The
prediction needs no device.
"""

import argparse
import asyncio
import gc
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from streamrag.backends.vllm.facts import EngineFacts
from streamrag.engine.costs.profile_files import load_profile, save_profile
from streamrag.engine.costs.step_profiles import TableProfile, recompute_s
from streamrag.support.files import write_atomic
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench import simulate
from streamrag_bench.cell import Arm, CellResult, CellSettings
from streamrag_bench.profile.copies import measure_copies
from streamrag_bench.profile.step_times import measure_profile
from streamrag_bench.provenance import versions
from streamrag_bench.summary import spread
from streamrag_bench.wall import engine_for, play_cell
from streamrag_bench.workload import fit_contexts, load_trace, longest_prompt, make_load

from .engines import SIZES, Device, Sizes, measured_model, set_environment

ARMS: tuple[Arm, ...] = ("no-streaming", "streaming")
WORKLOADS = {"crawls": "crawler", "searches": "anns"}
ONE_USER, MANY = "one user", "60 % busy"
SHARE = 0.6
"""Of the time in which many users keep an engine busy that does not stream."""
DELAY = 0.25
BUDGET, NUM_SEQS = 2_048, 128
NUM_OUTPUT_TOKENS = 16
PAUSE_S = 0.5  # of one user, for the answer
FEWEST, MOST = 6, 200
"""Queries of many users."""


@dataclass
class Found:
    """The results in FILE so far."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Found":
        return cls(path, json.loads(path.read_text()) if path.exists() else {"cells": {}})

    def write(self) -> None:
        write_atomic(self.path, json.dumps(self.values, indent=1) + "\n")

    @property
    def profile(self) -> Path:
        """The file of the measured profile, beside FILE."""
        return self.path.with_suffix(".profile.json")

    def has(self, load: str, arm: Arm) -> bool:
        return arm in self.values["cells"].get(load, {})

    @property
    def is_done(self) -> bool:
        loads = self.values.get("loads", {})
        return bool(loads) and all(self.has(load, arm) for load in loads for arm in ARMS)


def cell(workload: str, arm: Arm, sizes: Sizes, **of: Any) -> CellSettings:
    """Return the settings of a cell; `of` has the model or the profile, and what else differs."""
    return CellSettings(
        "wall" if "model" in of else "virtual",
        WORKLOADS[workload],
        arm,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=NUM_SEQS,
        max_context_tokens=sizes.max_model_len // 2,
        **of,
    )


def trace_of(workload: str, sizes: Sizes, num_queries: int, qps: float | None) -> Trace:
    """Return the queries of a load at their times, Poisson or with `qps=None` one after another."""
    settings = cell(
        workload, ARMS[0], sizes, profile="h200-llama8b-tp2", delay=DELAY, qps=qps or 1.0, num_queries=num_queries
    )
    queries: Sequence[TracedQuery] = fit_contexts(settings, make_load(settings, load_trace(settings)), None).queries
    if qps is None:
        at_s, alone = 0.0, []
        for query in queries:
            alone.append(replace(query, arrival_s=at_s))
            at_s += query.end_s + PAUSE_S
        queries = alone
    return Trace(tuple(queries))


def busy_s(query: TracedQuery, profile: TableProfile) -> float:
    """Return the seconds that an engine computes for a query that is sent whole."""
    num_tokens = longest_prompt([query])
    # Decodes share their steps; a quarter of the time alone is a guess.
    return recompute_s(profile, 0, num_tokens, BUDGET) + NUM_OUTPUT_TOKENS * profile.step_s([(1, num_tokens)]) / 4


def plan_loads(sizes: Sizes, profile: TableProfile) -> dict[str, dict[str, Any]]:
    """Return what `trace_of` needs for each load."""
    loads: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        sample = trace_of(workload, sizes, MOST, 1.0).queries
        qps = SHARE / (sum(busy_s(query, profile) for query in sample) / len(sample))
        num_queries = min(max(round(qps * sizes.window_s), FEWEST), MOST)
        loads[f"{workload}, {ONE_USER}"] = {"workload": workload, "num_queries": sizes.num_alone, "qps": None}
        loads[f"{workload}, {MANY}"] = {"workload": workload, "num_queries": num_queries, "qps": qps}
    return loads


async def run_engine(model: Path, args: dict[str, Any], sizes: Sizes, found: Found) -> EngineFacts:
    """Play the missing cells on one engine."""
    base = {"model": str(model), "eviction": "cost"}
    longest = cell("crawls", "streaming", sizes, **base)
    sample = [query for workload in WORKLOADS for query in trace_of(workload, sizes, MOST, 1.0).queries]
    async with engine_for(longest, sample, engine_args=args) as client:
        profile = await measure_profile(client, model.name, BUDGET, sizes.max_model_len // 2, 16)
        facts = client.facts
        if "loads" not in found.values:
            save_profile(replace(profile, device=facts.device, num_layers=facts.num_layers), found.profile)
            found.values |= {"device": facts.device, "model_runner": facts.model_runner, "is_async": client.is_async}
            found.values |= {"engine_args": args, "loads": plan_loads(sizes, profile), "versions": versions()}
            found.write()
        for (load, of), arm in product(found.values["loads"].items(), ARMS):
            if found.has(load, arm):
                continue
            await client.reset_prefix_cache()
            settings, queries = cell(of["workload"], arm, sizes, **base), trace_of(sizes=sizes, **of).queries
            result = await play_cell(settings, queries, client, profile, keep_steps=True)
            found.values["cells"].setdefault(load, {})[arm] = {"measured": told(result)}
            found.write()
            print(load, arm, found.values["cells"][load][arm]["measured"]["ttft_after_retrieval_s"], flush=True)
    return facts


def add_copies(found: Found, facts: EngineFacts) -> None:
    """Add the times of copies to the profile."""
    profile = load_profile(str(found.profile))
    assert isinstance(profile, TableProfile)
    save_profile(replace(profile, copies=measure_copies(facts).costs()), found.profile)
    print("copies measured", flush=True)


def told(result: CellResult) -> dict[str, Any]:
    return {
        "num_queries": len(result.requests),
        "num_unfinished": result.num_unfinished,
        "ttft_after_retrieval_s": spread([r.ttft_after_retrieval_s for r in result.requests]),
        "ttft_s": spread([r.ttft_s for r in result.requests]),
        "floor_s": spread([r.floor_s for r in result.requests]),
        "busy_s": result.busy_s,
        "completion_s": result.completion_s,
        "num_steps": len(result.steps),
    }


def predict(found: Found, sizes: Sizes) -> None:
    """Simulate each measured cell with the measured profile; not streaming, under vLLM's own scheduler."""
    has_copies = load_profile(str(found.profile)).copies is not None
    for load, arms in found.values["cells"].items():
        of = found.values["loads"][load]
        for arm, rows in arms.items():
            eviction = "cost" if has_copies and arm == "streaming" else "recompute"
            settings = cell(of["workload"], arm, sizes, profile=str(found.profile), eviction=eviction)
            rows["predicted"] = told(simulate.run_cell(settings, trace=trace_of(sizes=sizes, **of), keep_steps=True))
            found.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="of vLLM")
    parser.add_argument("--predict", action="store_true", help="simulate what FILE has")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    set_environment()
    device: Device = arguments.device
    found, sizes = Found.read(arguments.json), SIZES[device]
    if arguments.predict and not found.values["cells"]:
        parser.error(f"{arguments.json} has no loads; run this without --predict first")
    if arguments.predict:
        predict(found, sizes)
    elif not found.is_done:
        with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
            args = {**sizes.engine_args, **arguments.engine_args}
            facts = asyncio.run(run_engine(measured_model(device, Path(folder)), args, sizes, found))
        gc.collect()  # vLLM's engine, which must be freed before the interpreter exits
        add_copies(found, facts)


if __name__ == "__main__":
    main()
