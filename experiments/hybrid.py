"""What keywords, vectors and a reranker find, how long each takes, and what their updates cost; and keyword indexes.

    python experiments/hybrid.py [--cross-encoder PATH] [--only PART] [--json FILE]

Two corpora. Streamrag's documentation with 40 questions, where a passage is right if it has the words of the answer.
And the docstrings of Python's standard library, from 100 of which one sentence was taken away before they were indexed:
that sentence is the question, and the passage that it was taken from the answer. Questions are asked one at a time. For
size, keyword indexes are compared on 100,000 made passages, of eight sentences of those docstrings each.
"""

import argparse
import ast
import asyncio
import json
import os
import platform
import random
import re
import shutil
import sqlite3
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from documentation_questions import QUESTIONS
from rank_bm25 import BM25Okapi  # type: ignore[import-untyped,unused-ignore]
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Chunk, HybridSource, Source, Update, VectorSource, build_index
from streamrag.bench.provenance import versions
from streamrag.bench.summary import percentile
from streamrag.core.text import relevant_terms, terms
from streamrag.sources.index.index_folder import KEYWORDS, PASSAGES, passage_line
from streamrag.sources.index.keywords import KeywordIndex, new_stem, write_keywords
from streamrag.support.files import write_atomic

DOCS = Path(__file__).resolve().parent.parent / "docs"
K, CANDIDATES, BATCH_SIZE = 5, 20, 4
NUM_HELD_OUT = 100
NUM_MADE, NUM_SENTENCES_EACH = 100_000, 8
NUM_SLOW = 5
"""Queries that are asked of rank-bm25, which takes half a second for each."""

SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "encodings"}

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass(frozen=True)
class Question:
    text: str
    is_answer: Callable[[Chunk], bool]


@dataclass(frozen=True)
class Corpus:
    name: str
    folder: Path
    questions: list[Question]


# ------------------------------------------------------------------------------------------------------ the corpora


def plain(text: str) -> str:
    """Small letters, without what Markdown adds."""
    return " ".join(text.replace("`", "").replace("*", "").lower().split())


def documentation(folder: Path) -> Corpus:
    folder.mkdir()
    for page in DOCS.glob("*.md"):
        if page.name != "api.md":
            shutil.copy(page, folder)

    def has(words: tuple[str, ...]) -> Callable[[Chunk], bool]:
        return lambda chunk: all(word in plain(chunk.text) for word in words)

    return Corpus("documentation", folder, [Question(text, has(words)) for text, words in QUESTIONS.items()])


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Module, name and text of each docstring of the standard library that has at least a dozen words."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if NOT_LIBRARY.intersection(parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text.split()) >= 12:
                    yield ".".join(parts), getattr(node, "name", parts[-1]), " ".join(text.split())


def held_out(folder: Path) -> Corpus:
    folder.mkdir()
    rng = random.Random(0)
    found = list(docstrings())
    long = [number for number, (_, _, text) in enumerate(found) if len(SENTENCE.split(text)) >= 4]
    questions: dict[int, tuple[str, str]] = {}
    for number in rng.sample(long, len(long)):
        sentences = SENTENCE.split(found[number][2])
        place = rng.randrange(1, len(sentences))
        before, sentence = sentences[place - 1 : place + 1]
        if 8 <= len(sentence.split()) <= 30 and len(before.split()) >= 5 and len(questions) < NUM_HELD_OUT:
            questions[number] = (sentence, before)
            found[number] = (*found[number][:2], " ".join((*sentences[:place], *sentences[place + 1 :])))
    pages: dict[str, list[str]] = {}
    for module, name, text in found:
        pages.setdefault(module, [f"# {module}"]).append(f"## {name}\n\n{text}")
    for module, parts in pages.items():
        (folder / f"{module}.md").write_text("\n\n".join(parts))

    def has(module: str, before: str) -> Callable[[Chunk], bool]:
        return lambda chunk: chunk.uri == f"{module}.md" and " ".join(before.split()) in " ".join(chunk.text.split())

    asked = [Question(sentence, has(found[i][0], before)) for i, (sentence, before) in questions.items()]
    return Corpus("held-out sentences", folder, asked)


