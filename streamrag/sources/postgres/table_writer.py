"""Create a table, compare it with a folder's documents, write the differences, and index it."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from psycopg import sql

from streamrag.errors import IndexExistsError, IndexMismatchError, VectorIndexError
from streamrag.sources.index.document_passages import OnProgress
from streamrag.sources.index.embedder import EmbedderIdentity
from streamrag.sources.index.embedder_pool import EmbedderPool
from streamrag.sources.index.index_folder import with_title
from streamrag.sources.postgres.link import Address, Connection
from streamrag.sources.postgres.table import fetch, identifier, read_record, record_of

TEXTS_PER_JOB = 128  # texts in one job of the embedding worker, and rows in one transaction, between progress reports
MAX_INDEXED_DIMENSIONS = 2_000  # pgvector's limit for indexed vectors
MAX_PLAIN_DIMENSIONS = 1_000
"""Vectors of up to 4 KB are stored in the row, so that exact search reads one page for each instead of two."""
LOCK_SPACE = 0x5247  # first key of our advisory locks; the second one identifies the table
LOCK_ATTEMPTS, LOCK_PAUSE_S = 20, 0.1  # the server keeps the lock of a build that ended until it notices
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
    INSERT INTO {name} (uri, passage, title, text, digest, embedding)
    VALUES (%(uri)s, %(passage)s, %(title)s, %(text)s, %(digest)s, %(vector)s::{vector})
    ON CONFLICT (uri, passage) DO UPDATE SET title = excluded.title, text = excluded.text, digest = excluded.digest,
        embedding = excluded.embedding"""

# The key is that of the qualified name: "passages" may be "public.passages", and may not exist yet.
_LOCK = (
    "SELECT pg_try_advisory_lock(%s, hashtext(concat_ws('.', coalesce(%s, (SELECT nspname::text FROM pg_class c "
    "JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = to_regclass(%s)), current_schema()::text), %s::text)))"
)

_SCHEMA = "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'"
_HAS_INDEXES = """
    SELECT coalesce(bool_or(m.amname IN ('hnsw', 'ivfflat')), false), coalesce(bool_or(m.amname = 'gin'), false)
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
    WHERE i.indrelid = to_regclass(%s) AND i.indisvalid"""


