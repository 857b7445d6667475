"""Filling a table of PostgreSQL with the passages of a folder of documents, and keeping it as the folder is.

    documents ──passages──▶ those that are new or changed ──worker: embedder──▶ vectors ──▶ table

Each passage stands beside a digest of what was embedded. So a build that was stopped or killed goes on where it was,
and one after a change of few documents embeds only these.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.clock import Clock, monotonic
from streamrag.errors import ConfigurationError, IndexExistsError, IndexMismatchError, VectorIndexError
from streamrag.sources.embedder import DEFAULT_EMBEDDER, PROBE_TOLERANCE
from streamrag.sources.embedding import EmbeddingPool, Loaded, building_threads
from streamrag.sources.passages import (
    UnusableDocumentError,
    find_documents,
    read_document,
    relative_name,
    split_document,
)
from streamrag.sources.postgres_link import Address
from streamrag.sources.postgres_query import storable
from streamrag.sources.postgres_table import TableName, at_start, identifier, read_record, record_of, table_parts

if TYPE_CHECKING:
    from streamrag.sources.postgres_link import Connection

NUM_TEXTS_AT_ONCE = 128
"""Texts in one job of the embedding worker and in one transaction, after which progress is reported."""

MAX_INDEXED_DIMENSIONS = 2_000
"""pgvector's limit for an index of vectors."""

LOCK_SPACE = 0x5247
"""The first number of our advisory locks; the second is the table's."""

OnProgress: TypeAlias = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class TableSummary:
    """What was filled, and what was left out."""

    num_documents: int
    """In the folder."""
    num_passages: int
    """In the folder."""
    num_embedded: int
    """Of these, new or changed since the last build."""
    num_duplicates: int
    """Passages left out because the same text had come before."""
    num_removed: int
    """Passages removed: of documents that changed and, with `prune`, of those that are not in the folder."""
    dimension: int
    skipped: tuple[tuple[str, str], ...]
    """Files and folders that were not read: path within the folder, and the reason."""
    duration_s: float


def build_table(
    folder: str | os.PathLike[str],
    dsn: str,
    *,
    table: TableName = "passages",
    embedder: str = DEFAULT_EMBEDDER,
    words: str = "english",
    prune: bool = False,
    passage_words: int = 180,
    max_file_bytes: int = 10 << 20,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> TableSummary:
    """Fill a table with the text, Markdown and HTML files below `folder`; `PgVectorSource` searches it. Blocks.

    The table is made if there is none, with an HNSW index of the vectors and a GIN index of the words, and so is the
    extension if the user may make it. What has not changed since the last build is left as it is, changed documents are
    replaced, and a build that was stopped goes on where it was.

    `words` is the text search configuration of the index of words. With `prune`, documents that are not in the folder
    are removed from the table. `on_progress` is called with (done, total, step) for the steps filling and indexing.

    :raises IndexExistsError: there is such a table, and streamrag did not make it.
    :raises IndexMismatchError: the table was filled with another embedder.
    :raises ConfigurationError: no documents, or an embedder that cannot be used.
    :raises MissingDependencyError: the driver or the embedder's package is not installed.
    :raises VectorIndexError: the server refuses, or another build fills the table.
    :raises SourceError: the server cannot be reached, or the connection broke. What is filled stays.
    :raises WorkerError: the process that embeds died.
    """
    started_s = clock()
    if passage_words < 10:
        raise ConfigurationError(f"passage_words={passage_words!r} must be at least 10")
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes={max_file_bytes!r} must be at least 1")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise ConfigurationError("build_table would block the event loop: use `asyncio.to_thread(build_table, ...)`")
    address = Address(dsn)
    filling = _Filling(address, table_parts(table), words, on_progress or (lambda done, total, step: None))
    reading = _Reading(Path(folder).resolve(), passage_words, max_file_bytes)
    asyncio.run(_build(filling, reading, EmbeddingPool(embedder, size=1, num_threads=building_threads()), prune))
    if not reading.seen:
        raise ConfigurationError(f"{reading.folder} holds no text, Markdown or HTML to index")
    return TableSummary(
        num_documents=reading.num_documents,
        num_passages=len(reading.seen),
        num_embedded=filling.num_embedded,
        num_duplicates=reading.num_duplicates,
        num_removed=filling.num_removed,
        dimension=filling.dimension,
        skipped=tuple(sorted(reading.skipped)),
        duration_s=clock() - started_s,
    )


async def _build(filling: "_Filling", reading: "_Reading", pool: EmbeddingPool, prune: bool) -> None:
    import psycopg

    try:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(await filling.address.connect(autocommit=True))
            await filling.lock(connection)
            stack.push_async_callback(pool.aclose)
            await filling.make_table(connection, await pool.start())
            uris = []
            for number, path in enumerate(reading.paths):
                filling.tell(number, len(reading.paths), "filling")
                if (document := await asyncio.to_thread(reading.document, path)) is None:
                    continue
                uris.append(document.uri)
                await filling.add(connection, pool, document)
            await filling.flush(connection, pool)
            filling.tell(len(reading.paths), len(reading.paths), "filling")
            if prune and uris:
                await filling.remove_others(connection, uris)
            await filling.make_indexes(connection)
    except (psycopg.Error, UnicodeError) as error:
        raise at_start(filling.address, error) from None


# ---------------------------------------------------------------------------------------------------- the documents


@dataclass(frozen=True, slots=True)
class _Document:
    uri: str
    title: str
    passages: dict[int, str]


class _Reading:
    def __init__(self, folder: Path, passage_words: int, max_file_bytes: int) -> None:
        self.folder, self._passage_words = folder, passage_words
        self.paths, self.skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=folder / ".none")
        self.num_documents = self.num_duplicates = 0
        self.seen: set[bytes] = set()

    def document(self, path: Path) -> _Document | None:
        """The document at `path`, without passages that others have had; None if it cannot be used."""
        try:
            document = read_document(path, self.folder)
        except UnusableDocumentError as error:
            self.skipped.append((relative_name(path, self.folder), str(error)))
            return None
        self.num_documents += 1
        passages = {}
        for passage, text in enumerate(split_document(document, self._passage_words)):
            text = storable(text)
            # Navigation and licences that every page repeats would fill the k nearest with one text.
            if (digest := hashlib.blake2b(text.encode(), digest_size=16).digest()) in self.seen:
                self.num_duplicates += 1
                continue
            self.seen.add(digest)
            passages[passage] = text
        return _Document(storable(document.uri), storable(document.title), passages)


