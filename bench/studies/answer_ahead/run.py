"""How much sooner is an answer complete if it is drafted while retrieval runs?

    python -m studies.answer_ahead.run [--folder FOLDER] [--questions N] [--json FILE]

One user, the model of `make demo` in float32 on the real engine, questions about this documentation. The passages of
each question are retrieved beforehand, by keywords and vectors as in the demo, and arrive as below. Every question is
asked with `answer_ahead` and without, both streaming, each on an empty prefix cache; who goes first alternates. Tokens
must be equal. Seconds are from the end of retrieval.

The bound: a draft saves no more than the time for which the engine idled before retrieval ended, as seen without
drafts. It idles from when a prompt is prefilled until the next one comes.
"""

import asyncio
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Append, Chunk, HybridSource, Pipeline, SamplingParams, Update, VllmBackend
from streamrag.demo.demo_folder import MAX_MODEL_LEN, TEMPLATE
from streamrag.telemetry import ContextChanged, DraftUse, PrefillProgressed, QueryEvent
from studies.demo_options import demo_parser, parse_and_prepare, print_load
from studies.documentation_questions import QUESTIONS
from studies.results_file import write_results

NUM_PASSAGES = 5
MAX_TOKENS = 64

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Script: TypeAlias = Sequence[tuple[float, Append | Update | None]]
"""Events of one retrieval, each with the seconds that pass before it; None is its end."""


def appended(seconds: float, chunks: Sequence[Chunk], rng: random.Random) -> Script:
    """The passages one by one, in any order, and the end after the last."""
    gap_s = seconds / (len(chunks) + 1)
    return [*((gap_s, Append(chunk)) for chunk in rng.sample(chunks, len(chunks))), (gap_s, None)]


def ranked(seconds: float, chunks: Sequence[Chunk], rng: random.Random) -> Script:
    """Some passages after a tenth of the time, the right ones after a third, in their order at the end."""
    some, right = rng.sample(chunks, 3), list(chunks[:3])
    first, *others = right
    return [
        (0.1 * seconds, Update(tuple(some))),
        (0.25 * seconds, Update((first, *reversed(others)))),
        (0.65 * seconds, Update(tuple(right))),
    ]


LOADS = {
    "five passages, appended within 9 s": (appended, 9.0),
    "a search of three stages, 3 s": (ranked, 3.0),
    "five passages, appended within 2 s": (appended, 2.0),
}


class ScriptedSource:
    """A source that plays its script, whatever the question."""

    script: Script = ()

    async def stream(self, query: str) -> AsyncIterator[Append | Update]:
        """Yield the events at their times."""
        for delay_s, event in self.script:
            await asyncio.sleep(delay_s)
            if event is not None:
                yield event


@dataclass(frozen=True)
class Row:
    """One question asked in one way. Seconds are from the end of retrieval."""

    load: str
    question: str
    is_ahead: bool
    first_s: float
    last_s: float
    idle_s: float
    """Time for which the engine had prefilled all there was, before retrieval ended."""
    draft: DraftUse | None
    token_ids: tuple[int, ...]


def idle_s(events: Sequence[QueryEvent], retrieval_s: float) -> float:
    """Return the seconds before `retrieval_s` for which the newest prompt was prefilled."""
    total, since_s = 0.0, None
    for event in events:
        if isinstance(event, PrefillProgressed) and event.at_s < retrieval_s:
            since_s = event.at_s if since_s is None else since_s
        elif isinstance(event, ContextChanged) and since_s is not None:
            total, since_s = total + min(event.at_s, retrieval_s) - since_s, None
    return total


async def retrieve(folder: Path, questions: Sequence[str]) -> dict[str, tuple[Chunk, ...]]:
    """Return the best passages of each question, by keywords and vectors."""
    found: dict[str, tuple[Chunk, ...]] = {}
    source = HybridSource(folder / "index", k=NUM_PASSAGES)
    await source.start(lambda line: None)
    try:
        for question in questions:
            async with aclosing(source.stream(question)) as events:
                async for event in events:
                    if isinstance(event, Update):
                        found[question] = event.chunks
    finally:
        await source.aclose()
    return found