class TableWriter:
    """A writer to the table of a build, with one connection that holds its lock."""

    def __init__(self, connection: Connection, address: Address, parts: tuple[str, ...], report: OnProgress) -> None:
        self._connection, self._address, self._parts, self._report = connection, address, parts, report
        self._table = f"{address}: table {'.'.join(parts)}"
        self._name, self._name_beside_values = sql.Identifier(*parts), identifier(*parts)
        self._quoted = self._name.as_string(connection)
        self._schema = ""  # pgvector's
        self._changed: list[dict[str, Any]] = []
        self._surplus: list[tuple[str, list[int]]] = []
        self.num_embedded = self.num_removed = self.dimension = 0

    async def lock(self) -> None:
        """Lock the table until the connection closes; raise VectorIndexError if another build keeps it locked."""
        schema = self._parts[0] if len(self._parts) > 1 else None
        for _ in range(LOCK_ATTEMPTS):
            ((is_ours,),) = await fetch(self._connection, _LOCK, LOCK_SPACE, schema, self._quoted, self._parts[-1])
            if is_ours:
                return
            await asyncio.sleep(LOCK_PAUSE_S)
        raise VectorIndexError(f"{self._address}: another build fills table {'.'.join(self._parts)}: wait for it")

    async def make_table(self, embedder: EmbedderIdentity, words: str) -> None:
        """Create pgvector's extension and the table with a record of its embedder, or check an existing table.

        words: the text search configuration of its full-text index.

        :raises IndexExistsError: streamrag did not make the existing table.
        :raises IndexMismatchError: another embedder filled it.
        """
        self.dimension = embedder.dimension
        query = "SELECT to_regclass(%s)::oid, obj_description(to_regclass(%s), 'pg_class')"
        ((oid, comment),) = await fetch(self._connection, query, self._quoted, self._quoted)
        if oid is not None:
            self._check(read_record(comment), embedder)
        else:
            await self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        ((self._schema,),) = await fetch(self._connection, _SCHEMA)
        if oid is None:
            storage = sql.SQL("PLAIN" if embedder.dimension <= MAX_PLAIN_DIMENSIONS else "EXTERNAL")
            statement = sql.SQL(_TABLE).format(
                name=self._name,
                vector=sql.Identifier(self._schema, "vector"),
                dimension=sql.Literal(embedder.dimension),
                words=sql.Literal(words),
                storage=storage,
            )
            comment_on = sql.SQL("COMMENT ON TABLE {} IS {}").format(self._name, sql.Literal(record_of(embedder)))
            async with self._connection.transaction():
                await self._connection.execute(statement)
                await self._connection.execute(comment_on)

    def _check(self, made_with: EmbedderIdentity | None, embedder: EmbedderIdentity) -> None:
        """Raise IndexExistsError unless streamrag made the table, IndexMismatchError if another embedder filled it."""
        if made_with is None:
            raise IndexExistsError(
                f"{self._address}: there is a table {'.'.join(self._parts)} that streamrag did not make: name another "
                "table, or drop it"
            )
        if how := embedder.difference(made_with):
            raise IndexMismatchError(
                f"{self._table} was filled with embedder={made_with.name!r}, not {embedder.name!r}: {how}. Name that "
                "one, or another table"
            )

    async def add(self, pool: EmbedderPool, uri: str, title: str, passages: Mapping[int, str]) -> None:
        """Compare a document's passages with its rows; queue new and changed passages, and surplus rows for removal.

        Flush once the changed passages fill a batch.
        """
        query = sql.SQL("SELECT passage, digest FROM {} WHERE uri = %s").format(self._name_beside_values)
        existing: dict[int, str] = dict(await (await self._connection.execute(query, [uri])).fetchall())
        for passage, text in passages.items():
            digest = hashlib.blake2b(f"{title}\0{text}".encode(), digest_size=16).hexdigest()
            if existing.get(passage) != digest:
                self._changed.append({"uri": uri, "passage": passage, "title": title, "text": text, "digest": digest})
        if existing.keys() - passages.keys():
            self._surplus.append((uri, [*passages]))
        if len(self._changed) >= TEXTS_PER_JOB:
            await self.flush(pool)

    async def flush(self, pool: EmbedderPool) -> None:
        """Embed and write the queued passages, one transaction for each batch; remove the surplus rows; count both."""
        vector = identifier(self._schema, "vector")
        upsert = sql.SQL(_UPSERT).format(name=self._name_beside_values, vector=vector)
        delete = sql.SQL("DELETE FROM {} WHERE uri = %s AND passage <> ALL(%s)").format(self._name_beside_values)
        changed, self._changed, surplus, self._surplus = self._changed, [], self._surplus, []
        for start in range(0, len(changed), TEXTS_PER_JOB):
            batch = changed[start : start + TEXTS_PER_JOB]
            vectors = await pool.passages([with_title(row["title"], row["text"]) for row in batch])
            rows = [{**row, "vector": vector} for row, vector in zip(batch, vectors, strict=True)]
            async with self._connection.transaction(), self._connection.cursor() as cursor:
                await cursor.executemany(upsert, rows)
            self.num_embedded += len(batch)
        async with self._connection.transaction():
            for uri, kept in surplus:
                self.num_removed += (await self._connection.execute(delete, [uri, kept])).rowcount

    async def remove_others(self, uris: list[str]) -> None:
        """Remove all documents except these."""
        query = sql.SQL("DELETE FROM {} WHERE uri <> ALL(%s)").format(self._name_beside_values)
        self.num_removed += (await self._connection.execute(query, [uris])).rowcount

    async def make_indexes(self) -> None:
        """Create any missing GIN index of words and HNSW index of up to 2,000 dimensions; analyze the table."""
        ((has_vectors, has_words),) = await fetch(self._connection, _HAS_INDEXES, self._quoted)
        self._report(0, 2, "indexing")
        if not has_words:
            await self._connection.execute(sql.SQL("CREATE INDEX ON {} USING gin (words)").format(self._name))
        self._report(1, 2, "indexing")
        if not has_vectors and self.dimension <= MAX_INDEXED_DIMENSIONS:
            cosine = sql.Identifier(self._schema, "vector_cosine_ops")
            statement = sql.SQL("CREATE INDEX ON {} USING hnsw (embedding {})").format(self._name, cosine)
            await self._connection.execute(statement)
        await self._connection.execute(sql.SQL("ANALYZE {}").format(self._name))
        self._report(2, 2, "indexing")
