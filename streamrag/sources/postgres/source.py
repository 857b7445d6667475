"""A table of PostgreSQL with pgvector as a source: words first, then its index further and further, then all rows."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from streamrag.core import Chunk, CutShort, Hint, Progress, SourceEvent, Update
from streamrag.errors import ConfigurationError, IndexMismatchError, SourceError
from streamrag.sources.embedder import DEFAULT_EMBEDDER
from streamrag.sources.embedding import EmbeddingPool, Loaded
from streamrag.sources.options import check_whole
from streamrag.sources.postgres.link import Address, Link, StatementTimeoutError
from streamrag.sources.postgres.names import TableName, checked_columns, checked_ladder, table_parts
from streamrag.sources.postgres.query import Row, Rows, Search, storable
from streamrag.sources.postgres.table import Ladder, Table, at_start, inspect_table
from streamrag.sources.workers.pool import Share
from streamrag.starting import started_once
from streamrag.support.messages import is_number, short
from streamrag.support.tasks import cancel_regardless

NUM_STAGES = 5

WORDS_TIMEOUT_S = 2.0
"""Most seconds for the words: they are there to be first. Their stage is left out where they take longer."""

FEW_ROWS = 1_000
"""So many are compared one by one as quickly as an index finds the way to them."""


@dataclass(frozen=True, slots=True)
class _Opened:
    table: Table
    search: Search
    link: Link
    embedding: EmbeddingPool


@dataclass(frozen=True, slots=True)
class _Stage:
    what: str
    settings: dict[str, str]
    is_exact: bool = False


class PgVectorSource:
    """Searches a table of PostgreSQL with pgvector: one that `streamrag index build --to` filled, or one of your own.

    A search runs in stages: the query's words, if the table has an index of words, for as long as the query is being
    embedded; then its vector, looking further
    with each rung of a ladder, if the table has an HNSW or IVFFlat index; then exactly, if it has few enough rows. A
    stage that changes the `k` best passages, or their order, yields an `Update` with all of them, best first;
    `Hint.num_chunks` counts the stages still to come. A chunk's `score` is the cosine similarity to the query, or
    another index's distance with its sign changed; in an update by words it is PostgreSQL's rank.

    Transactions only read, and each setting holds for one of them. A query that is stopped is stopped in the server.

    dsn: `postgresql://user@host/database`, or `host=... dbname=...`; what it does not say is taken from `PGHOST`,
        `PGPASSWORD` and so on, and from `~/.pgpass`.
    table: its name, `schema.name`, or a tuple of both.
    k: passages to find.
    columns: the names of the columns that hold a chunk's `text`, `uri`, `title` and `passage`, its `embedding`, and its
        `words` (a tsvector), where they are not called so. None leaves out any but text, uri and embedding. Without
        `passage`, passages are counted within their document.
    where: values by column, of which all must fit: None for NULL, and of a list any, which may have None among them.
        Where a row has NULL, no other value fits.
    words: the text search configuration to look for words with, such as "english"; "" for none. By default that of the
        table's index of words, and none where there is no such index.
    ladder: values of `hnsw.ef_search` (up to 1,000) or `ivfflat.probes`, one for each stage, growing; () for exact
        search only. By default five that double, from 2 * k, or from a 64th of the index's lists.
    exact_rows: search exactly, at the end, if the server expects no more rows than this; 0 for never.
    timeout_s: most seconds for each stage. When one takes longer, what was found before it stands.
    num_connections: most connections to the server, for all queries.
    pool_timeout_s: most seconds to wait for one of them.
    embedder: what the table's vectors were made with: a name or path of a sentence-transformers model, or
        `module:function`. It is imported or loaded, so it is never taken from the table.
    num_workers: processes that embed queries.

    :raises ConfigurationError: a value that cannot work.
    :raises MissingDependencyError: the driver is not installed.
    """

    name = "PgVectorSource"
    """Its name for errors and schedulers; give two sources that behave differently two names."""

    def __init__(
        self,
        dsn: str,
        *,
        table: TableName = "passages",
        k: int = 5,
        columns: Mapping[str, str | None] | None = None,
        where: Mapping[str, Any] | None = None,
        words: str | None = None,
        ladder: Sequence[int] | None = None,
        exact_rows: int = 50_000,
        timeout_s: float = 10.0,
        num_connections: int = 4,
        pool_timeout_s: float = 10.0,
        embedder: str = DEFAULT_EMBEDDER,
        num_workers: int = 1,
    ) -> None:
        check_whole(self.name, "k", k, 1, 1_000)
        check_whole(self.name, "exact_rows", exact_rows, 0, 1 << 40)
        check_whole(self.name, "num_connections", num_connections, 1, 1_000)
        check_whole(self.name, "num_workers", num_workers, 1, 32)
        for option, seconds in {"timeout_s": timeout_s, "pool_timeout_s": pool_timeout_s}.items():
            if not is_number(seconds) or not 0.001 <= seconds <= 3_600:
                raise ConfigurationError(f"PgVectorSource: {option}={short(seconds)} must be from 0.001 to 3600")
        if words is not None and not isinstance(words, str):
            raise ConfigurationError(f'PgVectorSource: words={short(words)} must be a configuration, as in "english"')
        table_parts(table)
        self._address = Address(dsn)
        self._table = table
        self._k = k
        self._columns = checked_columns(columns)
        self._where = dict(where or {})
        self._words = words
        self._ladder = checked_ladder(ladder)
        self._exact_rows = exact_rows
        self._timeout_s = timeout_s
        self._num_connections = num_connections
        self._pool_timeout_s = pool_timeout_s
        self._embedder = embedder
        self._num_workers = num_workers
        self._opened: _Opened | None = None

    def __repr__(self) -> str:
        return f"PgVectorSource({self._address}, table={self._table!r})"

    @started_once
    async def start(self, progress: Progress) -> None:
        """Look at the table, load the embedder (many seconds), open the pool.

        :raises SourceError: the server cannot be reached, or refuses.
        :raises IndexMissingError: there is no such table.
        :raises IndexMismatchError: its vectors were made with another embedder or dimension.
        :raises VectorIndexError: a column is missing or of a wrong type; there is no pgvector; it may not be read.
        :raises ConfigurationError: the embedder cannot be loaded.
        :raises MissingDependencyError: the embedder's package is not installed.
        :raises WorkerError: a worker cannot start.
        """
        progress(f"looking at {self._address}")
        table, search, num_rows, dimensions = await self._inspect()
        progress(f"table {table.name} has about {num_rows:,} passages; loading the embedder {self._embedder}")
        embedding = EmbeddingPool(self._embedder, size=self._num_workers, made_with=table.made_with)
        link = Link(self._address, num_connections=self._num_connections, pool_timeout_s=self._pool_timeout_s)
        try:
            loaded = await embedding.start()
            self._check_dimensions(table, dimensions or {table.dimension or loaded.dimension: 0}, loaded, progress)
            await link.start()
        except BaseException:
            await link.aclose()
            await embedding.aclose()
            raise
        self._opened = _Opened(table, search, link, embedding)
        progress("the table is ready")

    def _check_dimensions(self, table: Table, found: Mapping[int, int], loaded: Loaded, progress: Progress) -> None:
        """`found`: rows by their dimension."""
        others = [str(dimension) for dimension in found if dimension != loaded.dimension]
        column = f"column {table.columns['embedding']!r} of table {table.name}"
        if loaded.dimension not in found:
            raise IndexMismatchError(
                f"{self._address}: {column} has {' and '.join(others)} dimensions, and embedder={self._embedder!r} has "
                f"{loaded.dimension}: name the embedder that the table was filled with"
            )
        if others:
            num_others = sum(found.values()) - found[loaded.dimension]
            progress(
                f"{column} has vectors of {' and '.join(others)} dimensions too, and embedder={self._embedder!r} has "
                f"{loaded.dimension}: {num_others:,} of {sum(found.values()):,} passages are left out. Embed them again"
            )

    async def _inspect(self) -> tuple[Table, Search, int, Mapping[int, int]]:
        import psycopg

        try:
            async with asyncio.timeout(self._pool_timeout_s + self._timeout_s):
                async with AsyncExitStack() as stack:
                    connection = await self._address.connect()
                    stack.push_async_callback(connection.close)  # leaving it commits; cancelled in that, it stays open
                    await stack.enter_async_context(connection)
                    await connection.set_read_only(True)
                    table = await inspect_table(connection, self._address, self._table, self._columns)
                    if self._words:
                        await connection.execute("SELECT %s::regconfig", [self._words])
                    search = Search(table, self._where, self._k)
                    return table, search, await search.estimate(connection), await search.dimensions(connection)
        except (psycopg.Error, OSError, UnicodeError) as error:
            raise at_start(self._address, error) from None

    async def aclose(self) -> None:
        """Stop the workers, and disconnect. Searches that are under way end with an error."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            try:
                await opened.link.aclose()
            finally:
                await opened.embedding.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """An `Update` for each stage that changes what is best; a `CutShort` if a later stage takes too long.

        A `Skipped` for a passage of which only the beginning was taken, since it is longer than 20,000 characters.

        :raises ConfigurationError: the source is not started.
        :raises SourceError: the server, the connection or the search failed, or no connection was free in time.
        :raises WorkerError: a worker died; the next query has another.
        """
        opened = self._opened
        if not opened:
            raise ConfigurationError("PgVectorSource is not started: use it in a Pipeline, or await its start() first")
        rows = Rows(self.name, opened.table.metric)
        embedding = asyncio.create_task(
            opened.embedding.query(storable(query), Share()), name="streamrag embed a query"
        )
        words = asyncio.create_task(self._find_words(opened, query), name="streamrag words of a query")
        try:
            best = rows.by_words(await _unless_first(words, embedding))
            stages = await self._stages(opened)
            for skipped in rows.newly_cut():
                yield skipped
            if best:
                yield Update(best, Hint(num_chunks=len(stages)))
            for number, stage in enumerate(stages):
                try:
                    found = rows.nearest(await self._find_nearest(opened, stage, embedding))
                except StatementTimeoutError as error:
                    if not best:
                        raise
                    yield CutShort(f"{error}, at stage {number + 1} of {len(stages)}: {stage.what}")
                    return
                for skipped in rows.newly_cut():
                    yield skipped
                if [_place(chunk) for chunk in found] != [_place(chunk) for chunk in best]:
                    best = found
                    yield Update(best, Hint(num_chunks=len(stages) - number - 1))
        finally:
            await cancel_regardless([words, embedding])

    async def _stages(self, opened: _Opened) -> list[_Stage]:
        """What to do for one query: the table may have grown since the one before."""
        num_rows = await opened.link.run(opened.search.estimate, {}, timeout_s=self._timeout_s)
        stages = []
        is_exact = num_rows <= self._exact_rows
        if (ladder := opened.table.ladder) and not (is_exact and num_rows <= FEW_ROWS and self._ladder is None):
            stages += [_Stage(f"{ladder.setting} = {rung}", _settings(ladder, rung)) for rung in self._rungs(ladder)]
        if is_exact:
            stages.append(_Stage("exact", {"enable_indexscan": "off"}, is_exact=True))
        if not stages:
            raise SourceError(
                f"{self._address}: table {opened.table.name} has no HNSW or IVFFlat index to look in, and about "
                f"{num_rows:,} rows, more than exact_rows={self._exact_rows:,}:  CREATE INDEX ON {opened.table.name} "
                f"USING hnsw ({opened.table.columns['embedding']} {opened.table.vector_type[1]}_cosine_ops)"
            )
        return stages

    def _rungs(self, ladder: Ladder) -> list[int]:
        if self._ladder is not None:
            return sorted({min(rung, ladder.most) for rung in self._ladder})
        first = 2 * self._k if ladder.setting == "hnsw.ef_search" else max(1, ladder.most // 64)
        return sorted({min(first << stage, ladder.most) for stage in range(NUM_STAGES)})

    async def _find_words(self, opened: _Opened, query: str) -> list[Row]:
        """What has the query's words; nothing if that takes too long or fails: the vectors find what is there."""
        configuration = self._words if self._words is not None else opened.table.words
        if configuration is None or self._words == "":
            return []
        try:
            return await opened.link.run(
                lambda connection: opened.search.words(connection, query, configuration),
                {},
                timeout_s=min(self._timeout_s, WORDS_TIMEOUT_S),
            )
        except SourceError:  # a text is too long for a tsvector, the database has no such characters, ...
            return []

    async def _find_nearest(self, opened: _Opened, stage: _Stage, embedding: "asyncio.Task[str]") -> list[Row]:
        try:
            vector = await embedding
        except ConfigurationError as error:  # what was found to be wrong with the embedder
            raise SourceError(str(error)) from error
        return await opened.link.run(
            lambda connection: opened.search.nearest(connection, vector, is_exact=stage.is_exact),
            stage.settings,
            timeout_s=self._timeout_s,
        )


async def _unless_first(words: "asyncio.Task[list[Row]]", embedding: "asyncio.Task[str]") -> list[Row]:
    """What the words found; nothing, and they are stopped, if the query is embedded first: its vector finds better.

    Stopping them in the server takes a connection of its own, and is not waited for.
    """
    await asyncio.wait([words, embedding], return_when=asyncio.FIRST_COMPLETED)
    if not words.done():
        words.cancel()
        return []
    return words.result()


def _settings(ladder: Ladder, rung: int) -> dict[str, str]:
    settings = {ladder.setting: str(rung)}
    if ladder.iterative:
        settings[f"{ladder.setting.partition('.')[0]}.iterative_scan"] = ladder.iterative
    return settings


def _place(chunk: Chunk) -> tuple[str, int, str]:
    return chunk.uri, chunk.passage, chunk.text
