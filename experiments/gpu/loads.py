"""The four arms at three loads on the real engine, and what the simulator predicts from steps measured beside them.

    python -m experiments.gpu.loads --device cuda|cpu [--engine-args JSON] --json FILE
    python -m experiments.gpu.loads --predict --json FILE

Crawls are generated with the paper's statistics; gaps between chunks are a quarter of the paper's, so that a run takes
seconds. Queries arrive at the rates that keep the engine busy for 0.33, 0.6 and 0.85 of the time, by its measured
profile. Arms that run vLLM's own scheduler share an engine. Each engine also decodes a batch, which shows what our
scheduler adds to a step. FILE is written after each run, and the same command goes on there. The prediction needs no
device.
"""

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from streamrag.backends.measured.engine import EngineClient
from streamrag.bench import simulate
from streamrag.bench.cell import Arm, CellResult, CellSettings
from streamrag.bench.profile.step_times import FreshTokens, answer, measure_profile
from streamrag.bench.provenance import versions
from streamrag.bench.summary import spread
from streamrag.bench.wall import engine_for, play_cell
from streamrag.bench.workload import NUM_TAIL_TOKENS, fit_contexts, load_trace, make_load
from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.support.files import write_atomic
from streamrag.trace.values import TracedAppend, TracedQuery

from .engines import SIZES, Device, Sizes, measured_model, set_environment

LOADS = {"light": 0.33, "medium": 0.6, "heavy": 0.85}
"""The share of the time in which the engine should compute, by its profile."""
DELAY = 0.25
BUDGET, NUM_SEQS = 2_048, 128
NUM_OUTPUT_TOKENS = 16
FEWEST, MOST = 6, 200
"""Queries of a load."""
DECODE_TOKENS = 128
ENGINES: tuple[tuple[Arm, ...], ...] = (("no-streaming", "warming", "stock-sessions"), ("streaming",))


@dataclass
class Found:
    """The results in FILE so far."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Found":
        return cls(path, json.loads(path.read_text()) if path.exists() else {"cells": {}, "decode": {}})

    def write(self) -> None:
        write_atomic(self.path, json.dumps(self.values, indent=1) + "\n")

    @property
    def profile(self) -> Path:
        """The file of the measured profile, beside FILE."""
        return self.path.with_suffix(".profile.json")

    def has(self, load: str, arm: Arm) -> bool:
        return arm in self.values["cells"].get(load, {})


def cell(arm: Arm, sizes: Sizes, **of: Any) -> CellSettings:
    """Return the settings of a cell; `of` has the model or the profile, and the load's rate and queries."""
    return CellSettings(
        "wall" if "model" in of else "virtual",
        "crawler",
        arm,
        delay=DELAY,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=NUM_SEQS,
        max_context_tokens=sizes.max_model_len // 2,
        **of,
    )


def queries_of(settings: CellSettings) -> Sequence[TracedQuery]:
    return fit_contexts(settings, make_load(settings, load_trace(settings)), None).queries


def busy_s(queries: Sequence[TracedQuery], profile: TableProfile) -> float:
    """Return the seconds that the engine computes for the queries, if their chunks come one by one."""
    return sum(sum(_steps_s(query, profile)) for query in queries)


def _steps_s(query: TracedQuery, profile: TableProfile) -> Iterator[float]:
    num_before = 0
    for event in query.events:
        assert isinstance(event, TracedAppend)
        for begin in range(0, event.chunk.num_tokens, BUDGET):
            num_new = min(BUDGET, event.chunk.num_tokens - begin)
            yield profile.step_s([(num_new, num_before)])
            num_before += num_new
    yield profile.step_s([(NUM_TAIL_TOKENS, num_before)])
    # Decodes share their steps; a quarter of the time alone is a guess.
    yield NUM_OUTPUT_TOKENS * profile.step_s([(1, num_before)]) / 4


def rates(sizes: Sizes, profile: TableProfile) -> dict[str, dict[str, Any]]:
    """Return the rate and the number of queries of each load."""
    sample = queries_of(cell("no-streaming", sizes, profile="h200-llama8b-tp2", qps=1.0, num_queries=MOST))
    query_s = busy_s(sample, profile) / len(sample)
    made = {}
    for name, share in LOADS.items():
        qps = share / query_s
        made[name] = {"qps": qps, "num_queries": min(max(round(qps * sizes.window_s), FEWEST), MOST)}
    return made


async def decode(client: EngineClient, num_requests: int) -> dict[str, float]:
    """Let a batch decode; return the median time from step to step, and the model's share of it, in seconds."""
    tokens, num_before = FreshTokens("decode"), len(client.steps)
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_requests):
            tasks.create_task(answer(client, f"decode {number}", tokens.take(64), DECODE_TOKENS))
    elapsed_s = time.perf_counter() - start_s
    await asyncio.sleep(0.1)
    steps = [s for s in client.steps[num_before:] if s.num_requests == s.num_tokens == num_requests]
    between_s = [after.end_s - before.end_s for before, after in pairwise(steps)]
    return {
        "num_requests": num_requests,
        "num_steps": len(steps),
        "step_to_step_s": median(between_s),
        "engine_step_s": median(step.elapsed_s for step in steps),
        "tokens_per_s": num_requests * DECODE_TOKENS / elapsed_s,
    }


async def run_engine(arms: Sequence[Arm], model: Path, args: dict[str, Any], sizes: Sizes, found: Found) -> None:
    """Play the missing cells of these arms on one engine."""
    base = {"model": str(model), "scheduler_options": {}}
    longest = cell(arms[0], sizes, **base, qps=1.0, num_queries=MOST)
    async with engine_for(longest, queries_of(longest), engine_args=args) as client:
        profile = await measure_profile(client, model.name, BUDGET, sizes.max_model_len // 2, 16)
        if "loads" not in found.values:
            save_profile(
                replace(profile, device=client.facts.device, num_layers=client.facts.num_layers), found.profile
            )
            found.values |= {"device": client.facts.device, "is_async": client.is_async, "engine_args": args}
            found.values |= {"loads": rates(sizes, profile), "versions": versions()}
        found.values["decode"][arms[-1]] = [await decode(client, sizes.num_decodes) for _ in range(3)]
        found.write()
        for load, of in found.values["loads"].items():
            for arm in (arm for arm in arms if not found.has(load, arm)):
                settings = cell(arm, sizes, **base, **of)
                await client.reset_prefix_cache()
                result = await play_cell(settings, queries_of(settings), client, profile, keep_steps=True)
                found.values["cells"].setdefault(load, {})[arm] = {"measured": told(result)}
                found.write()
                print(load, arm, found.values["cells"][load][arm]["measured"]["ttft_after_retrieval_s"], flush=True)


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
    """Simulate each measured cell, with the profile that was measured on the first engine."""
    for load, arms in found.values["cells"].items():
        for arm, rows in arms.items():
            settings = cell(arm, sizes, profile=str(found.profile), **found.values["loads"][load])
            rows["predicted"] = told(simulate.run_cell(settings, keep_steps=True))
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
        return
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        model = measured_model(device, Path(folder))
        args = {**sizes.engine_args, **arguments.engine_args}
        for arms in ENGINES:
            if not all(found.has(load, arm) for load in LOADS for arm in arms):
                asyncio.run(run_engine(arms, model, args, sizes, found))
                gc.collect()  # vLLM's engine, which must be freed before the next one and before the interpreter exits


if __name__ == "__main__":
    main()
