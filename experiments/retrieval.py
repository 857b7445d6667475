"""How many of 30 plain questions about other projects' documentation do the passages of a search answer?

    python experiments/retrieval.py [--packages FOLDER] [--keep FOLDER] [--only NAME] [--json FILE]

Each file in retrieval_questions/ names pages of a Debian package and asks 30 questions about them, each with the answers
that pages give: the page, and words that must all stand in one passage of it. Settings are chosen on the first two
documentations; the third is the test. The packages come from `apt-get download`, or from `--packages`, a folder with
what they hold. Questions are asked one at a time. `--keep` uses the indexes of an earlier run.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from answers import has_words
from rich.console import Console
from rich.table import Table

from streamrag import Chunk, HybridSource, Update, VectorSource, build_index
from streamrag.bench.provenance import versions
from streamrag.bench.summary import percentile
from streamrag.support.files import write_atomic

QUESTIONS = Path(__file__).with_name("retrieval_questions")
CHOOSING, TESTING = ("postgresql-doc", "python3-doc"), ("apache2-doc",)
LATE = "late-interaction"

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass(frozen=True)
class Setting:
    """A search to measure."""

    name: str
    source: Callable[[Path], HybridSource | VectorSource]
    passage_words: int = 180


def hybrid(passage_words: int = 180, **options: Any) -> Setting:
    """Return the setting of a `HybridSource` with these options."""
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return Setting(named, lambda index: HybridSource(index, **options), passage_words)


SETTINGS = (
    Setting("vectors, k=5", lambda index: VectorSource(index, k=5)),
    Setting("vectors, k=10", lambda index: VectorSource(index, k=10)),
    *(hybrid(k=k) for k in (2, 3, 5, 8, 10, 15)),
    *(hybrid(k=k, reranker=LATE) for k in (2, 3, 5, 10)),
    *(hybrid(k=k, reranker=LATE, sentences=k) for k in (2, 5)),
    *(hybrid(60, k=k) for k in (2, 5, 10, 20)),
    *(hybrid(60, k=k, reranker=LATE) for k in (2, 5)),
    hybrid(60, k=2, reranker=LATE, sentences=2),
)


@dataclass(frozen=True)
class Question:
    """A question, and its answers: each a page and words of it."""

    text: str
    answers: tuple[tuple[str, ...], ...]

    def is_answered(self, chunk: Chunk) -> bool:
        """Whether the passage has all words of one of the answers."""
        return any(chunk.uri == f"{page}.html" and has_words(chunk.text, words) for page, *words in self.answers)


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


async def ask(setting: Setting, index: Path, questions: tuple[Question, ...]) -> dict[str, Any]:
    """Search for each question, after one that is not counted, and return what was found and how long it took."""
    async with aclosing(setting.source(index)) as source:
        await source.start(lambda line: None)
        rows = []
        for question in (questions[-1], *questions):
            began_s = time.perf_counter()
            chunks: tuple[Chunk, ...] = ()
            async with aclosing(source.stream(question.text)) as events:  # type: ignore[type-var]
                async for event in events:
                    assert isinstance(event, Update), event
                    chunks = event.chunks
            rows.append((question, chunks, time.perf_counter() - began_s))
    del rows[0]
    return {
        "num_answered": sum(any(map(question.is_answered, chunks)) for question, chunks, _ in rows),
        "num_words": sum(len(chunk.text.split()) for _, chunks, _ in rows for chunk in chunks) / len(rows),
        "p50_s": percentile([took_s for _, _, took_s in rows], 0.5),
        "missed": [question.text for question, chunks, _ in rows if not any(map(question.is_answered, chunks))],
    }


def measure(documentation: Documentation, packages: Path, folder: Path, only: list[str]) -> dict[str, Any]:
    """Build the indexes that are missing in `folder`, and return the result of each setting."""
    pages = folder / documentation.name
    documentation.copy_pages(packages, pages)
    results = {}
    for setting in SETTINGS:
        name = f"{setting.name}; {setting.passage_words} words"
        if only and name not in only:
            continue
        index = folder / f"{documentation.name}-{setting.passage_words}"
        if not index.exists():
            with console.status(f"{documentation.name}: indexing passages of {setting.passage_words} words"):
                build_index(pages, index, passage_words=setting.passage_words)
        result = asyncio.run(ask(setting, index, documentation.questions))
        console.print(f"{documentation.name}, {name}: {result['num_answered']}, {result['p50_s']:.3f} s")
        results[name] = result
    return results


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """Return a table of settings: for each documentation the questions answered, the seconds and the words."""
    table = Table(title="questions of 30 that the passages answer; median seconds; words of the passages")
    table.add_column("setting")
    for name in results:
        table.add_column(f"{name}{' (test)' * (name in TESTING)}", justify="right")
    for setting in next(iter(results.values())):
        cells = (each[setting] for each in results.values())
        table.add_row(setting, *(f"{c['num_answered']}; {c['p50_s']:.2f}; {c['num_words']:.0f}" for c in cells))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="with the unpacked packages")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the indexes, for the next run")
    parser.add_argument("--only", action="append", metavar="SETTING", help="as the table names it; may be repeated")
    parser.add_argument("--docs", action="append", choices=CHOOSING + TESTING, help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the results")
    arguments = parser.parse_args()
    documentations = [Documentation.read(name) for name in arguments.docs or CHOOSING + TESTING]
    with tempfile.TemporaryDirectory(prefix="streamrag-") as temporary:
        folder = arguments.keep or Path(temporary)
        packages = arguments.packages or folder / "packages"
        if not packages.exists():
            download(packages, [each.package for each in documentations])
        results = {each.name: measure(each, packages, folder, arguments.only) for each in documentations}
    console.print(table_of(results))
    if arguments.json:
        as_json = {
            "command": "python experiments/retrieval.py",
            "date": date.today().isoformat(),
            "versions": versions(),
            "results": results,
        }
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
