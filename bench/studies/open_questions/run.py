"""How much sooner is an answer there if retrieval begins while its question is still typed or spoken?

    python -m studies.open_questions.run [--folder FOLDER] [--questions N] [--json FILE]

One user, the model of `make demo` in float32 on the real engine, questions about this documentation, two sources:

search   passages that were found beforehand for the whole question arrive within 1.5 s after retrieval begins, as from
         a search on the web. A partial question finds the same ones: the best case of what a partial question can find
crawl    `make demo`'s site, with its latency, crawled with a cache of pages that is empty at each question. A partial
         question reads the pages that are relevant to itself; the committed one's own crawl finds those in the cache

typed    one key after the other: log-normal intervals of .239 s in the mean with a deviation of .112 s (Dhakal et al.,
         "Observations on Typing from 136 Million Keystrokes", 2018); the commit is one more key
spoken   one word every .4 s, 150 a minute; the commit follows .5 s after the last word, the silence by which voice
         agents tell that a user has ended, and the recognizer's final transcript in the middle of it

Every question is asked in three ways: from its commit on, which is what one does without `listen`, with `listen`, and
with `listen` and drafts. Each begins with an empty prefix cache, in random order. With the search, tokens must be
equal; a crawl appends pages as they arrive, so its context depends on their times. Seconds are from the commit.
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import CrawlOptions, Pipeline, SamplingParams, VllmBackend, WebSource
from streamrag.core import Source, SourceEvent
from streamrag.demo.demo_folder import MAX_CONTEXT_TOKENS, MAX_MODEL_LEN, TEMPLATE, prepare_demo
from streamrag.query.answer_stream import AnswerStream
from studies.answer_ahead.run import ScriptedSource, appended, retrieve
from studies.documentation_questions import QUESTIONS
from studies.folders import DEMO, ROOT
from studies.results_file import write_results

RETRIEVAL_S = 1.5
MAX_TOKENS = 64
KEY_S, KEY_DEVIATION_S = 0.239, 0.112
WORD_S, SILENCE_S = 0.4, 0.5
SOURCES = ("search", "crawl")
WAYS = ("from the commit", "listen", "listen, drafts")
MEANS = ("num_retrievals", "num_unused_tokens")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Partial(NamedTuple):
    """A partial question, and the seconds after which the next one follows, or the commit."""

    text: str
    pause_s: float
    is_final: bool = False


def typed(question: str, rng: random.Random) -> list[Partial]:
    """Return the partial questions of someone who types `question`."""
    variance = math.log(1 + (KEY_DEVIATION_S / KEY_S) ** 2)
    mean = math.log(KEY_S) - variance / 2
    return [Partial(question[:end], rng.lognormvariate(mean, variance**0.5)) for end in range(1, len(question) + 1)]


def spoken(question: str, rng: random.Random) -> list[Partial]:
    """Return the partial transcripts of someone who speaks, the last of them final."""
    words = question.split(" ")
    growing = [Partial(" ".join(words[:end]), WORD_S) for end in range(1, len(words))]
    return [*growing, Partial(question, SILENCE_S / 2), Partial(question, SILENCE_S / 2, is_final=True)]


INPUTS = {"typed": typed, "spoken": spoken}


class CountingSource:
    """A source that counts the retrievals of another one, which may be replaced."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_retrievals = 0

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield the events of the other source."""
        self.num_retrievals += 1
        async with aclosing(self.source.stream(query)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event


@dataclass(frozen=True)
class Row:
    """One question asked in one way. Seconds are from its commit."""

    source: str
    how: str
    way: str
    question: str
    first_s: float
    last_s: float
    num_retrievals: int
    num_unused_tokens: int
    token_ids: tuple[int, ...]


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site with its latency from another process, and yield its address."""
    command = [sys.executable, os.fspath(ROOT / "examples" / "demo_site.py"), os.fspath(site)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/index.html"
        finally:
            server.terminate()


def remove_files(folder: Path) -> None:
    """Remove the files in a folder."""
    for path in folder.iterdir():
        path.unlink()


async def read(answer: AnswerStream) -> tuple[float, float]:
    """Return the seconds to the first token and to the last one."""
    now = asyncio.get_running_loop().time
    begun_s, first_s = now(), math.nan
    async for _ in answer:
        first_s = now() - begun_s if math.isnan(first_s) else first_s
    return first_s, now() - begun_s


async def ask(
    pipeline: Pipeline, partials: Sequence[Partial], way: str, question: str
) -> tuple[float, float, int, tuple[int, ...]]:
    """Ask one question in one way.

    Return the seconds to the first and to the last token, the number of unused tokens, and the answer's tokens.
    """
    params = SamplingParams(max_tokens=MAX_TOKENS)
    if way == WAYS[0]:
        answer = pipeline.stream(question, params=params, max_context_tokens=MAX_CONTEXT_TOKENS)
        return (*await read(answer), 0, answer.result.token_ids)
    is_ahead = way == WAYS[2]
    async with pipeline.listen(params=params, max_context_tokens=MAX_CONTEXT_TOKENS, answer_ahead=is_ahead) as asked:
        for text, pause_s, is_final in partials:
            await asked.partial(text, is_final=is_final)
            await asyncio.sleep(pause_s)
        return (*await read(answer := asked.commit(question)), asked.num_unused_tokens, answer.result.token_ids)


async def measure(folder: Path, num_questions: int, sources: Sequence[str]) -> list[Row]:
    """Ask `num_questions` questions in all ways."""
    rng, questions, rows = random.Random(0), list(QUESTIONS)[:num_questions], list[Row]()
    found = await retrieve(folder, questions)
    backend = VllmBackend(
        folder / "model", max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"}, answer_ahead=True
    )
    asked = [
        (name, how, question, way)
        for name in sources
        for how in INPUTS
        for question in questions
        for way in rng.sample(WAYS, len(WAYS))
    ]
    async with AsyncExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(served(folder / "site"))
        options = CrawlOptions(max_pages=12, max_page_chars=1500, num_workers=1, allow_private=True, cache_folder=cache)
        crawl = WebSource([url], options)
        stack.push_async_callback(crawl.aclose)
        await crawl.start(lambda line: None)
        source = CountingSource(crawl)
        pipeline = await stack.enter_async_context(Pipeline(source, backend, template=TEMPLATE, overlap=True))
        for name, how, question, way in track(asked, "asking", console=console, transient=True):
            source.source = crawl
            if name == "search":
                source.source = scripted = ScriptedSource()
                scripted.script = appended(RETRIEVAL_S, found[question], random.Random(question))
            remove_files(cache)
            await backend.reset_prefix_cache()
            num_before = source.num_retrievals
            first_s, last_s, num_unused, token_ids = await ask(pipeline, INPUTS[how](question, rng), way, question)
            num = source.num_retrievals - num_before
            rows.append(Row(name, how, way, question, first_s, last_s, num, num_unused, token_ids))
            if not console.is_terminal:
                console.print(f"{name}, {how}, {way}: first token {first_s:.2f} s, last {last_s:.2f} s: {question}")
    return rows


def summarize(rows: Sequence[Row]) -> list[dict[str, str | float]]:
    """Return medians and P95 of each way, and how many of its answers were those of the first way."""
    summary: list[dict[str, str | float]] = []
    for name, how, way in product(dict.fromkeys(row.source for row in rows), INPUTS, WAYS):
        of_input = [row for row in rows if (row.source, row.how) == (name, how)]
        plain = {row.question: row.token_ids for row in of_input if row.way == WAYS[0]}
        of_way = [row for row in of_input if row.way == way]
        figures = {
            f"{seconds}_p{percent}": statistics.quantiles(
                [getattr(row, seconds) for row in of_way], n=100, method="inclusive"
            )[percent - 1]
            for seconds in ("first_s", "last_s")
            for percent in (50, 95)
        }
        means = {each: statistics.mean(getattr(row, each) for row in of_way) for each in MEANS}
        num_equal = sum(row.token_ids == plain[row.question] for row in of_way)
        row = {"source": name, "how": how, "way": way, **figures, **means, "num_equal": num_equal, "num": len(of_way)}
        summary.append(row)
    return summary


def table_of(summary: Sequence[dict[str, str | float]]) -> Table:
    """Return the summary as a table."""
    table = Table("source", "question", "retrieval and prefill", "first P50", "P95", "last P50", "P95")
    for name in ("retrievals", "unused tokens", "same"):
        table.add_column(name)
    for row in summary:
        table.add_row(
            *(str(row[name]) for name in ("source", "how", "way")),
            *(f"{row[name]:.2f}" for name in ("first_s_p50", "first_s_p95", "last_s_p50", "last_s_p95")),
            f"{row['num_retrievals']:.1f}",
            f"{row['num_unused_tokens']:.0f}",
            f"{row['num_equal']} of {row['num']}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="that of `make demo` (%(default)s)")
    parser.add_argument("--questions", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--source", choices=SOURCES, action="append", help="only this one; may be given several times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder)
    rows = asyncio.run(measure(arguments.folder, arguments.questions, arguments.source or SOURCES))
    summary = summarize(rows)
    console.print(table_of(summary))
    if arguments.json:
        write_results(arguments.json, rows, summary=summary)
    return 0 if all(row["num_equal"] == row["num"] for row in summary if row["source"] == "search") else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
