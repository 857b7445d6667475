"""Against a real PostgreSQL with pgvector; `toy_embedder` makes the vectors."""

import asyncio
import logging
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import psutil
import psycopg
import pytest
from postgres_server import as_vector, execute, fill, postgres_server
from psycopg import sql
from source_helpers import alive, citations, events_of, must_be_started, stages_left, until, updates
from toy_embedder import DIMENSION, embed

from streamrag.core import Chunk, CutShort, Hint, Skipped, Update
from streamrag.errors import (
    ConfigurationError,
    IndexMismatchError,
    IndexMissingError,
    SourceError,
    VectorIndexError,
    WorkerError,
)
from streamrag.pipeline import Pipeline
from streamrag.sources.index.embedder import EmbedderIdentity
from streamrag.sources.index.embedder_pool import EmbedderPool
from streamrag.sources.postgres.link import Address
from streamrag.sources.postgres.query import Search
from streamrag.sources.postgres.source import PgVectorSource
from streamrag.sources.postgres.table import Ladder, PassageTable, record_of
from streamrag.sources.workers.pool import Share
from streamrag.testing import ScriptedBackend

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

EMBEDDER = "toy_embedder:embed"
NUM_ROWS = 1_500
COLUMNS = "uri passage title text embedding"
NUM_CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'streamrag'"
CHANCE = random.Random(0)
TEXTS = [" ".join(f"w{CHANCE.randrange(1000)}" for _ in range(12)) for _ in range(NUM_ROWS)]
QUERIES = [" ".join(f"w{(13 * number + 7 * place) % 997}" for place in range(8)) for number in range(12)]


def vectors_of(texts: Sequence[str]) -> np.ndarray:
    vectors = embed(list(texts))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_table(dsn: str, name: str, texts: Sequence[str] = TEXTS, *, index: str | None = "hnsw") -> None:
    execute(
        dsn,
        f"CREATE TABLE {name} (uri text, passage int, title text, text text, embedding vector({DIMENSION}), "
        "words tsvector GENERATED ALWAYS AS (to_tsvector('simple', text)) STORED)",
    )
    vectors = vectors_of(texts)
    rows = [(f"{n}.md", n % 3, f"Title {n}", text, as_vector(vectors[n])) for n, text in enumerate(texts)]
    fill(dsn, name, rows, COLUMNS)
    execute(dsn, f"CREATE INDEX ON {name} USING gin (words)")
    if index:
        execute(dsn, f"CREATE INDEX ON {name} USING {index} (embedding vector_cosine_ops)")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with a table `passages` that nobody changes, and a view `slow` of it that takes for ever."""
    with postgres_server() as dsn:
        make_table(dsn, "passages")
        execute(dsn, "CREATE VIEW slow AS SELECT passages.* FROM passages, (SELECT pg_sleep(1000)) AS s")
        yield dsn


@pytest.fixture
def dsn(server: str) -> str:
    """The server, once it has noticed that the test before has closed its connections."""
    end_s = time.monotonic() + 20
    while execute(server, NUM_CONNECTIONS) != [(0,)]:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return server


class InThisProcess(EmbedderPool):
    """Embeds here: starting a process for each test would take most of the tests' time."""

    async def start(self) -> EmbedderIdentity:
        return EmbedderIdentity(EMBEDDER, DIMENSION, ())

    async def query(self, text: str, share: Share) -> str:
        words = {task for task in asyncio.all_tasks() if task.get_name() == "streamrag words of a query"}
        if words:
            await asyncio.wait(words)
        return as_vector(vectors_of([text])[0])


@asynccontextmanager
async def started(dsn: str, *, has_worker: bool = False, **options: Any) -> AsyncIterator[PgVectorSource]:
    source = PgVectorSource(dsn, **{"k": 5, "embedder": EMBEDDER} | options)
    with pytest.MonkeyPatch.context() as patch:
        if not has_worker:
            patch.setattr("streamrag.sources.postgres.source.EmbedderPool", InThisProcess)
        await source.start(lambda line: None)
    async with aclosing(source):
        yield source


def exact_ranking(texts: Sequence[str], query: str) -> list[tuple[str, float]]:
    scores = vectors_of(texts) @ vectors_of([query])[0]
    return [(f"{i}.md", float(scores[i])) for i in np.argsort(-scores, kind="stable")]


def active(dsn: str) -> list[tuple[int, str]]:
    """Process ids and statements of what the server does for us."""
    return execute(
        dsn, "SELECT pid, query FROM pg_stat_activity WHERE application_name = 'streamrag' AND state <> 'idle'"
    )


async def until_it_runs(dsn: str) -> int:
    """The server's process that searches."""

    def runs() -> bool:
        return any("left(" in query for _, query in active(dsn))

    await until(lambda: runs())
    ((process_id, _),) = active(dsn)
    return process_id


# -------------------------------------------------------------------------------------------------------- searching