# ------------------------------------------------------------------------------------------------------- the search


@dataclass
class Asked:
    """One question, and what was best after each stage: keywords, fusion, and each batch."""

    stages: list[tuple[Chunk, ...]] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    num_updates: int = 0
    num_computed: int = 0
    """Passages that are prefilled when every update is: those behind the first that changed."""


async def ask(source: Source, question: str, num_batches: int) -> Asked:
    """Stages that brought nothing new leave what was best; the end of the last one is that of the stream."""
    asked = Asked([() for _ in range(num_batches + 2)], [0.0] * (num_batches + 2))
    began_s = time.perf_counter()
    before: tuple[Chunk, ...] = ()
    async with aclosing(source.stream(question)) as events:  # type: ignore[type-var]
        async for event in events:
            if not isinstance(event, Update):
                raise RuntimeError(str(event))
            num_left = event.hint.num_chunks if event.hint and event.hint.num_chunks is not None else 0
            for stage in range(max(0, num_batches + 1 - num_left), num_batches + 2):
                asked.stages[stage] = event.chunks
                asked.at_s[stage] = time.perf_counter() - began_s
            asked.num_computed += len(event.chunks) - kept(before, event.chunks)
            asked.num_updates += 1
            before = event.chunks
    asked.at_s[-1] = time.perf_counter() - began_s
    return asked