# -------------------------------------------------------------------------------------------------------- the table


_TABLE = """
    CREATE TABLE {name} (
        uri text NOT NULL,
        passage integer NOT NULL,
        title text NOT NULL,
        text text NOT NULL,
        digest text NOT NULL,
        embedding {vector}({dimension}) NOT NULL,
        words tsvector GENERATED ALWAYS AS (to_tsvector({words}::regconfig, left(title || ' ' || text, 100000))) STORED,
        PRIMARY KEY (uri, passage)
    )"""

_UPSERT = """
    INSERT INTO {name} (uri, passage, title, text, digest, embedding) VALUES (%s, %s, %s, %s, %s, %s::{vector})
    ON CONFLICT (uri, passage) DO UPDATE SET title = excluded.title, text = excluded.text, digest = excluded.digest,
        embedding = excluded.embedding"""


@dataclass(frozen=True, slots=True)
class _Row:
    uri: str
    passage: int
    title: str
    text: str
    digest: str

    @property
    def text_to_embed(self) -> str:
        """A passage in the middle of a document often does not say what it is about; the title does."""
        return self.text if self.text.startswith(self.title) else f"{self.title}\n{self.text}"


class _Filling:
    def __init__(self, address: Address, parts: tuple[str, ...], words: str, tell: OnProgress) -> None:
        from psycopg import sql

        self.address, self._parts, self._words, self.tell = address, parts, words, tell
        self._name, self._name_beside_values = sql.Identifier(*parts), identifier(*parts)
        self._schema = ""  # pgvector's
        self._changed: list[_Row] = []
        self._shrunk: list[_Document] = []
        self.num_embedded = self.num_removed = self.dimension = 0

    async def lock(self, connection: "Connection") -> None:
        """Nobody else fills this table as long as this connection lives."""
        name = self._name.as_string(connection)
        (is_ours,) = await _row(connection, "SELECT pg_try_advisory_lock(%s, hashtext(%s))", LOCK_SPACE, name)
        if not is_ours:
            raise VectorIndexError(f"{self.address}: another build fills table {'.'.join(self._parts)}: wait for it")

    async def make_table(self, connection: "Connection", loaded: Loaded) -> None:
        """The table, with a comment that says what fills it; both or neither. One that is there must be like it."""
        from psycopg import sql

        self.dimension = loaded.dimension
        name = self._name.as_string(connection)
        oid, comment = await _row(
            connection, "SELECT to_regclass(%s)::oid, obj_description(to_regclass(%s), 'pg_class')", name, name
        )
        if oid is not None:
            self._check(read_record(comment), loaded)
        else:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        query = (
            "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'"
        )
        (self._schema,) = await _row(connection, query)
        if oid is None:
            values = {"dimension": sql.Literal(loaded.dimension), "words": sql.Literal(self._words)}
            async with connection.transaction():
                await connection.execute(
                    sql.SQL(_TABLE).format(name=self._name, vector=sql.Identifier(self._schema, "vector"), **values)
                )
                comment = sql.Literal(record_of(loaded))
                await connection.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(self._name, comment))

    def _check(self, made_with: Loaded | None, loaded: Loaded) -> None:
        table = ".".join(self._parts)
        if made_with is None:
            raise IndexExistsError(
                f"{self.address}: there is a table {table} that streamrag did not make: name another one, or drop it"
            )
        apart = (abs(a - b) for a, b in zip(made_with.probe, loaded.probe, strict=False))
        if made_with.dimension != loaded.dimension or max(apart, default=0.0) >= PROBE_TOLERANCE:
            raise IndexMismatchError(
                f"{self.address}: table {table} was filled with embedder={made_with.name!r} ({made_with.dimension} "
                f"dimensions), not {loaded.name!r} ({loaded.dimension}): name that one, or another table"
            )

    async def add(self, connection: "Connection", pool: EmbeddingPool, document: _Document) -> None:
        """What the table does not have of a document yet, and what it has too much."""
        from psycopg import sql

        query = sql.SQL("SELECT passage, digest FROM {} WHERE uri = %s").format(self._name_beside_values)
        there: dict[int, str] = dict(await (await connection.execute(query, [document.uri])).fetchall())
        for passage, text in document.passages.items():
            digest = hashlib.blake2b(f"{document.title}\0{text}".encode(), digest_size=16).hexdigest()
            if there.get(passage) != digest:
                self._changed.append(_Row(document.uri, passage, document.title, text, digest))
        if there.keys() - document.passages.keys():
            self._shrunk.append(document)
        if len(self._changed) >= NUM_TEXTS_AT_ONCE:
            await self.flush(connection, pool)

    async def flush(self, connection: "Connection", pool: EmbeddingPool) -> None:
        """Embed what has changed, and write it; a transaction for each batch."""
        from psycopg import sql

        vector = identifier(self._schema, "vector")
        upsert = sql.SQL(_UPSERT).format(name=self._name_beside_values, vector=vector)
        surplus = sql.SQL("DELETE FROM {} WHERE uri = %s AND passage <> ALL(%s)").format(self._name_beside_values)
        changed, self._changed, shrunk, self._shrunk = self._changed, [], self._shrunk, []
        for start in range(0, len(changed), NUM_TEXTS_AT_ONCE):
            batch = changed[start : start + NUM_TEXTS_AT_ONCE]
            vectors = await pool.passages([row.text_to_embed for row in batch])
            rows = [
                (row.uri, row.passage, row.title, row.text, row.digest, vector)
                for row, vector in zip(batch, vectors, strict=True)
            ]
            async with connection.transaction(), connection.cursor() as cursor:
                await cursor.executemany(upsert, rows)
            self.num_embedded += len(batch)
        async with connection.transaction():
            for document in shrunk:
                self.num_removed += (await connection.execute(surplus, [document.uri, [*document.passages]])).rowcount

    async def remove_others(self, connection: "Connection", uris: list[str]) -> None:
        """Documents that are not in the folder."""
        from psycopg import sql

        query = sql.SQL("DELETE FROM {} WHERE uri <> ALL(%s)").format(self._name_beside_values)
        self.num_removed += (await connection.execute(query, [uris])).rowcount

    async def make_indexes(self, connection: "Connection") -> None:
        """Those that are missing: filling comes first since an index is made in less time than it grows."""
        from psycopg import sql

        query = """
            SELECT coalesce(bool_or(m.amname IN ('hnsw', 'ivfflat')), false), coalesce(bool_or(m.amname = 'gin'), false)
            FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
            WHERE i.indrelid = to_regclass(%s) AND i.indisvalid"""
        has_vectors, has_words = await _row(connection, query, self._name.as_string(connection))
        self.tell(0, 2, "indexing")
        if not has_words:
            await connection.execute(sql.SQL("CREATE INDEX ON {} USING gin (words)").format(self._name))
        self.tell(1, 2, "indexing")
        if not has_vectors and self.dimension <= MAX_INDEXED_DIMENSIONS:
            cosine = sql.Identifier(self._schema, "vector_cosine_ops")
            statement = sql.SQL("CREATE INDEX ON {} USING hnsw (embedding {})").format(self._name, cosine)
            await connection.execute(statement)
        await connection.execute(sql.SQL("ANALYZE {}").format(self._name))
        self.tell(2, 2, "indexing")


async def _row(connection: "Connection", query: str, *values: Any) -> tuple[Any, ...]:
    found = await (await connection.execute(query.encode(), values)).fetchone()
    assert found
    return found
