"""What `overlap="auto"` costs and gains on the real engine, against the better of always and never.

    python -m studies.demo.auto_overlap [--folder FOLDER] [--rounds N] [--json FILE]

Each load is learnt with some questions. Then each question is asked three times in random order: with overlap, without
it, and as learnt, each time on an empty prefix cache. The excess is how much longer the learnt way takes than the
better one of the others, at a percentile. Times of the same way differ too, so there is a second excess, by choice:
each learnt time is replaced by that of the chosen way for the same question. It contains what wrong choices cost, and
no noise where all choices were the same. The cost of learning is how much longer the first queries took, in the mean,
than the better way's median.

The loads are those of one_user.py, one of eight questions at once, and the demo's crawl and search as `make demo`
recorded them, if it did.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Append, Chunk, Pipeline, ReplaySource, SamplingParams, Source, VllmBackend
from streamrag.demo.demo_folder import MAX_CONTEXT_TOKENS, MAX_MODEL_LEN, prepare_demo
from streamrag.trace import read_trace
from studies.demo.one_user import LOADS, Script, ScriptedSource, passages
from studies.folders import DEMO
from studies.results_file import write_results

MAX_TOKENS = 4
NUM_TOGETHER, NUM_CHUNKS, MEAN_GAP_S = 8, 6, 0.5
ARM_OF = {"immediate": "True", "none": "False"}
SHARES = {"P50": 0.5, "P95": 0.95}

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Overlap: TypeAlias = bool | Literal["auto"]
WAYS: tuple[Overlap, ...] = (True, False, "auto")


@dataclass(frozen=True)
class Load:
    """A source, questions that it knows, and how often they are asked: `num_together` at once."""

    name: str
    source: Source
    questions: Sequence[str]
    num_learning: int
    num_rounds: int
    num_together: int = 1


@dataclass
class Result:
    """Seconds from the question to the first and the last token, by way and round; and while learning."""

    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {str(way): [] for way in WAYS})
    total_s: dict[str, list[float]] = field(default_factory=lambda: {str(way): [] for way in WAYS})
    learning_s: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)  # after learning
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """One question that was answered."""

    ttft_s: float
    total_s: float
    way: str
    reason: str


def scripted_loads(num_learning: int, num_rounds: int) -> list[Load]:
    """Return the loads of one_user.py."""
    rng, chunks, loads = random.Random(0), passages(), []
    for name, make_script in LOADS.items():
        scripts: dict[str, Script] = {
            f"What is {name}? ({number})": make_script(chunks, rng) for number in range(num_learning + num_rounds)
        }
        loads.append(Load(name, ScriptedSource(scripts), [*scripts], num_learning, num_rounds))
    return loads


def load_together(num_learning: int, num_rounds: int) -> Load:
    """Return questions that are asked together, whose contexts grow by a chunk now and then."""
    rng, chunks = random.Random(2), passages()

    def make_script() -> Script:
        return [(rng.expovariate(1 / MEAN_GAP_S), Append(_part(chunk))) for chunk in rng.sample(chunks, NUM_CHUNKS)]

    name = f"{NUM_TOGETHER} at once, {NUM_CHUNKS} chunks each"
    num_questions = (num_learning + num_rounds) * NUM_TOGETHER
    scripts = {f"What is asked together? ({number})": make_script() for number in range(num_questions)}
    return Load(name, ScriptedSource(scripts), [*scripts], num_learning, num_rounds, NUM_TOGETHER)


def _part(chunk: Chunk) -> Chunk:
    return Chunk(" ".join(chunk.text.split()[:45]), chunk.uri, passage=chunk.passage)


def recorded_loads(folder: Path, num_learning: int, num_rounds: int) -> list[Load]:
    """Return the retrieval that the demo recorded there, if any."""
    traces = {f"demo, {name}": folder / f"{name}.jsonl" for name in ("crawl", "search")}
    return [
        Load(name, ReplaySource(path), [query.text for query in read_trace(path).queries], num_learning, num_rounds)
        for name, path in traces.items()
        if path.exists()
    ]


async def measure(load: Load, backend: VllmBackend) -> Result:
    """Learn a load, and ask each question in all ways."""
    result, rng, questions = Result(), random.Random(1), itertools.cycle(load.questions)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    async with Pipeline(load.source, backend, owns_backend=False) as pipeline:

        async def ask(question: str, overlap: Overlap) -> Asked:
            stream = pipeline.stream(question, params=params, overlap=overlap, max_context_tokens=MAX_CONTEXT_TOKENS)
            async with stream:
                async for _ in stream:
                    pass
            answer = stream.result
            assert answer.overlap is not None
            return Asked(answer.timings.ttft_s, answer.timings.total_s, answer.overlap.way, answer.overlap.reason)

        async def ask_together(questions: Sequence[str], overlap: Overlap) -> list[Asked]:
            await backend.reset_prefix_cache()
            return await asyncio.gather(*(ask(question, overlap) for question in questions))

        await ask_together(load.questions[:1], True)
        for _ in track(range(load.num_learning), f"learning {load.name}", console=console, transient=True):
            asked = await ask_together([next(questions) for _ in range(load.num_together)], "auto")
            result.learning_s += [each.ttft_s for each in asked]
        for _ in track(range(load.num_rounds), f"asking {load.name}", console=console, transient=True):
            together = [next(questions) for _ in range(load.num_together)]
            for way in rng.sample(WAYS, len(WAYS)):
                asked = await ask_together(together, way)
                result.ttft_s[str(way)] += [each.ttft_s for each in asked]
                result.total_s[str(way)] += [each.total_s for each in asked]
                if way == "auto":
                    result.chosen += [each.way for each in asked]
                    result.reason = asked[-1].reason
    return result


def summarize(result: Result) -> dict[str, object]:
    """Return the percentiles by way, the excesses of the learnt way, and the cost of learning."""
    found: dict[str, object] = {"chosen": Counter(result.chosen), "reason": result.reason}
    for name, seconds in (("ttft_s", result.ttft_s), ("total_s", result.total_s)):
        by_choice = [
            seconds[ARM_OF.get(way, "auto")][number]  # a delay has no arm of its own
            for number, way in enumerate(result.chosen)
        ]
        for label, share in SHARES.items():
            at = {way: float(np.quantile(values, share)) for way, values in seconds.items()}
            better_s = min(at["True"], at["False"])
            found[f"{name} {label}"] = at
            found[f"{name} {label} excess"] = at["auto"] / better_s - 1
            found[f"{name} {label} excess by choice"] = float(np.quantile(by_choice, share)) / better_s - 1
    better_s = min(statistics.median(result.ttft_s[way]) for way in ("True", "False"))
    found["learning_cost_s"] = sum(result.learning_s) - len(result.learning_s) * better_s
    found["learning_cost"] = statistics.mean(result.learning_s) / better_s - 1
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table of what was measured."""
    headers = ("overlap", "none", "auto", "excess", "by choice", "last token", "by choice", "chosen", "learning cost")
    table = Table("seconds to the first token", *headers)
    for load, row in results.items():
        for label in SHARES:
            cells = [f"{row[f'ttft_s {label}'][str(way)]:.2f}" for way in WAYS]
            for name in ("ttft_s", "total_s"):
                cells += [f"{row[f'{name} {label} {excess}']:+.1%}" for excess in ("excess", "excess by choice")]
            chosen = ", ".join(f"{num} {way}" for way, num in row["chosen"].items())
            cost = f"{row['learning_cost']:+.1%}" if label == "P50" else ""
            table.add_row(f"{load}, {label}", *cells, chosen, cost)
    console.print(table)


async def run(folder: Path, loads: Sequence[Load]) -> dict[str, dict[str, Any]]:
    """Measure each load on one engine."""
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"})
    results = {}
    await backend.start(lambda line: None)
    try:
        for load in loads:
            results[load.name] = summarize(await measure(load, backend))
            console.print(f"{load.name}: {results[load.name]['reason']}")
    finally:
        await backend.aclose()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="the demo's files; made if missing")
    parser.add_argument("--learning", type=int, default=20, help="questions of each load before it counts as learnt")
    parser.add_argument("--rounds", type=int, default=20, help="questions of each load after that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments, load = parser.parse_args(), os.getloadavg()[0]
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder, model="smollm2", on_step=lambda step, num_done, num_total: None)
    counts = (arguments.learning, arguments.rounds)
    together = load_together(arguments.learning // 2, arguments.rounds // 3)
    loads = [*scripted_loads(*counts), *recorded_loads(arguments.folder, *counts), together]
    results = asyncio.run(run(arguments.folder, loads))
    show(results)
    if arguments.json:
        write_results(arguments.json, (), load=load, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
