"""How many of 30 plain questions about other projects' documentation do the passages of a search answer?

    python -m studies.retrieval.run [--packages FOLDER] [--keep FOLDER] [--docs NAME] [--only SETTING] [--model FOLDER]
                                    [--json FILE]

Each file in retrieval_questions/ names pages of a Debian package and asks 30 questions about them, each with the
answers that pages give: the page, and words that must all stand in one passage of it. Settings are chosen on the first
two documentations; the third is the test. The packages come from `apt-get download`, or from `--packages`, a folder
with what they hold. Questions are searched for one at a time. `--keep` uses the indexes of an earlier run. With
`--model`, that model answers each question too, several at a time, greedily and in float32: an answer is right if it
has the words of one of the answers, and cited if the first number in it is that of a passage with these words.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrag import (
    Answer,
    Chunk,
    HybridSource,
    IvfSource,
    Pipeline,
    SamplingParams,
    Update,
    VectorSource,
    VllmBackend,
    build_index,
    index_source,
)
from streamrag.demo.demo_folder import TEMPLATE
from streamrag.support.files import write_atomic
from streamrag.testing import ScriptedSource
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile
from studies.demo_model.run import CITED, MAX_TOKENS, has_words

QUESTIONS = Path(__file__).with_name("questions")
CHOOSING, TESTING = ("postgresql-doc", "python3-doc"), ("apache2-doc",)
LATE = "late-interaction"
NUM_AT_ONCE = 8  # questions that the model answers

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass(frozen=True)
class Setting:
    """A search to measure."""

    name: str
    source: Callable[[Path], HybridSource | VectorSource | IvfSource]
    counts: tuple[int, ...] = ()
    """Numbers of first passages to look at, in place of all that are found."""


def hybrid(*counts: int, **options: Any) -> Setting:
    """Return the setting of a `HybridSource` with these options."""
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return Setting(named, lambda index: HybridSource(index, **options), counts)


SETTINGS = (
    Setting("vectors", lambda index: index_source(index, k=20), (1, 2, 3, 5, 10, 20)),
    hybrid(1, 2, 3, 5, 10, k=10),
    hybrid(1, 2, 3, 5, k=5, reranker=LATE),
    hybrid(k=2, reranker=LATE, sentences=2),
    hybrid(k=5, candidates=5, reranker=LATE, sentences=2),
)


@dataclass(frozen=True)
class Question:
    """A question, and its answers: each a page and words of it."""

    text: str
    answers: tuple[tuple[str, ...], ...]

    def is_answered_by(self, text: str, uri: str | None = None) -> bool:
        """Whether a text has all words of one of the answers; with `uri`, of one that this page gives."""
        return any(uri in (None, f"{page}.html") and has_words(text, words) for page, *words in self.answers)

    def is_answered(self, chunks: tuple[Chunk, ...]) -> bool:
        return any(self.is_answered_by(chunk.text, chunk.uri) for chunk in chunks)


@dataclass(frozen=True)
class Documentation:
    """Pages of a package, and questions about them."""

    name: str
    package: str
    folder: str
    pages: tuple[str, ...]
    questions: tuple[Question, ...]

    @classmethod
    def read(cls, name: str) -> "Documentation":
        fields = tomllib.loads((QUESTIONS / f"{name}.toml").read_text())
        questions = tuple(
            Question(each["text"], tuple(tuple(answer) for answer in each["answers"])) for each in fields["questions"]
        )
        return cls(name, fields["package"], fields["folder"], tuple(fields["pages"].split()), questions)

    def copy_pages(self, packages: Path, folder: Path) -> None:
        for page in self.pages:
            target = folder / f"{page}.html"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(packages / self.folder / f"{page}.html", target)


def download(packages: Path, names: list[str]) -> None:
    """Unpack the Debian packages of these names below the folder `packages`, without installing them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *names], cwd=folder, check=True)
        for archive in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", archive, packages], check=True)


@dataclass(frozen=True)
class Found:
    """What a search found for a question."""

    question: Question
    chunks: tuple[Chunk, ...]
    took_s: float


async def search(setting: Setting, index: Path, questions: tuple[Question, ...]) -> list[Found]:
    """Search for each question, after one search that is not counted."""
    found = []
    async with aclosing(setting.source(index)) as source:
        await source.start(lambda line: None)
        for question in (questions[-1], *questions):
            began_s = time.perf_counter()
            chunks: tuple[Chunk, ...] = ()
            async with aclosing(source.stream(question.text)) as events:
                async for event in events:
                    assert isinstance(event, Update), event
                    chunks = event.chunks
            found.append(Found(question, chunks, time.perf_counter() - began_s))
    return found[1:]


