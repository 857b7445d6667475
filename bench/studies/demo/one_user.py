"""One user, one question at a time, whose context changes fast: does streaming make anybody wait for a useless step?

    python -m studies.demo.one_user [--folder FOLDER] [--questions N] [--json FILE]

Load benchmarks never contain this case: nobody else is on the engine, and the next update comes sooner than a step
takes. The model is that of `make demo`, in float32, on the real engine; the context is passages of this documentation,
600 to 900 tokens of prompt. Every question is asked streaming and not streaming, on an empty prefix cache, and who goes
first alternates. One question is asked before all of them and not counted. Ratios are of pairs, not streaming over
streaming, and their median: over 1 is faster with streaming.
"""

import asyncio
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Append, Chunk, Pipeline, SamplingParams, Update, VllmBackend
from streamrag.demo.demo_folder import MAX_MODEL_LEN, docs_folder, written_pages
from studies.demo_options import demo_parser, parse_and_prepare, print_load
from studies.results_file import write_results

PASSAGE_WORDS, NUM_PASSAGES = 90, 4
MAX_TOKENS = 4

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Script: TypeAlias = Sequence[tuple[float, Append | Update]]
"""Events of one retrieval, each with the seconds that pass before it."""


def passages() -> list[Chunk]:
    """Return the documentation in pieces of `PASSAGE_WORDS` words."""
    found = []
    for page in written_pages(docs_folder()):
        words = page.read_text().split()
        for number, start in enumerate(range(0, len(words) - PASSAGE_WORDS, PASSAGE_WORDS)):
            found.append(Chunk(" ".join(words[start : start + PASSAGE_WORDS]), page.name, passage=number))
    return found


def fast_search(chunks: list[Chunk], rng: random.Random) -> Script:
    """Keywords after 5 ms and vectors 20 ms later: half of the time the best passage stays the best."""
    by_words, by_vectors = rng.sample(chunks, NUM_PASSAGES), rng.sample(chunks, NUM_PASSAGES)
    if rng.random() < 0.5:
        by_vectors[0] = by_words[0]
    return [(0.005, Update(tuple(by_words))), (0.02, Update(tuple(by_vectors)))]


def reranked_search(chunks: list[Chunk], rng: random.Random) -> Script:
    """The same, and a reranker 0.8 s later, which changes the order of all but the first."""
    script = fast_search(chunks, rng)
    last = script[-1][1]
    assert isinstance(last, Update)
    first, *others = last.chunks
    return [*script, (0.8, Update((first, *reversed(others))))]


def crawl(chunks: list[Chunk], rng: random.Random) -> Script:
    """A page every 0.35 s."""
    return [(0.35, Append(chunk)) for chunk in rng.sample(chunks, NUM_PASSAGES)]


LOADS = {
    "search: keywords, vectors 20 ms later": fast_search,
    "the same, a reranker 0.8 s later": reranked_search,
    "crawl, a page every 0.35 s": crawl,
}


class ScriptedSource:
    """A source that plays the script of its question."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self._scripts = scripts

    async def stream(self, query: str) -> AsyncIterator[Append | Update]:
        """Yield the events of `query` at their times."""
        for delay_s, event in self._scripts[query]:
            await asyncio.sleep(delay_s)
            yield event


@dataclass(frozen=True)
class Row:
    """One question asked in one way."""

    load: str
    question: str
    is_streaming: bool
    num_prompt_tokens: int
    num_invalidated: int
    ttft_s: float
    ttft_after_retrieval_s: float
    token_ids: tuple[int, ...]


async def measure(folder: Path, num_questions: int) -> list[Row]:
    """Ask `num_questions` of each load in both ways."""
    rng, chunks = random.Random(0), passages()
    asked = [(load, f"What is {load}? ({number})") for load in LOADS for number in range(num_questions)]
    scripts = {question: LOADS[load](chunks, rng) for load, question in asked}
    scripts["What is not counted?"] = reranked_search(chunks, rng)
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"})
    params, rows = SamplingParams(max_tokens=MAX_TOKENS), []
    async with Pipeline(ScriptedSource(scripts), backend) as pipeline:

        async def ask(load: str, question: str, *, is_streaming: bool) -> Row:
            await backend.reset_prefix_cache()
            async with pipeline.stream(question, params=params, overlap=is_streaming) as stream:
                async for _ in stream:
                    pass
            answer = stream.result
            assert answer is not None
            times = answer.timings
            return Row(
                load,
                question,
                is_streaming,
                answer.num_prompt_tokens,
                answer.num_invalidated,
                times.ttft_s,
                times.ttft_after_retrieval_s,
                answer.token_ids,
            )

        await ask("", "What is not counted?", is_streaming=True)
        for number, (load, question) in enumerate(track(asked, "asking", console=console, transient=True)):
            ways = (True, False) if number % 2 else (False, True)
            rows += [await ask(load, question, is_streaming=way) for way in ways]
    return rows


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the medians of each load, those of the ratios of its pairs, and how many answers are the same."""
    found = {}
    for load in LOADS:
        streaming = {row.question: row for row in rows if row.load == load and row.is_streaming}
        pairs = [(row, streaming[row.question]) for row in rows if row.load == load and not row.is_streaming]
        found[load] = {
            "num_pairs": len(pairs),
            "num_equal": sum(a.token_ids == b.token_ids for a, b in pairs),
            "num_prompt_tokens": statistics.median(a.num_prompt_tokens for a, _ in pairs),
            "num_invalidated": statistics.median(b.num_invalidated for _, b in pairs),
            **{
                f"{name}_{way}": statistics.median(getattr(pair[index], name) for pair in pairs)
                for name in ("ttft_s", "ttft_after_retrieval_s")
                for index, way in enumerate(("not_streaming", "streaming"))
            },
            **{
                f"{name}_ratio": statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
                for name in ("ttft_s", "ttft_after_retrieval_s")
            },
        }
    return found


def show(found: dict[str, dict[str, float]]) -> None:
    """Print a table of what was measured."""
    table = Table("seconds, not streaming / streaming", "from the question", "after retrieval", "invalidated", "same")
    for load, row in found.items():
        table.add_row(
            load,
            *(
                f"{row[f'{name}_not_streaming']:.2f} / {row[f'{name}_streaming']:.2f}, {row[f'{name}_ratio']:.2f}x"
                for name in ("ttft_s", "ttft_after_retrieval_s")
            ),
            f"{row['num_invalidated']:.0f} of {row['num_prompt_tokens']:.0f}",
            f"{row['num_equal']:.0f} of {row['num_pairs']:.0f}",
        )
    console.print(table)


def main() -> int:
    parser = demo_parser(__doc__)
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="of each load (%(default)s)")
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