async def measure(folder: Path, num_questions: int) -> list[Row]:
    """Ask `num_questions` of each load in both ways."""
    rng, questions = random.Random(0), list(QUESTIONS)[:num_questions]
    found = await retrieve(folder, questions)
    asked = [(load, question) for load in LOADS for question in questions]
    source = ScriptedSource()
    backend = VllmBackend(
        folder / "model", max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"}, answer_ahead=True
    )
    params, rows = SamplingParams(max_tokens=MAX_TOKENS), []
    async with Pipeline(source, backend, template=TEMPLATE, overlap=True) as pipeline:

        async def ask(load: str, question: str, *, is_ahead: bool) -> Row:
            await backend.reset_prefix_cache()
            stream = pipeline.events(question, params=params, answer_ahead=is_ahead)
            events = [event async for event in stream]
            answer, times = stream.result, stream.result.timings
            return Row(
                load,
                question,
                is_ahead,
                times.ttft_after_retrieval_s,
                times.total_s - times.retrieval_s,
                idle_s(events, times.retrieval_s),
                answer.draft,
                answer.token_ids,
            )

        source.script = appended(2.0, found[questions[0]], rng)
        await ask("not counted", questions[0], is_ahead=True)
        for number, (load, question) in enumerate(track(asked, "asking", console=console, transient=True)):
            arrive, seconds = LOADS[load]
            source.script = arrive(seconds, found[question], rng)
            ways = (True, False) if number % 2 else (False, True)
            rows += [await ask(load, question, is_ahead=way) for way in ways]
    return rows


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the percentiles of each load, the ratios of its pairs, their bound, and what became of the drafts."""
    found = {}
    for load in LOADS:
        ahead = {row.question: row for row in rows if row.load == load and row.is_ahead}
        pairs = [(row, ahead[row.question]) for row in rows if row.load == load and not row.is_ahead]
        uses = [with_.draft or DraftUse() for _, with_ in pairs]
        num_complete = sum(
            use.num_drafted == len(with_.token_ids) and use.num_verified == use.num_accepted > 0
            for (_, with_), use in zip(pairs, uses, strict=True)
        )
        found[load] = {
            "num_pairs": len(pairs),
            "num_equal": sum(a.token_ids == b.token_ids for a, b in pairs),
            "num_complete": num_complete,
            "num_tokens": sum(len(a.token_ids) for a, _ in pairs),
            "num_drafted": sum(use.num_drafted for use in uses),
            "num_verified": sum(use.num_verified for use in uses),
            "num_accepted": sum(use.num_accepted for use in uses),
            "bound_s": statistics.median(max(a.last_s - a.idle_s, 0.0) for a, _ in pairs),
            **{
                f"{name}_p{percent}_{way}": percentile([getattr(pair[index], name) for pair in pairs], percent)
                for name in ("first_s", "last_s")
                for percent in (50, 95)
                for index, way in enumerate(("without", "ahead"))
            },
            "last_ratio": statistics.median(a.last_s / b.last_s for a, b in pairs),
        }
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    """Print a table of what was measured."""
    table = Table("seconds after retrieval, without / ahead", "first P50", "last P50", "last P95", "bound P50")
    for column in ("whole draft right", "drafted, verified, right, of", "same"):
        table.add_column(column)
    for load, row in found.items():
        columns = (("first_s", 50), ("last_s", 50), ("last_s", 95))
        table.add_row(
            load,
            *(f"{row[f'{name}_p{p}_without']:.2f} / {row[f'{name}_p{p}_ahead']:.2f}" for name, p in columns),
            f"{row['bound_s']:.2f}",
            f"{row['num_complete']:.0f}",
            f"{row['num_drafted']:.0f}, {row['num_verified']:.0f}, {row['num_accepted']:.0f}, {row['num_tokens']:.0f}",
            f"{row['num_equal']:.0f} of {row['num_pairs']:.0f}",
        )
    console.print(table)


def main() -> int:
    parser = demo_parser(__doc__)
    parser.add_argument("--questions", type=int, default=12, metavar="N", help="of each load (%(default)s)")
    arguments = parse_and_prepare(parser, console)
    rows = asyncio.run(measure(arguments.folder, arguments.questions))
    found, load = summarize(rows), os.getloadavg()[0]
    show(found)
    print_load(load, console)
    if arguments.json:
        write_results(arguments.json, rows, load=load, loads=found)
    return 0 if all(row["num_equal"] == row["num_pairs"] for row in found.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