async def search(corpus: Corpus, index: Path, rerankers: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    vectors = VectorSource(index, k=K, ladder=(4 * CANDIDATES,))
    await vectors.start(lambda line: None)
    try:
        alone = [await ask(vectors, each.text, 0) for each in track(corpus.questions, "vectors", console=console)]
    finally:
        await vectors.aclose()
    rows.append(row(corpus, "vectors alone", [asked.stages[-1] for asked in alone], [a.at_s[-1] for a in alone]))
    for reranker in rerankers:
        source = HybridSource(index, k=K, reranker=reranker, candidates=CANDIDATES, batch_size=BATCH_SIZE)
        num_batches = -(-CANDIDATES // BATCH_SIZE)
        await source.start(lambda line: None)
        try:
            await ask(source, "What is it?", num_batches)
            found = [
                await ask(source, each.text, num_batches) for each in track(corpus.questions, reranker, console=console)
            ]
        finally:
            await source.aclose()
        if reranker == rerankers[0]:
            for stage, name in enumerate(("keywords", "keywords and vectors, fused")):
                rows.append(row(corpus, name, [a.stages[stage] for a in found], [a.at_s[stage] for a in found]))
        reranked = row(corpus, f"fused, then {reranker}", [a.stages[-1] for a in found], [a.at_s[-1] for a in found])
        batch_s = [(a.at_s[-1] - a.at_s[1]) / num_batches for a in found]
        rows.append(
            reranked
            | {
                "batch_p50_s": percentile(batch_s, 0.5),
                "num_updates": mean(a.num_updates for a in found),
                "num_passages_computed": mean(a.num_computed for a in found),
                "final_after_first_batch": mean(a.stages[2] == a.stages[-1] for a in found),
                "first_is_final_after_first_batch": mean(a.stages[2][:1] == a.stages[-1][:1] for a in found),
                "kept_of_keywords": mean(kept(a.stages[0], a.stages[-1]) for a in found),
                "kept_of_fused": mean(kept(a.stages[1], a.stages[-1]) for a in found),
                "kept_by_batches": [
                    mean(kept(*pair) for a in found for pair in [a.stages[stage : stage + 2]])
                    for stage in range(1, num_batches + 1)
                ],
            }
        )
    return rows


def kept(before: Sequence[Chunk], after: Sequence[Chunk]) -> int:
    """Passages at the front that stay: their LCP."""
    return next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )


def row(corpus: Corpus, name: str, best: Sequence[Sequence[Chunk]], at_s: Sequence[float]) -> dict[str, Any]:
    def hit(num: int) -> float:
        pairs = zip(corpus.questions, best, strict=True)
        return mean(any(map(question.is_answer, chunks[:num])) for question, chunks in pairs)

    return {
        "corpus": corpus.name,
        "what": name,
        "hit@1": hit(1),
        "hit@5": hit(K),
        "p50_s": percentile(list(at_s), 0.5),
        "p90_s": percentile(list(at_s), 0.9),
    }


# --------------------------------------------------------------------------------------------------- keyword indexes


@dataclass(frozen=True)
class KeywordRow:
    what: str
    build_s: float
    open_ms: float
    size_mib: float
    p50_ms: float
    p90_ms: float


def keyword_rows(folder: Path) -> Iterator[KeywordRow]:
    rng = random.Random(0)
    sentences = [sentence for _, _, text in docstrings() for sentence in SENTENCE.split(text)]
    texts = [" ".join(rng.sample(sentences, NUM_SENTENCES_EACH)) for _ in range(NUM_MADE)]
    queries = [sentence for sentence in rng.sample(sentences, 1000) if 8 <= len(sentence.split()) <= 30][:100]
    (folder / PASSAGES).write_text("".join(passage_line(asdict(Chunk(text, "made.md"))) for text in texts))
    yield timed("ours", lambda: write_keywords(folder), lambda: KeywordIndex(folder, NUM_MADE).search, queries, folder)
    yield timed("SQLite FTS5", lambda: write_fts(folder, texts), lambda: open_fts(folder), queries, folder)
    stem = new_stem()
    made: list[Any] = []

    def build() -> None:
        made.append(BM25Okapi([terms(text, stem) for text in texts]))

    def opened() -> Callable[[str, int], object]:
        return lambda query, k: made[0].get_top_n(relevant_terms(query, stem), range(NUM_MADE), k)

    yield timed("rank-bm25, in memory", build, opened, queries[:NUM_SLOW], None)
    if find_spec("bm25s"):
        yield from bm25s_row(folder, texts, queries)
    else:
        console.print("bm25s is not compared: it is not installed (pip install bm25s)")


def timed(
    what: str,
    build: Callable[[], object],
    open_index: Callable[[], Callable[[str, int], object]],
    queries: Sequence[str],
    folder: Path | None,
) -> KeywordRow:
    before = set(folder.rglob("*")) - {folder / KEYWORDS} if folder else set()
    build_s = seconds(build)
    opened: list[Callable[[str, int], object]] = []
    open_ms = seconds(lambda: opened.append(open_index())) * 1e3
    search = opened[0]
    size = sum(path.stat().st_size for path in set(folder.rglob("*")) - before if path.is_file()) if folder else 0
    search(queries[0], CANDIDATES)
    took_ms = [seconds(lambda query=query: search(query, CANDIDATES)) * 1e3 for query in queries]  # type: ignore[misc]
    return KeywordRow(what, build_s, open_ms, size / 2**20, percentile(took_ms, 0.5), percentile(took_ms, 0.9))


def seconds(work: Callable[[], object]) -> float:
    """Of computing by this thread: what other programs take does not count."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def write_fts(folder: Path, texts: Iterable[str]) -> None:
    with closing(sqlite3.connect(folder / "fts.sqlite", isolation_level=None)) as file:
        file.executescript("PRAGMA journal_mode = OFF; BEGIN")
        file.execute("CREATE VIRTUAL TABLE passages USING fts5(text, content='', tokenize='porter unicode61')")
        file.executemany("INSERT INTO passages(rowid, text) VALUES (?, ?)", enumerate(texts))
        file.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        file.execute("COMMIT")


def open_fts(folder: Path) -> Callable[[str, int], object]:
    file = sqlite3.connect(folder / "fts.sqlite")
    found = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
    return lambda query, k: file.execute(found, (" OR ".join(f'"{t}"' for t in relevant_terms(query)), k)).fetchall()


def bm25s_row(folder: Path, texts: list[str], queries: Sequence[str]) -> Iterator[KeywordRow]:
    import bm25s  # type: ignore[import-not-found,import-untyped,unused-ignore]

    saved = folder / "bm25s"

    def tokens(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", show_progress=False)

    def build() -> None:
        made = bm25s.BM25()
        made.index(tokens(texts), show_progress=False)
        made.save(saved)

    def opened() -> Callable[[str, int], object]:
        made = bm25s.BM25.load(saved, mmap=True)
        return lambda query, k: made.retrieve(tokens([query]), k=k, show_progress=False)

    yield timed("bm25s", build, opened, queries, folder)


# ------------------------------------------------------------------------------------------------------- the results


def print_search(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("questions", "best after", "hit@1", "hit@5", "median", "9 of 10 within", title_justify="left")
    for each in rows:
        figures = f"{each['hit@1']:.0%}", f"{each['hit@5']:.0%}", f"{each['p50_s']:.3f} s", f"{each['p90_s']:.3f} s"
        table.add_row(each["corpus"], each["what"], *figures)
    console.print(table)
    for each in (each for each in rows if "num_updates" in each):
        by_batch = ", ".join(f"{num:.1f}" for num in each["kept_by_batches"])
        console.print(
            f"{each['corpus']}, {each['what']}: {each['num_updates']:.1f} updates of {K} passages a query, "
            f"{each['num_passages_computed']:.1f} passages computed if every update is; a batch of {BATCH_SIZE} takes "
            f"{each['batch_p50_s']:.2f} s. Passages at the front of the final context that stood there already: "
            f"{each['kept_of_keywords']:.1f} after keywords, {each['kept_of_fused']:.1f} after the fusion; each batch "
            f"keeps {by_batch} of {K}. The first passage is final after the first batch in "
            f"{each['first_is_final_after_first_batch']:.0%}, all of them in {each['final_after_first_batch']:.0%}."
        )


def print_keywords(rows: Sequence[KeywordRow]) -> None:
    table = Table(
        f"{NUM_MADE:,} made passages, CPU times", "built in", "opened in", "on disk", "query, median", "9 of 10 within"
    )
    for each in rows:
        size = f"{each.size_mib:.0f} MiB" if each.size_mib else "-"
        figures = (
            f"{each.build_s:.1f} s",
            f"{each.open_ms:.1f} ms",
            size,
            f"{each.p50_ms:.1f} ms",
            f"{each.p90_ms:.1f} ms",
        )
        table.add_row(each.what, *figures)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cross-encoder", metavar="PATH", help="a reranker to measure beside late interaction")
    parser.add_argument("--only", choices=("keywords", "documentation", "held-out"), help="one part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rerankers = ["late-interaction", *filter(None, [arguments.cross_encoder])]
    rows: list[dict[str, Any]] = []
    keyword: list[KeywordRow] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        makers = {"documentation": documentation, "held-out": held_out}
        for name, make in makers.items():
            if arguments.only in (None, name):
                corpus = make(folder / name)
                with console.status(f"building an index: {name}"):
                    summary = build_index(corpus.folder, folder / f"{name}-index")
                console.print(f"{corpus.name}: {summary.num_passages} passages, {len(corpus.questions)} questions")
                rows += asyncio.run(search(corpus, folder / f"{name}-index", rerankers))
        if arguments.only in (None, "keywords"):
            (folder / "keywords").mkdir()
            with console.status("building keyword indexes"):
                keyword = list(keyword_rows(folder / "keywords"))
    if rows:
        print_search(rows)
    if keyword:
        print_keywords(keyword)
    if arguments.json:
        measured = {
            "versions": versions(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "search": rows,
            "keywords": [asdict(each) for each in keyword],
        }
        write_atomic(arguments.json, json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