async def test_the_last_update_is_what_exact_search_finds(dsn: str) -> None:
    async with started(dsn) as source:
        for query in QUERIES:
            final = (await updates(source, query))[-1].chunks
            expected = exact_ranking(TEXTS, query)[:5]
            assert [chunk.uri for chunk in final] == [uri for uri, _ in expected]
            assert [chunk.score for chunk in final] == pytest.approx([score for _, score in expected], abs=1e-5)


async def test_words_come_first_and_each_update_brings_something_new(dsn: str) -> None:
    num_updates = []
    async with started(dsn) as source:
        for query in QUERIES:
            found = await updates(source, query)
            assert stages_left(found)[0] == 6
            assert all(set(chunk.text.split()) & set(query.split()) for chunk in found[0].chunks)
            num_updates.append(len(found))
    assert max(num_updates) > 2


async def test_a_chunk_has_the_fields_of_its_row(dsn: str) -> None:
    async with started(dsn, k=1, words="", has_worker=True) as source:
        chunk = (await updates(source, TEXTS[7]))[-1].chunks[0]
    assert chunk == Chunk(TEXTS[7], uri="7.md", title="Title 7", passage=1, score=chunk.score)
    assert chunk.score == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "num_left"),
    [
        ({"words": ""}, 5),
        ({"words": "", "ladder": ()}, 0),
        ({"words": "", "exact_rows": 0}, 4),
        ({"words": "", "ladder": (40,), "exact_rows": 0}, 0),
        ({"words": "", "ladder": (400, 800, 1600, 3200), "exact_rows": 0}, 2),
        ({"ladder": ()}, 1),
    ],
)
async def test_stages_are_those_asked_for(dsn: str, options: dict[str, Any], num_left: int) -> None:
    async with started(dsn, **options) as source:
        found = await updates(source, TEXTS[3])
    assert found[0].hint == Hint(num_chunks=num_left)
    assert found[-1].chunks[0].uri == "3.md"


async def test_an_ivfflat_index_has_a_ladder_of_probes(dsn: str) -> None:
    make_table(dsn, "lists", index="ivfflat")
    async with started(dsn, table="lists", words="", exact_rows=0) as source:
        opened = source._opened
        assert opened
        assert opened.table.ladder == Ladder("ivfflat.probes", 100, "relaxed_order")
        assert [stage.what for stage in await source._stages(opened)] == [
            f"ivfflat.probes = {probes}" for probes in (1, 2, 4, 8, 16)
        ]
        for query in QUERIES:
            final = (await updates(source, query))[-1].chunks
            assert [chunk.score for chunk in final] == sorted((chunk.score or 0 for chunk in final), reverse=True)
            assert len(final) == 5
    execute(dsn, "DROP TABLE lists")


async def test_a_table_of_few_rows_is_searched_exactly_at_once(dsn: str) -> None:
    make_table(dsn, "few", TEXTS[:3])
    async with started(dsn, table="few", words="") as source:
        (update,) = await updates(source, TEXTS[1])
    assert update.hint == Hint(num_chunks=0)
    assert [chunk.uri for chunk in update.chunks] == [uri for uri, _ in exact_ranking(TEXTS[:3], TEXTS[1])]
    execute(dsn, "DELETE FROM few")
    async with started(dsn, table="few") as source:
        assert await updates(source, TEXTS[1]) == []
    execute(dsn, "DROP TABLE few")


async def test_a_table_may_grow_while_it_is_searched(dsn: str) -> None:
    make_table(dsn, "growing", TEXTS[:3], index=None)
    async with started(dsn, table="growing", exact_rows=100, words="") as source:
        assert len((await updates(source, QUERIES[0]))[-1].chunks) == 3
        execute(dsn, f"INSERT INTO growing ({COLUMNS.replace(' ', ', ')}) SELECT uri, passage, title, text, embedding "
                "FROM passages", "ANALYZE growing")  # fmt: skip
        with pytest.raises(SourceError, match="CREATE INDEX ON growing USING hnsw"):
            await updates(source, QUERIES[0])
    execute(dsn, "DROP TABLE growing")


async def test_many_queries_at_once_get_their_own_answers(dsn: str) -> None:
    async with started(dsn, num_connections=2) as source:
        alone = [(await updates(source, query))[-1] for query in QUERIES]
        together = await asyncio.gather(*(updates(source, query) for query in QUERIES))
        assert [found[-1] for found in together] == alone
        assert execute(dsn, NUM_CONNECTIONS) == [(2,)]


async def test_a_pipeline_cites_the_passages_that_a_postgres_source_found(dsn: str) -> None:
    cited = await citations(PgVectorSource(dsn, k=3, embedder=EMBEDDER), QUERIES[0])
    assert [citation.uri for citation in cited] == [uri for uri, _ in exact_ranking(TEXTS, QUERIES[0])[:3]]


# ------------------------------------------------------------------------------------------- the caller's own tables

