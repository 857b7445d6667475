"""Does retrieval in mid-answer help a small model with questions that need two documents?

    python -m studies.refresh.run [--taught] [--questions N] [--json FILE]

Sixteen questions about things that do not exist: one document names a person, company or place, another one says what
is asked of it, under that name only. A search by rare words takes .1 s, and finds the first document for the question,
and the second one for a text that has the name. An answer is right if it has the word that is asked for. Three ways,
each from an empty prefix cache, in random order:

one retrieval    the documents that are found for the question
refresh          the same, and in mid-answer one more for each retrieval: `Refresh(every_tokens=8, max_passages=1)`
both facts       the two documents that are needed, from the beginning: what the model makes of them

The model is SmolLM2-135M-Instruct, as published, in float32 on the real engine. Answers have 32 to 48 tokens, because
it would end after one sentence. Tokens are those that the engine computed for prompts, also for requests that were
aborted; the pause is the time from a new prompt to the next token.
"""

import argparse
import asyncio
import math
import os
import random
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import (
    Chunk,
    Pipeline,
    PromptTemplate,
    QueryOptions,
    RetrieverSource,
    SamplingParams,
    SchedulerOptions,
    VllmBackend,
)
from streamrag.records import read_records
from streamrag.refresh import Refresh
from streamrag.telemetry import ContextRefreshed, RefreshSkipped, TokensGenerated
from streamrag.testing import make_demo_model
from studies.results_file import write_results

RETRIEVAL_S = 0.1
PARAMS = SamplingParams(max_tokens=48, extra={"min_tokens": 32})
"""The model would end after its first sentence, also with both facts."""

TEMPLATE = PromptTemplate(system="Answer in two sentences from the documents, each with its number in brackets.")
WAYS = ("one retrieval", "refresh", "both facts")
WORD = re.compile(r"\w+")

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class TwoHops:
    """A question, the two documents that it needs, and the word that a right answer has."""

    question: str
    first: str
    second: str
    answer: str


def built(thing: str, company: str, town: str) -> TwoHops:
    """Return a question about the town of a company that built something."""
    question = f"Who built the {thing}, and in which town is that company based?"
    first = f"The {thing} was built by {company}. It was first shown at a fair in spring."
    return TwoHops(question, first, f"{company} is based in the town of {town}. It has some forty workers.", town)


def designed(thing: str, person: str, town: str) -> TwoHops:
    """Return a question about the town in which a designer was born."""
    question = f"Who designed the {thing}, and in which town was that person born?"
    first = f"The {thing} was designed by {person}. It took four years to complete."
    return TwoHops(question, first, f"{person} was born in the town of {town}. Both parents were teachers.", town)


def wrote(novel: str, person: str, subject: str) -> TwoHops:
    """Return a question about what an author studied."""
    question = f"Who wrote the novel {novel}, and what did that author study?"
    first = f"The novel {novel} was written by {person}. It has been translated twice."
    return TwoHops(question, first, f"{person} studied {subject}. Writing came much later.", subject)


def held(festival: str, island: str, county: str) -> TwoHops:
    """Return a question about the county of an island on which a festival is held."""
    question = f"On which island is the {festival} held, and to which county does that island belong?"
    first = f"The {festival} is held on the island of {island}. It lasts three days."
    return TwoHops(
        question, first, f"The island of {island} belongs to the county of {county}. It has one port.", county
    )


QUESTIONS = (
    *(built("Kestrel printer", "Orlin Works", "Havelund"), built("Marten tractor", "Sabel Motors", "Quarmby")),
    *(built("Lynx telescope", "Dorn Optics", "Eskdale"), built("Heron kettle", "Tamsin Metals", "Rushford")),
    *(designed("Marlow bridge", "Tessa Quill", "Dunmere"), designed("Corvin tower", "Ivo Lantz", "Sellick")),
    *(designed("Pallas theatre", "Nadia Brom", "Ottery"), designed("Vesper library", "Emil Stroud", "Kingsand")),
    *(wrote("Grey Harbour", "Anton Velde", "medicine"), wrote("The Salt Road", "Mira Holm", "geology")),
    *(wrote("Nine Lanterns", "Piet Aster", "astronomy"), wrote("Cold Orchard", "Lena Marsh", "botany")),
    *(held("Orso festival", "Pell", "Strand"), held("Lantern regatta", "Skerry", "Norwick")),
    *(held("Thistle games", "Brodick", "Alderney"), held("Herring fair", "Tarn", "Wexcombe")),
)
DOCUMENTS = [Chunk(text, f"{number}") for number, text in enumerate(t for q in QUESTIONS for t in (q.first, q.second))]


def words(text: str) -> set[str]:
    """Return the words of a text in small letters."""
    return set(WORD.findall(text.lower()))


FREQUENCY = Counter(word for document in DOCUMENTS for word in words(document.text))


def search(text: str) -> list[Chunk]:
    """Return at most two documents that share rare words with `text`, which are in at most two, the best first."""
    rare = {word for word in words(text) if 0 < FREQUENCY[word] <= 2}
    found = [document for document in DOCUMENTS if words(document.text) & rare]
    return sorted(found, key=lambda document: -len(words(document.text) & rare))[:2]


@dataclass(frozen=True)
class Row:
    """The answer to one question in one way."""

    way: str
    question: str
    text: str
    is_right: bool
    total_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    num_computed: int = 0
    num_refreshed: int = 0
    num_skipped: int = 0
    pause_s: float = 0.0