async def answer(backend: VllmBackend, found: list[Found]) -> list[dict[str, Any]]:
    """Answer each question with the demo's template, and return whether the answers are right and rightly cited."""
    chunks = {each.question.text: each.chunks for each in found}
    source = ScriptedSource(lambda question: [Update(chunks[question])])
    limit = asyncio.Semaphore(NUM_AT_ONCE)
    async with Pipeline(source, backend, owns_backend=False, template=TEMPLATE) as pipeline:

        async def one(question: Question) -> dict[str, Any]:
            async with limit:
                stream = pipeline.stream(question.text, params=SamplingParams(max_tokens=MAX_TOKENS), overlap=False)
                async for _ in stream:
                    pass
            assert stream.result is not None
            return judge(question, stream.result)

        return list(await asyncio.gather(*(one(each.question) for each in found)))


def judge(question: Question, answer: Answer) -> dict[str, Any]:
    """Return the text of an answer, and whether it is right and rightly cited."""
    citations = {citation.number: citation for citation in answer.citations}
    numbers = [int(number) for number in CITED.findall(answer.text)]
    first = citations.get(numbers[0]) if numbers else None
    is_right = question.is_answered_by(CITED.sub("", answer.text))
    is_cited = first is not None and question.is_answered_by(first.text, first.uri)
    return {"question": question.text, "text": answer.text, "right": is_right, "cited": is_right and is_cited}


def summary(found: list[Found]) -> dict[str, Any]:
    """Return how many questions were answered by what was found, its words, and the median time."""
    missed = [each.question.text for each in found if not each.question.is_answered(each.chunks)]
    return {
        "num_answered": len(found) - len(missed),
        "num_words": sum(len(chunk.text.split()) for each in found for chunk in each.chunks) / len(found),
        "p50_s": percentile([each.took_s for each in found], 0.5),
        "missed": missed,
    }


async def measure(
    documentation: Documentation, packages: Path, folder: Path, only: list[str], backend: VllmBackend | None
) -> dict[str, Any]:
    """Build the indexes that are missing in `folder`, and return the result of each setting."""
    pages = folder / documentation.name
    documentation.copy_pages(packages, pages)
    index = folder / f"{documentation.name}-index"
    if not index.exists():
        with console.status(f"{documentation.name}: indexing"):
            await asyncio.to_thread(build_index, pages, index)
    results = {}
    for setting in SETTINGS:
        names = {
            setting.name if count is None else f"{setting.name}: the first {count}": count
            for count in setting.counts or (None,)
        }
        if only and setting.name not in only:
            names = {name: count for name, count in names.items() if name in only}
        whole = await search(setting, index, documentation.questions) if names else []
        for name, count in names.items():
            found = [replace(each, chunks=each.chunks[:count]) for each in whole]
            result = results[name] = summary(found)
            if backend:
                result["answers"] = await answer(backend, found)
                result |= {key: sum(row[key] for row in result["answers"]) for key in ("right", "cited")}
            told = {key: value for key, value in result.items() if not isinstance(value, list)}
            console.print(f"{documentation.name}, {name}: {told}")
    return results


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """Return a table of settings, with the results for each documentation."""
    table = Table(title="questions answered by the passages (right, cited); median seconds; words of passages")
    table.add_column("setting")
    for name in results:
        table.add_column(f"{name}{' (test)' * (name in TESTING)}", justify="right")
    for setting in next(iter(results.values())):
        cells = []
        for each in results.values():
            row = each[setting]
            answers = f" ({row['right']}, {row['cited']})" if "right" in row else ""
            cells.append(f"{row['num_answered']}{answers}; {row['p50_s']:.2f}; {row['num_words']:.0f}")
        table.add_row(setting, *cells)
    return table


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    documentations = [Documentation.read(name) for name in arguments.docs or CHOOSING + TESTING]
    packages = arguments.packages or folder / "packages"
    if not packages.exists():
        download(packages, [each.package for each in documentations])
    async with AsyncExitStack() as stack:
        backend = None
        if arguments.model:
            backend = VllmBackend(
                arguments.model, max_model_len=8192, kv_cache_bytes=1 << 30, engine_args={"dtype": "float32"}
            )
            await stack.enter_async_context(aclosing(backend))
            await backend.start(lambda line: None)
        return {each.name: await measure(each, packages, folder, arguments.only, backend) for each in documentations}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="with the unpacked packages")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the indexes, for the next run")
    parser.add_argument("--docs", action="append", choices=CHOOSING + TESTING, help="may be repeated")
    parser.add_argument("--only", action="append", metavar="SETTING", help="as the table names it; may be repeated")
    parser.add_argument("--model", metavar="FOLDER", help="a model that answers, such as `streamrag demo-model` makes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrag-") as temporary:
        results = asyncio.run(run(arguments, arguments.keep or Path(temporary)))
    console.print(table_of(results))
    if arguments.json:
        as_json = {"command": "make -C bench retrieval", "date": date.today().isoformat(), "versions": versions()}
        write_atomic(arguments.json, json.dumps(as_json | {"results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
