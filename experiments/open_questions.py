"""How much sooner is an answer there if retrieval begins while its question is still typed or spoken?

    python experiments/open_questions.py [--folder FOLDER] [--questions N] [--json FILE]

One user, the model of `make demo` in float32 on the real engine, questions about this documentation. The passages of
each whole question are found beforehand, and arrive within 1.5 s after retrieval begins, as from a search on the web. A
partial question finds the same ones, so this is the best case of what a partial question can find; what it costs in
retrievals does not depend on it.

typed    one key after the other: log-normal intervals of .239 s in the mean with a deviation of .112 s (Dhakal et al.,
         "Observations on Typing from 136 Million Keystrokes", 2018); the commit is one more key
spoken   one word every .4 s, 150 a minute; the commit follows .5 s after the last word, the silence by which voice
         agents tell that a user has ended

Every question is asked in three ways: from its commit on, which is what one does without `listen`, with `listen`, and
with `listen` and drafts. Each begins with an empty prefix cache, in random order. Tokens must be equal. Seconds are
from the commit.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TypeAlias

from answer_ahead import ScriptedSource, appended, retrieve
from documentation_questions import QUESTIONS
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Append, Pipeline, SamplingParams, Update, VllmBackend
from streamrag.bench.provenance import versions
from streamrag.demo.demo_folder import MAX_MODEL_LEN, TEMPLATE, prepare_demo
from streamrag.query.answer_stream import AnswerStream
from streamrag.support.files import write_atomic

RETRIEVAL_S = 1.5
MAX_TOKENS = 64
KEY_S, KEY_DEVIATION_S = 0.239, 0.112
WORD_S, SILENCE_S = 0.4, 0.5
WAYS = ("from the commit", "listen", "listen, drafts")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


def typed(question: str, rng: random.Random) -> list[tuple[float, str]]:
    """Return the partial questions, each with the seconds after which the next one follows, or the commit."""
    variance = math.log(1 + (KEY_DEVIATION_S / KEY_S) ** 2)
    mean = math.log(KEY_S) - variance / 2
    return [(rng.lognormvariate(mean, variance**0.5), question[:end]) for end in range(1, len(question) + 1)]


def spoken(question: str, rng: random.Random) -> list[tuple[float, str]]:
    """Return the partial questions, as in `typed`."""
    words = question.split(" ")
    partial = [" ".join(words[:end]) for end in range(1, len(words) + 1)]
    return [*((WORD_S, text) for text in partial[:-1]), (SILENCE_S, partial[-1])]


INPUTS = {"typed": typed, "spoken": spoken}

AskedTimes: TypeAlias = tuple[float, float, tuple[int, ...]]


class CountingSource(ScriptedSource):
    """A source that counts its retrievals."""

    num_retrievals = 0

    async def stream(self, query: str) -> AsyncIterator[Append | Update]:
        """Yield the events of the script."""
        self.num_retrievals += 1
        async for event in super().stream(query):
            yield event


@dataclass(frozen=True)
class Row:
    """One question asked in one way. Seconds are from its commit."""

    how: str
    way: str
    question: str
    first_s: float
    last_s: float
    num_retrievals: int
    token_ids: tuple[int, ...]


async def read(answer: AnswerStream) -> tuple[float, float]:
    """Return the seconds to the first token and to the last one."""
    begun_s, first_s = time.perf_counter(), math.nan
    async for _ in answer:
        first_s = time.perf_counter() - begun_s if math.isnan(first_s) else first_s
    return first_s, time.perf_counter() - begun_s


async def ask(pipeline: Pipeline, partial: Sequence[tuple[float, str]], way: str, question: str) -> AskedTimes:
    """Ask one question in one way, and return the seconds to the first token and to the last one, and the tokens."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    if way == WAYS[0]:
        return (*await read(answer := pipeline.stream(question, params=params)), answer.result.token_ids)
    async with pipeline.listen(params=params, answer_ahead=way == WAYS[2]) as asked:
        for pause_s, text in partial:
            await asked.partial(text)
            await asyncio.sleep(pause_s)
        return (*await read(answer := asked.commit(question)), answer.result.token_ids)


async def measure(folder: Path, num_questions: int) -> list[Row]:
    """Ask `num_questions` questions in all ways."""
    rng, questions = random.Random(0), list(QUESTIONS)[:num_questions]
    found = await retrieve(folder, questions)
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, dtype="float32", answer_ahead=True)
    source, rows = CountingSource(), list[Row]()
    asked = [(how, question, way) for how in INPUTS for question in questions for way in rng.sample(WAYS, len(WAYS))]
    async with Pipeline(source, backend, template=TEMPLATE, overlap=True) as pipeline:
        for how, question, way in track(asked, "asking", console=console, transient=True):
            source.script = appended(RETRIEVAL_S, found[question], random.Random(question))
            await backend.reset_prefix_cache()
            num_before = source.num_retrievals
            first_s, last_s, token_ids = await ask(pipeline, INPUTS[how](question, rng), way, question)
            num = source.num_retrievals - num_before
            rows.append(Row(how, way, question, first_s, last_s, num, token_ids))
    return rows


def summarize(rows: Sequence[Row]) -> list[dict[str, str | float]]:
    """Return medians and P95 of each way, and whether its tokens were those of the first way."""
    summary: list[dict[str, str | float]] = []
    for how in INPUTS:
        plain = {row.question: row.token_ids for row in rows if row.how == how and row.way == WAYS[0]}
        for way in WAYS:
            of_way = [row for row in rows if row.how == how and row.way == way]
            figures = {
                f"{name}_p{percent}": statistics.quantiles(
                    [getattr(row, name) for row in of_way], n=100, method="inclusive"
                )[percent - 1]
                for name in ("first_s", "last_s")
                for percent in (50, 95)
            }
            summary.append(
                {
                    "how": how,
                    "way": way,
                    **figures,
                    "num_retrievals": statistics.mean(row.num_retrievals for row in of_way),
                    "num_equal": sum(row.token_ids == plain[row.question] for row in of_way),
                    "num": len(of_way),
                }
            )
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="that of `make demo` (%(default)s)")
    parser.add_argument("--questions", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder)
    rows = asyncio.run(measure(arguments.folder, arguments.questions))
    summary = summarize(rows)
    table = Table("question", "retrieval and prefill", "first P50", "first P95", "last P50", "last P95", "retrievals")
    table.add_column("same")
    for row in summary:
        figures = [f"{row[name]:.2f}" for name in ("first_s_p50", "first_s_p95", "last_s_p50", "last_s_p95")]
        table.add_row(
            str(row["how"]),
            str(row["way"]),
            *figures,
            f"{row['num_retrievals']:.1f}",
            f"{row['num_equal']} of {row['num']}",
        )
    console.print(table)
    if arguments.json:
        as_json = {
            "date": date.today().isoformat(),
            "versions": versions(),
            "load": os.getloadavg()[0],
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    return 0 if all(row["num_equal"] == row["num"] for row in summary) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
