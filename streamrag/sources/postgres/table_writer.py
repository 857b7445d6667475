"""The table that a build fills: made, compared with a folder's documents, written to, indexed."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrag.errors import IndexExistsError, IndexMismatchError, VectorIndexError
from streamrag.sources.building import OnProgress
from streamrag.sources.index.embedder import PROBE_TOLERANCE, unlike
from streamrag.sources.index.embedder_pool import EmbeddingPool, Loaded
from streamrag.sources.index.index_folder import with_title
from streamrag.sources.postgres.link import Address
from streamrag.sources.postgres.names import (
    identifier,
)
from streamrag.sources.postgres.table import read_record, record_of

if TYPE_CHECKING:
    from streamrag.sources.postgres.link import Connection

NUM_TEXTS_AT_ONCE = 128
"""Texts in one job of the embedding worker and in one transaction, after which progress is reported."""

MAX_INDEXED_DIMENSIONS = 2_000
"""pgvector's limit for an index of vectors."""

MAX_PLAIN_DIMENSIONS = 1_000
"""Vectors of up to 4 KB stay in their row, whose texts leave it first: exact search reads a page rather than two."""

LOCK_SPACE = 0x5247
"""The first number of our advisory locks; the second is the table's."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a table has of a document."""

    uri: str
    title: str
    passages: dict[int, str]


_TABLE = """
    CREATE TABLE {name} (
        uri text NOT NULL,
        passage integer NOT NULL,
        title text NOT NULL,
        text text NOT NULL,
        digest text NOT NULL,
        embedding {vector}({dimension}) STORAGE {storage} NOT NULL,
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


class Filling:
    def __init__(self, address: Address, parts: tuple[str, ...], words: str, tell: OnProgress) -> None:
        from psycopg import sql

        self.address, self._parts, self._words, self.tell = address, parts, words, tell
        self._name, self._name_beside_values = sql.Identifier(*parts), identifier(*parts)
        self._schema = ""  # pgvector's
        self._changed: list[_Row] = []
        self._shrunk: list[Document] = []
        self.num_embedded = self.num_removed = self.dimension = 0

    async def lock(self, connection: "Connection") -> None:
        """Nobody else fills this table as long as this connection lives."""
        # However it is spelt: "passages" may be "public.passages", and stand there or not yet.
        schema = self._parts[0] if len(self._parts) > 1 else None
        query = (
            "SELECT pg_try_advisory_lock(%s, hashtext(concat_ws('.', coalesce(%s, (SELECT nspname::text "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)), "
            "current_schema()::text), %s::text)))"
        )
        (is_ours,) = await _row(
            connection, query, LOCK_SPACE, schema, self._name.as_string(connection), self._parts[-1]
        )
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
            values = {
                "dimension": sql.Literal(loaded.dimension),
                "words": sql.Literal(self._words),
                "storage": sql.SQL("PLAIN" if loaded.dimension <= MAX_PLAIN_DIMENSIONS else "EXTERNAL"),
            }
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
                f"{self.address}: table {table} was filled with embedder={made_with.name!r}, not {loaded.name!r}: "
                f"{unlike(loaded.dimension, made_with.dimension)}. Name that one, or another table"
            )

    async def add(self, connection: "Connection", pool: EmbeddingPool, document: Document) -> None:
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
            vectors = await pool.passages([with_title(row.title, row.text) for row in batch])
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