def retriever_of(way: str, asked: TwoHops) -> Callable[[str], object]:
    """Return the retrieval of one way."""

    async def retrieve(text: str) -> Sequence[Chunk]:
        await asyncio.sleep(RETRIEVAL_S)
        if way == "both facts":
            return [each for each in DOCUMENTS if each.text in (asked.first, asked.second)]
        return search(text)

    return retrieve


async def ask(backend: VllmBackend, asked: TwoHops, way: str, refresh: Refresh) -> Row:
    """Ask one question in one way."""
    pauses, kinds, refreshed_s = list[float](), Counter[type](), math.nan
    source = RetrieverSource(retriever_of(way, asked))
    async with Pipeline(source, backend, owns_backend=False, template=TEMPLATE, overlap=True) as pipeline:
        options: QueryOptions = {"params": PARAMS, "refresh": refresh} if way == "refresh" else {"params": PARAMS}
        stream = pipeline.events(asked.question, **options)
        async for event in stream:
            kinds[type(event)] += 1
            if isinstance(event, ContextRefreshed):
                refreshed_s = event.at_s
            elif isinstance(event, TokensGenerated) and not math.isnan(refreshed_s):
                pauses.append(event.at_s - refreshed_s)
                refreshed_s = math.nan
    answer = stream.result
    return Row(
        way,
        asked.question,
        answer.text,
        asked.answer.lower() in words(answer.text),
        answer.timings.total_s,
        answer.num_prompt_tokens,
        len(answer.token_ids),
        num_refreshed=kinds[ContextRefreshed],
        num_skipped=kinds[RefreshSkipped],
        pause_s=sum(pauses),
    )


async def measure(backend: VllmBackend, records: Path, num_questions: int) -> list[Row]:
    """Ask `num_questions` questions of all kinds in all ways, after one that is not counted."""
    rng, refresh, rows = random.Random(0), Refresh(every_tokens=8, max_passages=1), list[Row]()
    some = [QUESTIONS[number * len(QUESTIONS) // num_questions] for number in range(num_questions)]
    await ask(backend, QUESTIONS[0], "refresh", refresh)
    todo = [(asked, way) for asked in some for way in rng.sample(WAYS, len(WAYS))]
    for asked, way in track(todo, "asking", console=console, transient=True):
        while not await backend.reset_prefix_cache():  # noqa: ASYNC110 - until the engine has heard of the last abort
            await asyncio.sleep(0.01)
        num_before = len(read_records(records))
        row = await ask(backend, asked, way, refresh)
        while await backend.num_unfinished_requests():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        num_computed = sum(record.num_computed for record in read_records(records)[num_before:])
        rows.append(Row(**{**asdict(row), "num_computed": num_computed}))
    return rows


def summarize(rows: Sequence[Row]) -> list[dict[str, str | float]]:
    """Return the right answers of each way, the median seconds, and means of the counts."""
    summary: list[dict[str, str | float]] = []
    for way in WAYS:
        of_way = [row for row in rows if row.way == way]
        num_refreshed = sum(row.num_refreshed for row in of_way)
        summary.append(
            {
                "way": way,
                "num": len(of_way),
                "num_right": sum(row.is_right for row in of_way),
                "total_s_p50": statistics.median(row.total_s for row in of_way),
                "num_computed": statistics.mean(row.num_computed for row in of_way),
                "num_answer_tokens": statistics.mean(row.num_answer_tokens for row in of_way),
                "num_refreshed": statistics.mean(row.num_refreshed for row in of_way),
                "num_skipped": statistics.mean(row.num_skipped for row in of_way),
                "pause_s": sum(row.pause_s for row in of_way) / max(num_refreshed, 1),
            }
        )
    return summary


def table_of(summary: Sequence[dict[str, str | float]]) -> Table:
    """Return the summary as a table."""
    table = Table("way", "right", "seconds P50", "prompt tokens computed", "answer tokens", "new contexts", "pause, s")
    for row in summary:
        figures = f"{row['total_s_p50']:.2f}", f"{row['num_computed']:.0f}", f"{row['num_answer_tokens']:.0f}"
        others = f"{row['num_refreshed']:.1f}", f"{row['pause_s']:.2f}" if row["num_refreshed"] else ""
        table.add_row(str(row["way"]), f"{row['num_right']} of {row['num']}", *figures, *others)
    return table


async def run(folder: Path, num_questions: int) -> list[Row]:
    """Start the engine on the model in `folder`, and measure."""
    records = folder.parent / "records.jsonl"
    records.touch()
    backend = VllmBackend(
        folder,
        max_model_len=2048,
        kv_cache_bytes=1 << 29,
        scheduler=SchedulerOptions(records=str(records)),
        engine_args={"dtype": "float32"},
    )
    await backend.start(console.print)
    try:
        return await measure(backend, records, num_questions)
    finally:
        await backend.aclose()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taught", action="store_true", help="the model of `make demo`, not the published one")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_demo_model(Path(folder) / "model", taught=arguments.taught)
        rows = asyncio.run(run(model, arguments.questions))
    summary = summarize(rows)
    console.print(table_of(summary))
    if arguments.json:
        write_results(arguments.json, rows, is_taught=arguments.taught, summary=summary)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