HOSTILE_NAME = 'a "b"; DROP TABLE passages; -- %s {} \u202e'


@pytest.fixture
def own_table(dsn: str) -> Iterator[str]:
    """Every name in it is hostile, and none is what we would call it."""
    name = sql.Identifier("my.schema", HOSTILE_NAME)
    column = sql.Identifier(HOSTILE_NAME)
    execute(
        dsn,
        'CREATE SCHEMA "my.schema"',
        sql.SQL("CREATE TABLE {} (id uuid, body varchar, {} bigint, year int, kind text, v halfvec({}))").format(
            name, column, sql.Literal(DIMENSION)
        ),
        sql.SQL("CREATE INDEX ON {} USING hnsw (v halfvec_l2_ops)").format(name),
        sql.SQL("CREATE INDEX ON {} USING gin (to_tsvector('simple', body))").format(name),
    )
    vectors = vectors_of(TEXTS[:20])
    with psycopg.connect(dsn, autocommit=True) as connection:
        for n in range(20):
            connection.execute(
                sql.SQL("INSERT INTO {} VALUES (%s, %s, %s, %s, %s, %s)").format(
                    sql.Identifier(*(part.replace("%", "%%") for part in ("my.schema", HOSTILE_NAME)))
                ),
                (UUID(int=n), TEXTS[n], n, 2000 + n, None if n % 2 else "x' OR '1' = '1", as_vector(vectors[n])),
            )
    yield dsn
    execute(dsn, 'DROP SCHEMA "my.schema" CASCADE')


OWN: dict[str, Any] = {
    "table": ("my.schema", HOSTILE_NAME),
    "columns": {"uri": "id", "text": "body", "passage": HOSTILE_NAME, "embedding": "v"},
}


async def test_any_table_will_do_whatever_its_names_are(own_table: str) -> None:
    async with started(own_table, k=2, **OWN) as source:
        assert source._opened
        assert (source._opened.table.metric, source._opened.table.words) == ("l2", "simple")
        by_words, by_distance = await updates(source, TEXTS[4])
        assert [chunk.title for chunk in by_words.chunks] == ["", ""]
        best = by_distance.chunks[0]
        assert best == Chunk(TEXTS[4], uri=str(UUID(int=4)), passage=4, score=best.score)
        assert best.score == pytest.approx(0, abs=1e-2)  # a distance, with its sign changed
    assert execute(own_table, "SELECT count(*) FROM passages") == [(NUM_ROWS,)]


@pytest.mark.parametrize(
    ("where", "years"),
    [
        ({"year": 2003}, {2003}),
        ({"year": [2003, 2004]}, {2003, 2004}),
        ({"year": (2003, 2004), "kind": None}, {2003}),
        ({"kind": "x' OR '1' = '1"}, set(range(2000, 2020, 2))),
        ({"kind": "x"}, set()),
        ({"year": []}, set()),
        ({"kind": ["x", None]}, set(range(2001, 2020, 2))),
        ({"kind": [None], "year": [2003, 2004]}, {2003}),
        ({"kind": ["x' OR '1' = '1"]}, set(range(2000, 2020, 2))),
        ({HOSTILE_NAME: 7}, {2007}),
        ({"id": UUID(int=5)}, {2005}),
    ],
)
async def test_a_filter_holds_in_every_stage(own_table: str, where: dict[str, Any], years: set[int]) -> None:
    async with started(own_table, k=20, where=where, **OWN) as source:
        found = await updates(source, TEXTS[4])
    for update in found:
        assert {2000 + chunk.passage for chunk in update.chunks} <= years
    assert not years or {2000 + chunk.passage for chunk in found[-1].chunks} == years


async def test_an_index_goes_on_until_enough_rows_fit_a_filter(dsn: str) -> None:
    """With 10 candidates, and a third of the rows fit, an index that does not go on would find too few."""
    async with started(dsn, k=10, where={"passage": 1}, words="", ladder=(10,), exact_rows=0) as source:
        for query in QUERIES:
            (update,) = await updates(source, query)
            assert [chunk.passage for chunk in update.chunks] == [1] * 10


async def test_columns_may_be_missing_or_left_out(dsn: str) -> None:
    async with started(dsn, columns={"title": None, "passage": None, "words": None}, k=2) as source:
        final = (await updates(source, TEXTS[8]))[-1].chunks
    assert [(chunk.title, chunk.passage) for chunk in final] == [("", 0), ("", 0)]


@pytest.mark.parametrize("query", ["", "\0", "half \ud800 a pair", "a & ! | ( ' : * \\ %s", "w1 " * 50_000])
async def test_any_query_is_only_words(dsn: str, query: str) -> None:
    async with started(dsn) as source:
        assert len((await updates(source, query))[-1].chunks) == 5


