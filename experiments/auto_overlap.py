"""What `overlap="auto"` costs and gains on the real engine, against the better of always and never.

    python experiments/auto_overlap.py [--folder FOLDER] [--rounds N] [--json FILE]

Each load is learnt with `LEARNING` queries. Then each question is asked three times in random order: with overlap,
without it, and as learnt, each time on an empty prefix cache. The excess is how much longer the learnt way takes than
the better one of the others, at a percentile. The cost of learning is how much longer the first queries took, in the
mean, than the better way's median. The loads are those of one_user.py, and the demo's crawl and search as `make demo`
recorded them.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from one_user import LOADS, Script, ScriptedSource, passages
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Pipeline, ReplaySource, SamplingParams, Source, VllmBackend
from streamrag.bench.provenance import versions
from streamrag.demo.demo_folder import MAX_CONTEXT_TOKENS, MAX_MODEL_LEN, prepare_demo
from streamrag.support.files import write_atomic
from streamrag.trace import read_trace

LEARNING = 20
MAX_TOKENS = 4
SHARES = {"P50": 0.5, "P95": 0.95}

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Overlap: TypeAlias = bool | Literal["auto"]
WAYS: tuple[Overlap, ...] = (True, False, "auto")


@dataclass(frozen=True)
class Load:
    """A source, and questions that it knows."""

    name: str
    source: Source
    questions: Sequence[str]


@dataclass
class Result:
    """Seconds from the question to the first and the last token, by way and round; and while learning."""

    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {str(way): [] for way in WAYS})
    total_s: dict[str, list[float]] = field(default_factory=lambda: {str(way): [] for way in WAYS})
    learning_s: list[float] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)
    reason: str = ""


def scripted_loads(num_questions: int) -> list[Load]:
    """Return the loads of one_user.py."""
    rng, chunks, loads = random.Random(0), passages(), []
    for name, make_script in LOADS.items():
        scripts: dict[str, Script] = {
            f"What is {name}? ({number})": make_script(chunks, rng) for number in range(num_questions)
        }
        loads.append(Load(name, ScriptedSource(scripts), [*scripts]))
    return loads


def recorded_loads(folder: Path) -> list[Load]:
    """Return the retrieval that the demo recorded there, if any."""
    traces = {f"demo, {name}": folder / f"{name}.jsonl" for name in ("crawl", "search")}
    return [
        Load(name, ReplaySource(path), [query.text for query in read_trace(path).queries])
        for name, path in traces.items()
        if path.exists()
    ]


async def measure(load: Load, backend: VllmBackend, num_rounds: int) -> Result:
    """Learn a load, and ask each question in all ways."""
    result, rng, questions = Result(), random.Random(1), itertools.cycle(load.questions)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    async with Pipeline(load.source, backend, owns_backend=False) as pipeline:

        async def ask(question: str, overlap: Overlap) -> tuple[float, float]:
            await backend.reset_prefix_cache()
            stream = pipeline.stream(question, params=params, overlap=overlap, max_context_tokens=MAX_CONTEXT_TOKENS)
            async with stream:
                async for _ in stream:
                    pass
            answer = stream.result
            assert answer.overlap is not None
            if overlap == "auto":
                result.reason = answer.overlap.reason
                result.chosen[answer.overlap.way] += len(result.learning_s) == LEARNING
            return answer.timings.ttft_s, answer.timings.total_s

        await ask(load.questions[0], True)
        for _ in track(range(LEARNING), f"learning {load.name}", console=console, transient=True):
            result.learning_s.append((await ask(next(questions), "auto"))[0])
        for _ in track(range(num_rounds), f"asking {load.name}", console=console, transient=True):
            question = next(questions)
            for way in rng.sample(WAYS, len(WAYS)):
                ttft_s, total_s = await ask(question, way)
                result.ttft_s[str(way)].append(ttft_s)
                result.total_s[str(way)].append(total_s)
    return result


def summarize(result: Result) -> dict[str, object]:
    """Return the percentiles by way, the excess of the learnt way, and the cost of learning."""
    found: dict[str, object] = {"chosen": dict(result.chosen), "reason": result.reason}
    for name, seconds in (("ttft_s", result.ttft_s), ("total_s", result.total_s)):
        for label, share in SHARES.items():
            at = {way: float(np.quantile(values, share)) for way, values in seconds.items()}
            found[f"{name} {label}"] = at
            found[f"{name} {label} excess"] = at["auto"] / min(at["True"], at["False"]) - 1
    better_s = min(statistics.median(result.ttft_s[way]) for way in ("True", "False"))
    found["learning_cost_s"] = sum(result.learning_s) - LEARNING * better_s
    found["learning_cost"] = statistics.mean(result.learning_s) / better_s - 1
    return found


def show(results: dict[str, dict[str, object]]) -> None:
    """Print a table of what was measured."""
    table = Table("seconds to the first token", "overlap", "none", "auto", "excess", "chosen", "learning cost")
    for load, row in results.items():
        for label in SHARES:
            at = row[f"ttft_s {label}"]
            assert isinstance(at, dict)
            cells = [f"{at[str(way)]:.2f}" for way in WAYS]
            chosen = ", ".join(f"{num} {way}" for way, num in row["chosen"].items())  # type: ignore[attr-defined]
            cost = f"{row['learning_cost']:+.1%}" if label == "P50" else ""
            table.add_row(f"{load}, {label}", *cells, f"{row[f'ttft_s {label} excess']:+.1%}", chosen, cost)
    console.print(table)


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    backend = VllmBackend(arguments.folder / "model", max_model_len=MAX_MODEL_LEN, dtype="float32")
    loads = [*scripted_loads(LEARNING + arguments.rounds), *recorded_loads(arguments.folder)]
    results = {}
    await backend.start(lambda line: None)
    try:
        for load in loads:
            results[load.name] = summarize(await measure(load, backend, arguments.rounds))
            console.print(f"{load.name}: {results[load.name]['reason']}")
    finally:
        await backend.aclose()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="the demo's files; made if missing")
    parser.add_argument("--rounds", type=int, default=20, help="of each load, after learning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder, model="smollm2", on_step=lambda step, num_done, num_total: None)
    results = asyncio.run(run(arguments))
    show(results)
    if arguments.json:
        made = {"date": date.today().isoformat(), "versions": versions(), "results": results}
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
