"""A search and a model on the same processors: not streaming, every update, or what a pipeline learns.

    python -m studies.demo.live_search [--folder FOLDER] [--questions N] [--turns N] [--json FILE]

The search is that of `make demo`: keywords, vectors and late interaction over this documentation, two sentences of two
passages; the model is the demo's, in float32, on the real engine. Every question is asked in all three ways, on an
empty prefix cache, and who goes first alternates. The last way, `overlap="auto"`, has learnt from other questions,
which are not counted. Ratios are of the same question and turn, not streaming over streaming, and their median.
"""

import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import HybridSource, Pipeline, SamplingParams, VllmBackend
from streamrag.demo.demo_folder import (
    MAX_CONTEXT_TOKENS,
    MAX_MODEL_LEN,
    NUM_PASSAGES,
    NUM_SENTENCES,
    TEMPLATE,
)
from streamrag.telemetry import Answer
from studies.demo_options import demo_parser, parse_and_prepare, print_load
from studies.documentation_questions import QUESTIONS
from studies.results_file import write_results

Overlap: TypeAlias = bool | Literal["auto"]

MAX_TOKENS = 8
NUM_LEARNT = 20
"""Questions that a pipeline learns from."""
WAITING, ALWAYS, LEARNT = "not streaming", "every update", "as learnt"
ARMS: dict[str, Overlap] = {WAITING: False, ALWAYS: True, LEARNT: "auto"}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Row:
    """One question asked in one way."""

    question: str
    turn: int
    arm: str
    way: str
    """What was done."""
    retrieval_s: float
    ttft_after_retrieval_s: float
    ttft_s: float
    num_invalidated: int
    token_ids: tuple[int, ...]


async def ask(pipeline: Pipeline, question: str, overlap: Overlap) -> Answer:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    stream = pipeline.stream(question, params=params, overlap=overlap, max_context_tokens=MAX_CONTEXT_TOKENS)
    async with stream as chunks:
        async for _ in chunks:
            pass
    assert stream.result is not None
    return stream.result


async def measure(folder: Path, questions: Sequence[str], num_turns: int) -> list[Row]:
    search = HybridSource(folder / "index", k=NUM_PASSAGES, reranker="late-interaction", sentences=NUM_SENTENCES)
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"})
    rows = []
    async with Pipeline(search, backend, template=TEMPLATE) as pipeline:
        await pipeline.start()
        others = [question for question in QUESTIONS if question not in questions]
        for question in track(others[:NUM_LEARNT], "learning", console=console, transient=True):
            await backend.reset_prefix_cache()
            await ask(pipeline, question, "auto")
        asked = [(question, turn) for turn in range(num_turns) for question in questions]
        for number, (question, turn) in enumerate(track(asked, "asking", console=console, transient=True)):
            arms, first = [*ARMS], number % len(ARMS)
            for arm in (*arms[first:], *arms[:first]):
                await backend.reset_prefix_cache()
                answer = await ask(pipeline, question, ARMS[arm])
                assert answer.overlap is not None
                times = answer.timings
                rows.append(
                    Row(
                        question,
                        turn,
                        arm,
                        answer.overlap.way,
                        times.retrieval_s,
                        times.ttft_after_retrieval_s,
                        times.ttft_s,
                        answer.num_invalidated,
                        answer.token_ids,
                    )
                )
    return rows


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of each arm: medians, those of the ratios to not streaming, tokens invalidated, and answers that are the same."""
    waiting = {(row.question, row.turn): row for row in rows if row.arm == WAITING}
    found: dict[str, dict[str, float]] = {}
    for arm in ARMS:
        mine = [row for row in rows if row.arm == arm]
        pairs = [(waiting[row.question, row.turn], row) for row in mine]
        found[arm] = {
            "num_questions": len(mine),
            **{
                name: statistics.median(getattr(row, name) for row in mine)
                for name in ("retrieval_s", "ttft_after_retrieval_s", "ttft_s")
            },
            **{
                f"{name}_ratio": statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
                for name in ("ttft_after_retrieval_s", "ttft_s")
            },
            "num_invalidated": sum(row.num_invalidated for row in mine),
            "num_equal": sum(a.token_ids == b.token_ids for a, b in pairs),
        }
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    table = Table("", "end of retrieval", "ttft_after_retrieval_s", "ttft_s", "tokens invalidated", "same tokens")
    for arm, row in found.items():
        table.add_row(
            arm,
            f"{row['retrieval_s']:.2f}",
            f"{row['ttft_after_retrieval_s']:.2f}, {row['ttft_after_retrieval_s_ratio']:.1f}x",
            f"{row['ttft_s']:.2f}, {row['ttft_s_ratio']:.2f}x",
            f"{row['num_invalidated']:,.0f}",
            f"{row['num_equal']:.0f} of {row['num_questions']:.0f}",
        )
    console.print(table)


def main() -> int:
    parser = demo_parser(__doc__)
    parser.add_argument("--questions", type=int, default=10, metavar="N", help="of the 40 (%(default)s)")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="through all of them (%(default)s)")
    arguments = parse_and_prepare(parser, console)
    rows = asyncio.run(measure(arguments.folder, [*QUESTIONS][: arguments.questions], arguments.turns))
    found = summary(rows)
    show(found)
    load = os.getloadavg()[0]
    print_load(load, console)
    if arguments.json:
        write_results(arguments.json, rows, load=load, arms=found)
    return 0 if all(row["num_equal"] == row["num_questions"] for row in found.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