HOSTILE_ROWS: list[tuple[Any, ...]] = [
    (None, 0, "no uri", "text"),
    ("null", 0, "no text", None),
    ("untitled", 0, None, "a text without a title"),
    ("unnumbered", None, "t", "a text without a number"),
    ("unnumbered", None, "t", "another text without a number"),
    ("negative", -5, "t", "a negative number"),
    ("large", 1 << 40, "t", "a number that is too large"),
    ("long title", 0, "T" * 100_000, "a title that is long"),
    ("u" * 5_000, 0, "t", "a uri that is long"),
    ("long", 0, "t", "long text " * 100_000),
    ("control", 0, "\x01\x1b[2J\u202e\ufffe", "\x01\x1b[2J\u202e\ufffe control"),
    ("same", 0, "t", "the same"),
    ("same", 0, "t", "the same"),
    ("empty", 0, "", ""),
]


async def test_a_hostile_table_gives_passages_within_limits(dsn: str) -> None:
    execute(
        dsn, "CREATE TABLE hostile (uri text, passage bigint, title text, text text, embedding vector, "
        "words tsvector GENERATED ALWAYS AS (to_tsvector('simple', left(text, 1000))) STORED)",
        "CREATE INDEX ON hostile USING gin (words)",
    )  # fmt: skip
    vector = as_vector(vectors_of(["text"])[0])
    rows = [(*row, vector) for row in HOSTILE_ROWS]
    rows += [("zeros", 0, "t", "a text", as_vector([0.0] * DIMENSION)), ("none", 0, "t", "a text", None)]
    fill(dsn, "hostile", rows, COLUMNS)
    async with Pipeline(PgVectorSource(dsn, table="hostile", k=50, embedder=EMBEDDER), ScriptedBackend()) as pipeline:
        async with pipeline.stream("text") as stream:
            async for _ in stream:
                pass
    assert stream.result.source_error is None
    async with started(dsn, table="hostile", k=50) as source:
        events = await events_of(source, "text")
    assert {event for event in events if isinstance(event, Skipped)} == {
        Skipped("long", "passage 0 has over 20,000 characters, and the rest was left out"),
        Skipped("empty", "it has no text"),
    }
    final = events[-1]
    assert isinstance(final, Update)
    places = [(chunk.uri[:20], chunk.passage) for chunk in final.chunks]
    expected = [(str(row[0])[:20], 0) for row in HOSTILE_ROWS if row[0] is not None and row[3]]
    expected[expected.index(("unnumbered", 0))] = ("unnumbered", 1)
    assert sorted(places) == sorted(expected)
    assert max(len(chunk.text) + len(chunk.title) + len(chunk.uri) for chunk in final.chunks) <= 22_500
    execute(dsn, "DROP TABLE hostile")


@pytest.fixture
def of_any_dimension(dsn: str) -> Iterator[str]:
    execute(dsn, "CREATE TABLE mixed (uri text, text text, embedding vector)")
    rows = [
        (f"{n}.md", text, as_vector(vector))
        for n, (text, vector) in enumerate(zip(TEXTS[:3], vectors_of(TEXTS[:3]), strict=True))
    ]
    fill(dsn, "mixed", [*rows, ("other", "an old one", "[1,2,3]")], "uri text embedding")
    yield dsn
    execute(dsn, "DROP TABLE mixed")


async def test_vectors_of_another_dimension_are_left_out_and_counted_at_the_start(of_any_dimension: str) -> None:
    said: list[str] = []
    source = PgVectorSource(of_any_dimension, table="mixed", embedder=EMBEDDER)
    try:
        await source.start(said.append)
        (update,) = await updates(source, TEXTS[1])
    finally:
        await source.aclose()
    assert [chunk.uri for chunk in update.chunks] == [uri for uri, _ in exact_ranking(TEXTS[:3], TEXTS[1])]
    assert any("has vectors of 3 dimensions too" in line and "1 of 4 passages are left out" in line for line in said)


async def test_a_table_with_vectors_of_other_dimensions_only_is_refused(of_any_dimension: str) -> None:
    execute(of_any_dimension, f"DELETE FROM mixed WHERE vector_dims(embedding) = {DIMENSION}")
    with pytest.raises(IndexMismatchError, match=f"has 3 dimensions, and embedder='{EMBEDDER}' has {DIMENSION}"):
        async with started(of_any_dimension, table="mixed"):
            pass
    execute(of_any_dimension, "DELETE FROM mixed")
    async with started(of_any_dimension, table="mixed") as source:
        assert await updates(source, "anything") == []


@pytest.mark.parametrize("index", [None, "hnsw"])
@pytest.mark.parametrize("length", [1e-25, 1e-22, 1e25])
async def test_vectors_whose_cosine_pgvector_gets_wrong_are_no_passages(
    dsn: str, index: str | None, length: float
) -> None:
    make_table(dsn, "lengths", TEXTS[:8], index=index)
    vector = as_vector([float(f"{value:.9g}") for value in vectors_of([TEXTS[9]])[0] * length])
    fill(dsn, "lengths", [("wrong.md", 0, "", "another text", vector)], COLUMNS)
    for options in ({}, {"ladder": (40,), "exact_rows": 0})[: 2 if index else 1]:
        async with started(dsn, table="lengths", words="", k=20, **options) as source:
            final = (await updates(source, TEXTS[1]))[-1].chunks
        assert [chunk.uri for chunk in final] == [uri for uri, _ in exact_ranking(TEXTS[:8], TEXTS[1])]
    execute(dsn, "DROP TABLE lengths")


