"""Does retrieval in mid-answer help a small model with questions that need two documents?

    python experiments/refresh.py [--taught] [--questions N] [--json FILE]

Sixteen questions about things that do not exist: one document names a person, company or place, another one says what
is asked of it, under that name only. A search by keywords takes .1 s and finds two documents for a text. An answer is
right if it has the word that is asked for. Four ways, each from an empty prefix cache, in random order:

one retrieval    the two documents that are found for the question
four documents   the four documents that are found for the question: what one pays for more at the beginning
refresh          two documents, and in mid-answer at most one more for each retrieval: `Refresh(every_tokens=8)`
both facts       the two documents that are needed, from the beginning: what the model makes of them

The model is SmolLM2-135M-Instruct, as published, in float32 on the real engine. Answers have 32 to 48 tokens, because
it would end after one sentence. Tokens are those that the engine computed for prompts, also for requests that were
aborted; the pause is the time from a new prompt to the next token.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Chunk, Pipeline, PromptTemplate, RetrieverSource, SamplingParams, VllmBackend
from streamrag.bench.provenance import versions
from streamrag.records import read_records
from streamrag.refresh import Refresh
from streamrag.support.files import write_atomic
from streamrag.telemetry import ContextRefreshed, RefreshSkipped, TokensGenerated
from streamrag.testing import make_demo_model

RETRIEVAL_S = 0.1
PARAMS = SamplingParams(max_tokens=48, extra={"min_tokens": 32})
"""The model would end after its first sentence, also with both facts."""

TEMPLATE = PromptTemplate(
    system="Answer the question from the documents.",
    after_context="Question: {question}\nFirst repeat the sentence about it, then the sentence with the answer.",
)
WAYS = ("one retrieval", "four documents", "refresh", "both facts")
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
    question = f"In which town is the company based that built the {thing}?"
    first = f"The {thing} was built by {company}. It was first shown at a fair in spring."
    return TwoHops(question, first, f"{company} is based in the town of {town}. It has some forty workers.", town)


def designed(thing: str, person: str, town: str) -> TwoHops:
    """Return a question about the town in which a designer was born."""
    question = f"In which town was the designer of the {thing} born?"
    first = f"The {thing} was designed by {person}. It took four years to complete."
    return TwoHops(question, first, f"{person} was born in the town of {town}. Both parents were teachers.", town)


def wrote(novel: str, person: str, subject: str) -> TwoHops:
    """Return a question about what an author studied."""
    question = f"What did the author of the novel {novel} study?"
    first = f"The novel {novel} was written by {person}. It has been translated twice."
    return TwoHops(question, first, f"{person} studied {subject}. Writing came much later.", subject)


def held(festival: str, island: str, county: str) -> TwoHops:
    """Return a question about the county of an island on which a festival is held."""
    question = f"To which county does the island belong on which the {festival} is held?"
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


def search(text: str, num_documents: int) -> list[Chunk]:
    """Return the documents that share the rarest words with `text`, the best first."""

    def score(document: Chunk) -> tuple[float, int]:
        rarity = sum(math.log(len(DOCUMENTS) / FREQUENCY[word]) for word in words(text) & words(document.text))
        return rarity, zlib.crc32(document.text.encode())  # so that no question's documents are found by chance

    return sorted(DOCUMENTS, key=score, reverse=True)[:num_documents]


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
        return search(text, 4 if way == "four documents" else 2)

    return retrieve


async def ask(backend: VllmBackend, asked: TwoHops, way: str, refresh: Refresh) -> Row:
    """Ask one question in one way."""
    pauses, kinds, refreshed_s = list[float](), Counter[type](), math.nan
    source = RetrieverSource(retriever_of(way, asked))
    async with Pipeline(source, backend, owns_backend=False, template=TEMPLATE, overlap=True) as pipeline:
        options = {"refresh": refresh} if way == "refresh" else {}
        stream = pipeline.events(asked.question, params=PARAMS, **options)
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
    """Ask `num_questions` questions in all ways, after one that is not counted."""
    rng, refresh, rows = random.Random(0), Refresh(every_tokens=8, max_passages=1), list[Row]()
    await ask(backend, QUESTIONS[0], "refresh", refresh)
    todo = [(asked, way) for asked in QUESTIONS[:num_questions] for way in rng.sample(WAYS, len(WAYS))]
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
        dtype="float32",
        max_model_len=2048,
        kv_cache_bytes=1 << 29,
        engine_args={"additional_config": {"streamrag": {"records": str(records)}}},
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
        as_json = {
            "date": date.today().isoformat(),
            "versions": versions(),
            "load": os.getloadavg()[0],
            "is_taught": arguments.taught,
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
