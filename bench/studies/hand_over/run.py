"""How much sooner does a second model begin to answer if the first one's text streams into its prompt?

    python -m studies.hand_over.run [--model FOLDER] [--questions N] [--minutes M] [--json FILE]

The model of `make demo`, in float32 on the real engine, is used twice: it writes 150 or 400 tokens about two passages
of this documentation, and is then asked a question about what it wrote. One does not wait for the other with
`from_tokens`, which sends an update of the second prompt whenever there are `min_chars` new characters; "wait" gives it
the whole text when its last token is there. Each begins with an empty prefix cache, in random order.

first   seconds in which the first model writes, which the prefill beside it slows down
gap     seconds from the first model's last token to the second one's first token
total   seconds from the start to the second one's first token
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.progress import track
from rich.table import Table

from streamrag import AnswerChunk, Append, Pipeline, SamplingParams, VllmBackend, from_tokens
from streamrag.testing import ScriptedSource, make_demo_model
from studies.demo.one_user import console, passages
from studies.results_file import write_results

LENGTHS = (150, 400)
WAYS: tuple[int | None, ...] = (None, 16, 64, 256)
"""Values of `min_chars`; None waits for the whole text."""
SECONDS = ("first_s", "gap_s", "total_s")
NUM_PASSAGES = 2
ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Row:
    """One hand-over."""

    num_written: int
    min_chars: int | None
    question: int
    first_s: float
    gap_s: float
    total_s: float
    num_prompt_tokens: int
    num_invalidated: int
    written: tuple[int, ...]
    token_ids: tuple[int, ...]


async def hand_over(
    backend: VllmBackend, steps: Sequence[Append], question: int, num_written: int, way: int | None
) -> Row:
    """Let the model write, and ask it about what it writes."""
    await backend.reset_prefix_cache()
    params = SamplingParams(max_tokens=num_written, ignore_eos=True)
    writer = Pipeline(ScriptedSource(steps), backend, owns_backend=False)
    notes = writer.stream(f"What do these documents say? ({question})", params=params)
    written_s = first_s = math.nan

    async def write() -> AsyncIterator[AnswerChunk]:
        nonlocal written_s
        async for chunk in notes:
            yield chunk
        written_s = time.perf_counter()

    async def write_all(query: str) -> AsyncIterator[str]:
        yield "".join([chunk.text async for chunk in write()])

    source = from_tokens(write_all, name="notes") if way is None else from_tokens(write(), name="notes", min_chars=way)
    async with writer, Pipeline(source, backend, owns_backend=False, overlap=True) as reader:
        begun_s = time.perf_counter()
        async with reader.stream("Which errors do the notes name?", params=ANSWER) as stream:
            async for _ in stream:
                first_s = time.perf_counter() if math.isnan(first_s) else first_s
    answer = stream.result
    seconds = (written_s - begun_s, first_s - written_s, first_s - begun_s)
    counts = (answer.num_prompt_tokens, answer.num_invalidated)
    return Row(num_written, way, question, *seconds, *counts, notes.result.token_ids, answer.token_ids)


async def measure(model: Path, num_questions: int, max_s: float) -> list[Row]:
    """Hand over the text about `num_questions` pairs of passages, in all lengths and ways, none after `max_s`."""
    rng, chunks, rows = random.Random(0), passages(), list[Row]()
    found = [list(map(Append, rng.sample(chunks, NUM_PASSAGES))) for _ in range(num_questions)]
    backend = VllmBackend(model, max_model_len=2048, engine_args={"dtype": "float32"})
    await backend.start(lambda line: None)
    try:
        await hand_over(backend, found[0], 0, min(LENGTHS), WAYS[-1])  # is not counted
        begun_s = time.monotonic()
        asked = list(product(LENGTHS, range(num_questions)))
        for num_written, question in track(asked, "handing over", console=console, transient=True):
            if time.monotonic() - begun_s < max_s:
                for way in rng.sample(WAYS, len(WAYS)):
                    rows.append(await hand_over(backend, found[question], question, num_written, way))
    finally:
        await backend.aclose()
    return rows


def summarize(rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Return the medians of each length and way, what each saved in its pairs, and how many tokens were the same."""
    summary = []
    for num_written, way in product(sorted({row.num_written for row in rows}), WAYS):
        waits = {row.question: row for row in rows if (row.num_written, row.min_chars) == (num_written, None)}
        of_way = [row for row in rows if (row.num_written, row.min_chars) == (num_written, way)]
        pairs = [(waits[row.question], row) for row in of_way]
        names = (*SECONDS, "num_prompt_tokens", "num_invalidated")
        medians = {name: statistics.median(getattr(row, name) for row in of_way) for name in names}
        saved = {
            f"saved_{name}": statistics.median(getattr(a, name) - getattr(b, name) for a, b in pairs)
            for name in SECONDS
        }
        num_equal = sum((a.written, a.token_ids) == (b.written, b.token_ids) for a, b in pairs)
        counts = {"num_written": num_written, "min_chars": way, "num_equal": num_equal, "num": len(pairs)}
        summary.append({**counts, **medians, **saved})
    return summary


def table_of(summary: Sequence[dict[str, float | None]]) -> Table:
    """Return the summary as a table."""
    table = Table("tokens written", "min_chars", "first", "gap", "total", "gap saved", "total saved", "same")
    for row in summary:
        seconds = (f"{row[name]:.2f}" for name in (*SECONDS, "saved_gap_s", "saved_total_s"))
        way = "wait" if row["min_chars"] is None else str(row["min_chars"])
        table.add_row(str(row["num_written"]), way, *seconds, f"{row['num_equal']} of {row['num']}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="that of `make demo`; made anew by default")
    parser.add_argument("--questions", type=int, default=6, metavar="N", help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="after which nothing new begins")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_demo_model(Path(folder, "model"))
        rows = asyncio.run(measure(model, arguments.questions, 60 * arguments.minutes))
    summary = summarize(rows)
    console.print(table_of(summary))
    if arguments.json:
        without_tokens = [replace(row, written=(), token_ids=()) for row in rows]
        write_results(arguments.json, without_tokens, command="make -C bench hand-over", summary=summary)
    return 0 if all(row["num_equal"] == row["num"] for row in summary) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