async def test_texts_that_are_no_utf8_are_an_error_and_no_crash(dsn: str) -> None:
    execute(dsn, "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    other = psycopg.conninfo.make_conninfo(dsn, dbname="ascii")
    execute(other, "CREATE EXTENSION vector")
    make_table(other, "passages", TEXTS[:3])
    execute(other, r"UPDATE passages SET text = convert_from(decode('fffe', 'hex'), 'SQL_ASCII')")
    async with started(other) as source:
        with pytest.raises(SourceError, match="does not fit the database's encoding"):
            await updates(source, "a")


async def test_words_that_the_database_has_no_characters_for_are_left_out(dsn: str) -> None:
    execute(dsn, "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    other = psycopg.conninfo.make_conninfo(dsn, dbname="latin")
    execute(other, "CREATE EXTENSION vector")
    make_table(other, "passages", ["Zürich", "Genève"])
    async with started(other) as source:
        assert (await updates(source, "Zürich 漢字"))[-1].chunks[0].text == "Zürich"


async def test_words_that_the_database_cannot_search_are_left_out(dsn: str) -> None:
    make_table(dsn, "long", TEXTS[:3])
    execute(dsn, "ALTER TABLE long DROP COLUMN words")
    execute(dsn, "UPDATE long SET text = (SELECT string_agg('word' || i, ' ') FROM generate_series(1, 200000) i)")
    async with started(dsn, table="long", words="english") as source:
        assert source._opened
        assert await source._find_words(source._opened, "word") == []


async def test_a_configuration_of_words_that_is_not_there_is_an_error_of_the_start(dsn: str) -> None:
    with pytest.raises(VectorIndexError, match="klingon"):
        async with started(dsn, words="klingon"):
            pass


# ----------------------------------------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0 must be greater than or equal to 1"),
        ({"k": 5.0}, "k=5.0"),
        ({"exact_rows": -1}, "exact_rows=-1"),
        ({"num_connections": 0}, "num_connections=0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"timeout_s": 0}, "timeout_s=0 must be greater than or equal to 0.001"),
        ({"pool_timeout_s": float("nan")}, "pool_timeout_s=nan"),
        ({"table": ""}, "table=''"),
        ({"table": "a.b.c"}, "table='a.b.c'"),
        ({"table": "a\0"}, "table="),
        ({"columns": {"body": "text"}}, "columns has 'body'"),
        ({"columns": {"text": None}}, r"columns\['text'\]=None"),
        ({"columns": {"title": ""}}, r"columns\['title'\]=''"),
        ({"ladder": (10, 10)}, "ladder="),
        ({"ladder": (0,)}, r"ladder\[0\]=0"),
        ({"ladder": 10}, "ladder=10"),
        ({"ladder": ("10",)}, r"ladder\[0\]="),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PgVectorSource("dbname=docs", **options)


SECRET = "s3cr3t-w0rd"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{SECRET}@[host/docs",
        f"postgresql://me:{SECRET} @host/docs?nothing=such",
        f"postgresql://me:12@{SECRET}@host/docs",
        f"postgresql://me:12/{SECRET}@host/docs",
        f"postgresql://me:{SECRET}/12@host/docs",
        f"host=h password={SECRET} nothing",
        f"password='{SECRET}",
        f"mysql://me:{SECRET}@host/docs",
    ],
)
def test_a_dsn_that_cannot_be_read_is_not_shown(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="the dsn cannot be read") as raised:
        PgVectorSource(dsn)
    assert SECRET not in f"{raised.value} {raised.value.__cause__}"


@pytest.mark.parametrize(
    "dsn", [f"postgresql://me:{SECRET}@127.0.0.1:1/docs", f"host=127.0.0.1 port=1 password={SECRET}"]
)
async def test_a_password_is_in_no_error_log_or_repr(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    source = PgVectorSource(dsn, embedder=EMBEDDER)
    with pytest.raises(SourceError, match=r"PostgreSQL at 127.0.0.1:1.*refused") as raised:
        await source.start(lambda line: logging.info(line))
    address = Address(dsn)
    assert SECRET not in f"{raised.value} {raised.value.__cause__} {source!r} {address} {address!r} {caplog.text}"
    assert "***" in str(address.explained(psycopg.OperationalError(f"do you mean {SECRET}?")))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"table": "nothing"}, IndexMissingError, r"no table nothing .* streamrag index build FOLDER --to DSN"),
        ({"table": "no_schema.passages"}, IndexMissingError, "no table no_schema.passages"),
        ({"columns": {"text": "body"}}, VectorIndexError, r"no column 'body' for a chunk's text: it has uri, passage"),
        ({"columns": {"title": "subject"}}, VectorIndexError, "no column 'subject'"),
        ({"columns": {"text": "embedding"}}, VectorIndexError, "'embedding' is vector, .* must be a text"),
        ({"columns": {"embedding": "text"}}, VectorIndexError, "'text' is text, .* must be a vector or halfvec"),
        ({"columns": {"passage": "title"}}, VectorIndexError, "'title' is text, .* must be a whole number"),
        ({"columns": {"words": "title"}}, VectorIndexError, "must be a tsvector"),
        ({"where": {"nothing": 1}}, VectorIndexError, 'column "nothing" does not exist'),
        ({"where": {"passage": "many"}}, VectorIndexError, "invalid input syntax for type integer"),
        ({"where": {"title": "a\0"}}, VectorIndexError, "NUL"),
        ({"where": {5: 1}}, ConfigurationError, "where has 5"),
        ({"embedder": "toy_embedder:wide"}, IndexMismatchError, "has 64 dimensions, and .*wide' has 128"),
        ({"embedder": "toy_embedder:none"}, ConfigurationError, "cannot be loaded"),
    ],
)
async def test_a_table_that_does_not_fit_is_an_error_of_start(
    dsn: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    source = PgVectorSource(dsn, **{"k": 5, "embedder": EMBEDDER} | options)
    with pytest.raises(kind, match=message):
        await source.start(lambda line: None)
    await source.aclose()
    assert active(dsn) == []


async def test_a_database_without_pgvector_says_what_to_do(dsn: str) -> None:
    execute(dsn, "CREATE DATABASE plain")
    with pytest.raises(VectorIndexError, match=r"no pgvector there.*CREATE EXTENSION vector"):
        await PgVectorSource(psycopg.conninfo.make_conninfo(dsn, dbname="plain")).start(lambda line: None)


async def test_a_user_without_rights_is_told_what_to_ask_for(dsn: str) -> None:
    execute(dsn, "CREATE ROLE nobody LOGIN")
    source = PgVectorSource(psycopg.conninfo.make_conninfo(dsn, user="nobody"), k=5, embedder=EMBEDDER)
    with pytest.raises(VectorIndexError, match=r"permission denied for table passages.*GRANT SELECT ON TABLE"):
        await source.start(lambda line: None)
    execute(dsn, "GRANT SELECT ON passages TO nobody")
    await source.start(lambda line: None)
    assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5
    execute(dsn, "REVOKE SELECT ON passages FROM nobody")
    with pytest.raises(SourceError, match="permission denied"):
        await updates(source, QUERIES[0])
    await source.aclose()


async def test_another_embedder_than_the_tables_is_a_mismatch(dsn: str) -> None:
    make_table(dsn, "recorded", TEXTS[:5])
    probe = tuple(float(value) for value in vectors_of(["The quick brown fox"])[0][:16])
    comment = record_of(EmbedderIdentity("another\x1b[2J", DIMENSION, probe))
    execute(dsn, sql.SQL("COMMENT ON TABLE recorded IS {}").format(sql.Literal(comment)))
    with pytest.raises(IndexMismatchError, match="not made with embedder='toy_embedder:embed'"):
        await PgVectorSource(dsn, table="recorded", embedder=EMBEDDER).start(lambda line: None)
    execute(dsn, "DROP TABLE recorded")


@pytest.mark.parametrize("comment", ["a table", '{"streamrag": 5}', "[" * 3_000, '{"streamrag": {"dimension": "64"}}'])
async def test_a_comment_that_is_not_ours_is_left_alone(dsn: str, comment: str) -> None:
    execute(dsn, sql.SQL("COMMENT ON TABLE passages IS {}").format(sql.Literal(comment)))
    async with started(dsn) as source:
        assert source._opened
        assert source._opened.table.made_with is None
    execute(dsn, "COMMENT ON TABLE passages IS NULL")


async def test_a_source_that_is_not_started_says_so(dsn: str) -> None:
    await must_be_started(PgVectorSource(dsn, embedder=EMBEDDER))


# ------------------------------------------------------------------------------------------------------- going wrong


async def test_a_query_that_is_stopped_is_stopped_in_the_server_and_its_connection_serves_on(dsn: str) -> None:
    async with started(dsn, table="slow", num_connections=1) as source:
        for _ in range(2):
            task = asyncio.create_task(updates(source, QUERIES[0]))
            process_id = await until_it_runs(dsn)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert active(dsn) == []
            ((served_by,),) = execute(
                dsn, "SELECT pid FROM pg_stat_activity WHERE application_name = 'streamrag' AND state = 'idle'"
            )
            assert served_by == process_id


async def test_a_search_cancelled_at_any_moment_leaves_no_statement_or_connection_busy(dsn: str) -> None:
    num_done = 0
    async with started(dsn, num_connections=2) as source:
        expected = await updates(source, QUERIES[0])
        for num_steps in range(0, 120, 3):
            task = asyncio.create_task(updates(source, QUERIES[0]))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
                num_done += 1
            assert active(dsn) == []
        together = await asyncio.gather(*(updates(source, QUERIES[0]) for _ in range(4)))
        assert together == [expected] * 4
    assert num_done < 40


async def test_leaving_after_the_first_update_leaves_nothing_active(dsn: str) -> None:
    async with started(dsn, num_connections=1) as source:
        async with aclosing(source.stream(QUERIES[0])) as events:
            async for _ in events:
                break
        assert active(dsn) == []
        assert await updates(source, QUERIES[0])


async def test_settings_hold_for_their_stage_only_and_nothing_can_be_written(dsn: str) -> None:
    async def settings(connection: Any) -> list[Any]:
        names = "hnsw.ef_search", "hnsw.iterative_scan", "enable_indexscan", "statement_timeout", "search_path"
        return [(await (await connection.execute(f"SHOW {name}")).fetchone())[0] for name in names]

    async with started(dsn, num_connections=1) as source:
        assert source._opened
        link = source._opened.link
        await updates(source, QUERIES[0])  # and pgvector is loaded, so that the server knows its settings
        before = await link.run(settings, {}, timeout_s=60)
        await updates(source, QUERIES[1])
        assert await link.run(settings, {}, timeout_s=60) == before == ["40", "off", "on", "1min", '"$user", public']
        for statement in ("DELETE FROM passages", "CREATE TABLE t (i int)"):
            with pytest.raises(SourceError, match="read-only transaction"):
                await link.run(lambda connection: connection.execute(statement), {}, timeout_s=60)  # noqa: B023
        with psycopg.connect(dsn) as other:
            count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'streamrag' AND state = 'idle'"
            assert other.execute(count).fetchone() == (1,)  # and not idle in a transaction


async def test_a_search_that_takes_too_long_is_an_error(dsn: str) -> None:
    async with started(dsn, table="slow", timeout_s=0.05) as source:
        with pytest.raises(SourceError, match="statement timeout"):
            await updates(source, QUERIES[0])


async def test_a_stage_that_takes_too_long_keeps_what_was_found_before(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(dsn, timeout_s=5.0, words="") as source:
        with psycopg.connect(dsn) as other:
            async with aclosing(source.stream(QUERIES[0])) as events:
                assert isinstance(await anext(events), Update)
                other.execute("LOCK TABLE passages IN ACCESS EXCLUSIVE MODE")
                (rest,) = [event async for event in events]
    assert rest == CutShort("the database stopped the search at stage 2 of 6")  # and not where it is
    assert re.search(r"^PostgreSQL at .*, at stage 2 of 6: hnsw.ef_search = 20$", caplog.messages[-1])


async def test_words_that_take_too_long_are_left_out(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(self: Search, connection: Any, query: str, configuration: str) -> None:
        await connection.execute("SELECT pg_sleep(1000)")

    monkeypatch.setattr(Search, "words", sleep)
    monkeypatch.setattr("streamrag.sources.postgres.source.WORDS_TIMEOUT_S", 0.05)
    async with started(dsn, exact_rows=0) as source:
        first, *_ = await updates(source, TEXTS[3])
    assert first.chunks[0].uri == "3.md"
    assert first.hint == Hint(num_chunks=4)


async def test_words_that_take_longer_than_embedding_are_stopped(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(self: Search, connection: Any, query: str, configuration: str) -> None:
        await connection.execute("SELECT pg_sleep(1000)")

    async def until_they_sleep(self: InThisProcess, text: str, share: Share) -> str:
        await until(lambda: any("pg_sleep" in query for _, query in active(dsn)))
        return as_vector(vectors_of([text])[0])

    monkeypatch.setattr(Search, "words", sleep)
    monkeypatch.setattr("streamrag.sources.postgres.source.WORDS_TIMEOUT_S", 1000)
    monkeypatch.setattr(InThisProcess, "query", until_they_sleep)
    async with started(dsn, timeout_s=1000, num_connections=1) as source:
        first, *_ = await updates(source, TEXTS[3])
        assert not any("pg_sleep" in query for _, query in active(dsn))
    assert first.hint == Hint(num_chunks=5)


async def test_the_first_result_does_not_wait_until_the_word_search_has_stopped(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, may_end = asyncio.Event(), asyncio.Event()

    async def stop_late(self: Search, connection: Any, query: str, configuration: str) -> None:
        runs.set()
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()

    async def until_it_runs(self: InThisProcess, text: str, share: Share) -> str:
        await runs.wait()
        return as_vector(vectors_of([text])[0])

    monkeypatch.setattr(Search, "words", stop_late)
    monkeypatch.setattr(InThisProcess, "query", until_it_runs)
    async with started(dsn) as source, aclosing(source.stream(TEXTS[3])) as events:
        first = await anext(events)
        may_end.set()
    assert isinstance(first, Update)
    assert first.hint == Hint(num_chunks=5)


async def test_a_connection_that_dies_is_an_error_of_its_query_and_the_pool_recovers(dsn: str) -> None:
    async with started(dsn, table="slow", num_connections=1) as source:
        task = asyncio.create_task(updates(source, QUERIES[0]))
        process_id = await until_it_runs(dsn)
        execute(dsn, f"SELECT pg_terminate_backend({process_id})")
        with pytest.raises(SourceError, match="terminating connection"):
            await task
        task = asyncio.create_task(updates(source, QUERIES[0]))
        assert await until_it_runs(dsn) != process_id
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_connections_that_died_unused_are_replaced_without_an_error(dsn: str) -> None:
    async with started(dsn) as source:
        expected = await updates(source, QUERIES[0])
        execute(dsn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'streamrag'")
        assert await updates(source, QUERIES[0]) == expected


async def test_a_server_that_crashes_is_an_error_of_its_query_and_serves_again(dsn: str) -> None:
    """Killing one of its processes ends them all; it recovers by itself."""
    async with started(dsn, table="slow", num_connections=1) as source, started(dsn, pool_timeout_s=60) as other:
        expected = await updates(other, QUERIES[0])
        task = asyncio.create_task(updates(source, QUERIES[0]))
        process_id = await until_it_runs(dsn)
        of_us = "SELECT pid FROM pg_stat_activity WHERE application_name = 'streamrag'"
        before = {*execute(dsn, of_us)}

        def has_recovered() -> bool:
            with suppress(psycopg.OperationalError):
                return not before & {*execute(dsn, of_us)}
            return False

        os.kill(process_id, signal.SIGKILL)
        with pytest.raises(SourceError, match="PostgreSQL at"):
            await task
        await until(has_recovered)
        assert await updates(other, QUERIES[0]) == expected


async def test_a_pool_in_use_is_an_error_that_says_so(dsn: str) -> None:
    async with started(dsn, table="slow", num_connections=1, pool_timeout_s=3.0) as source:
        task = asyncio.create_task(updates(source, QUERIES[0]))
        await until_it_runs(dsn)
        with pytest.raises(SourceError, match=r"after 3.00 sec. All of them are in use .*num_connections"):
            await updates(source, QUERIES[1])
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_closing_ends_a_search_that_is_under_way(dsn: str) -> None:
    async with started(dsn, table="slow", has_worker=True) as source:
        assert source._opened
        (worker,) = source._opened.embedder.workers.process_ids
        task = asyncio.create_task(updates(source, QUERIES[0]))
        await until_it_runs(dsn)
        await source.aclose()
        with pytest.raises(SourceError, match="the source is closed"):
            await task
        assert active(dsn) == []
        assert not alive(worker)


async def test_a_worker_that_dies_is_an_error_and_the_next_query_works(dsn: str) -> None:
    async with started(dsn, words="", has_worker=True) as source:
        with pytest.raises(WorkerError, match="died with exit code 9"):
            await updates(source, "die now")
        assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5


async def test_cancelling_a_search_frees_the_embedding_worker(dsn: str, tmp_path: Path) -> None:
    waiting = tmp_path / "never.waiting"
    async with started(dsn, has_worker=True) as source:
        task = asyncio.create_task(updates(source, f"wait until {tmp_path}/never"))
        await until(lambda: waiting.exists() and waiting.read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not alive(int(waiting.read_text())))
        assert len((await updates(source, QUERIES[0]))[-1].chunks) == 5


async def test_cancelling_the_start_leaves_no_worker_and_no_connection(dsn: str) -> None:
    before = {*psutil.Process().children()}
    for num_steps in range(0, 60, 6):
        source = PgVectorSource(dsn, embedder=EMBEDDER)
        task = asyncio.create_task(source.start(lambda line: None))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await source.aclose()
    await until(lambda: execute(dsn, NUM_CONNECTIONS) == [(0,)] and before.issuperset(psutil.Process().children()))


async def test_a_start_that_is_cancelled_as_it_has_seen_the_table_leaves_no_connection(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = Search.estimate

    async def estimate_and_cancel(self: Search, connection: Any) -> int:
        num_rows = await estimate(self, connection)
        task = asyncio.current_task()
        assert task
        task.cancel()
        return num_rows

    monkeypatch.setattr(Search, "estimate", estimate_and_cancel)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(PgVectorSource(dsn, embedder=EMBEDDER).start(lambda line: None))
    await until(lambda: execute(dsn, NUM_CONNECTIONS) == [(0,)])


def test_the_name_of_a_table_in_messages_has_its_schema() -> None:
    table = PassageTable(("a", "b"), {}, ("public", "vector"), None, "cosine", None, None, False, None)
    assert table.name == "a.b"
