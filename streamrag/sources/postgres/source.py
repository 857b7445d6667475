"""A source that searches a table of PostgreSQL with pgvector: by words, then by its index, then exactly."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from streamrag.core import Chunk, CutShort, Hint, Progress, SourceEvent, Update
from streamrag.core.lifecycle import started_once
from streamrag.errors import ConfigurationError, IndexMismatchError, SourceError
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER, EmbedderIdentity
from streamrag.sources.index.embedder_pool import EmbedderPool
from streamrag.sources.index.worker_jobs import NumWorkers
from streamrag.sources.postgres.arguments import (
    StatementTimeoutError,
    TableName,
    checked_columns,
    require_psycopg,
    storable,
    table_parts,
)
from streamrag.sources.workers.pool import Share
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Count, CountOrZero, GrowingCounts, Number, validated

if TYPE_CHECKING:
    from streamrag.sources.postgres.link import Link
    from streamrag.sources.postgres.query import Row, Rows, Search
    from streamrag.sources.postgres.table import PassageTable

log = logging.getLogger("streamrag.sources")

NUM_STAGES = 5
WORDS_TIMEOUT_S = 2.0
"""Timeout of the search by words. It is only useful as a quick first result, and is left out if it is slower."""
FEW_ROWS = 1_000  # number of rows up to which exact search is as fast as an index
_AtMost1000 = Annotated[Count, Field(le=1_000)]
_Timeout = Annotated[Number, Field(ge=0.001, le=3_600)]


@dataclass(frozen=True, slots=True)
class _Opened:
    table: "PassageTable"
    search: "Search"
    link: "Link"
    embedder: EmbedderPool


@dataclass(frozen=True, slots=True)
class _Stage:
    what: str
    settings: dict[str, str] = field(default_factory=dict)
    is_exact: bool = False


class PgVectorSource:
    """A search of a PostgreSQL table with pgvector: your own, or one that `streamrag index build --to` filled.

    A search runs in stages: by words, if the table has a full-text index, while the query is being embedded; then by
    vector, with an HNSW or IVFFlat index that searches more with each rung of a ladder; then exactly, if the table has
    few enough rows. A stage that changes the `k` best passages or their order yields an `Update` with all of them, best
    first; `Hint.num_chunks` counts the remaining stages. A chunk's `score` is the cosine similarity to the query, or
    the negative distance of another metric; in the update by words it is PostgreSQL's rank.

    Transactions are read-only, and settings apply to one transaction. Cancelling a query cancels it in the server.

    dsn: `postgresql://user@host/database`, or `host=... dbname=...`; missing parts are taken from `PGHOST`,
        `PGPASSWORD` and so on, and from `~/.pgpass`.
    table: its name, `schema.name`, or a tuple of both.
    k: number of passages to find.
    columns: the columns of a chunk's `text`, `uri`, `title`, `passage`, `embedding` and `words` (a tsvector), where
        their names differ from these. None leaves out any but text, uri and embedding. Without `passage`, passages are
        numbered within their document.
    where: a filter of required values by column: a value, None for NULL, or a list of alternatives. NULL in a row
        matches only None.
    words: the text search configuration for the search by words, such as "english"; "" turns it off. By default that of
        the table's full-text index; off without such an index.
    ladder: increasing values of `hnsw.ef_search` (up to 1,000) or `ivfflat.probes`, one for each stage; () for exact
        search only. By default five values that double, from 2 * k, or from a 64th of the index's lists.
    exact_rows: add an exact last stage if the server expects at most this number of rows; 0 turns it off.
    timeout_s: most seconds for each stage. If a stage takes longer, the search ends with the results so far.
    num_connections: most connections to the server, for all queries.
    pool_timeout_s: most seconds to wait for a connection.
    embedder: the embedder of the table's vectors: the name or path of a sentence-transformers model, or
        `module:function`. It is imported or loaded, so it is never taken from the table.
    num_workers: number of processes that embed queries.

    :raises ConfigurationError: an option is invalid.
    :raises MissingDependencyError: the driver is not installed.
    """

    name = "PgVectorSource"
    """Name for errors and schedulers; give sources that behave differently different names."""

    @validated
    def __init__(
        self,
        dsn: str,
        *,
        table: TableName = "passages",
        k: _AtMost1000 = 10,
        columns: Mapping[str, str | None] | None = None,
        where: Mapping[str, Any] | None = None,
        words: str | None = None,
        ladder: GrowingCounts | None = None,
        exact_rows: Annotated[CountOrZero, Field(le=1 << 40)] = 50_000,
        timeout_s: _Timeout = 10.0,
        num_connections: _AtMost1000 = 4,
        pool_timeout_s: _Timeout = 10.0,
        embedder: str = DEFAULT_EMBEDDER,
        num_workers: NumWorkers = 1,
    ) -> None:
        require_psycopg()
        from streamrag.sources.postgres.link import Address, Link

        table_parts(table)
        self._address = Address(dsn)
        self._new_link = partial(Link, self._address, num_connections=num_connections, pool_timeout_s=pool_timeout_s)
        self._table = table
        self._k = k
        self._columns = checked_columns(columns)
        self._where = dict(where or {})
        self._words = words
        self._ladder = ladder
        self._exact_rows = exact_rows
        self._timeout_s = timeout_s
        self._start_timeout_s = pool_timeout_s + timeout_s
        self._embedder = embedder
        self._num_workers = num_workers
        self._opened: _Opened | None = None

    def __repr__(self) -> str:
        return f"PgVectorSource({self._address}, table={self._table!r})"

    @started_once
    async def start(self, progress: Progress) -> None:
        """Inspect the table, load the embedder, which takes many seconds, and open the pool; close both if one fails.

        :raises AlreadyStartedError: the source is started.
        :raises SourceError: the server cannot be reached, or refuses the connection.
        :raises IndexMissingError: there is no such table.
        :raises IndexMismatchError: its vectors have another embedder or dimension.
        :raises VectorIndexError: a column is missing, unreadable or of a wrong type, or pgvector is not installed.
        :raises ConfigurationError: the embedder cannot be loaded.
        :raises MissingDependencyError: the embedder's package is not installed.
        :raises WorkerError: a worker cannot start.
        """
        progress(f"looking at {self._address}")
        table, search, num_rows, dimensions = await self._inspect()
        progress(f"table {table.name} has about {num_rows:,} passages; loading the embedder {self._embedder}")
        embedder = EmbedderPool(self._embedder, size=self._num_workers, made_with=table.made_with)
        link = self._new_link()
        try:
            loaded = await embedder.start()
            self._check_dimensions(table, dimensions or {table.dimension or loaded.dimension: 0}, loaded, progress)
            await link.start()
        except BaseException:
            await link.aclose()
            await embedder.aclose()
            raise
        self._opened = _Opened(table, search, link, embedder)
        progress("the table is ready")

    def _check_dimensions(
        self,
        table: "PassageTable",
        num_rows_by_dimension: Mapping[int, int],
        loaded: EmbedderIdentity,
        progress: Progress,
    ) -> None:
        """Raise IndexMismatchError if no row has the embedder's dimension; report how many rows are left out."""
        others = [str(dimension) for dimension in num_rows_by_dimension if dimension != loaded.dimension]
        if not others:
            return
        have = f"column {table.columns['embedding']!r} of table {table.name} has"
        dimensions = f"{' and '.join(others)} dimensions"
        ours = f"embedder={self._embedder!r} has {loaded.dimension}"
        if loaded.dimension not in num_rows_by_dimension:
            raise IndexMismatchError(
                f"{self._address}: {have} {dimensions}, and {ours}: name the embedder that the table was filled with"
            )
        num_rows = sum(num_rows_by_dimension.values())
        num_others = num_rows - num_rows_by_dimension[loaded.dimension]
        progress(
            f"{have} vectors of {dimensions} too, and {ours}: {num_others:,} of {num_rows:,} passages are left out. "
            "Embed them again"
        )

    async def _inspect(self) -> "tuple[PassageTable, Search, int, Mapping[int, int]]":
        """Return the table, its search, and its estimated rows, in total and by dimension. Raises as `start`.

        Reads them in one read-only connection, which is closed afterwards, and checks that `words` names a
        configuration.
        """
        import psycopg

        from streamrag.sources.postgres.query import Search
        from streamrag.sources.postgres.table import inspect_table

        try:
            async with asyncio.timeout(self._start_timeout_s), AsyncExitStack() as stack:
                connection = await self._address.connect()
                stack.push_async_callback(connection.close)  # if cancelled while it commits, it would stay open
                await stack.enter_async_context(connection)
                await connection.set_read_only(True)
                table = await inspect_table(connection, self._address, self._table, self._columns)
                if self._words:
                    await connection.execute("SELECT %s::regconfig", [self._words])
                search = Search(table, self._where, self._k)
                return table, search, await search.estimate(connection), await search.dimensions(connection)
        except (psycopg.Error, OSError, UnicodeError) as error:
            raise self._address.explained_at_start(error) from None

    async def aclose(self) -> None:
        """Disconnect, then stop the workers. Running searches fail. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            try:
                await opened.link.aclose()
            finally:
                await opened.embedder.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for each stage that changes the best passages; end with a `CutShort` if a stage times out.

        The passages of each stage replace those of the stage before. The search by words, which comes first, is left
        out if it fails or if the query is embedded first. A `Skipped` is yielded for a passage of more than 20,000
        characters, which is truncated.

        :raises ConfigurationError: the source is not started.
        :raises SourceError: the server, the connection or the search failed, no connection was free in time, or a stage
            timed out and none before it found anything.
        :raises WorkerError: a worker died; the next query gets a new one.
        """
        from streamrag.sources.postgres.query import Rows

        opened = self._opened
        if not opened:
            raise ConfigurationError("PgVectorSource is not started: use it in a Pipeline, or await its start() first")
        rows = Rows(self.name, opened.table.metric)
        embedding = asyncio.create_task(opened.embedder.query(storable(query), Share()), name="streamrag embed a query")
        words = asyncio.create_task(self._find_words(opened, query), name="streamrag words of a query")
        try:
            best = rows.by_words(await _words_before_embedding(words, embedding))
            stages = await self._stages(opened)
            for event in _changes(rows, best, (), len(stages)):
                yield event
            for number, stage in enumerate(stages, 1):
                try:
                    nearest = rows.nearest(await self._find_nearest(opened, stage, embedding))
                except StatementTimeoutError as error:
                    if not best:
                        raise
                    log.warning("%s, at stage %d of %d: %s", error, number, len(stages), stage.what)
                    yield CutShort(f"the database stopped the search at stage {number} of {len(stages)}")
                    return
                before, best = best, nearest
                for event in _changes(rows, best, before, len(stages) - number):
                    yield event
        finally:
            await cancel_and_wait([words, embedding])

    async def _stages(self, opened: _Opened) -> list[_Stage]:
        """Return the stages for the table's size, estimated anew: the ladder, then exact if small. SourceError if none.

        Rungs above the setting's maximum become that maximum. Up to 1,000 rows, an exact stage replaces the default
        ladder.
        """
        num_rows = await opened.link.run(opened.search.estimate, {}, timeout_s=self._timeout_s)
        stages = []
        is_exact = num_rows <= self._exact_rows
        if (ladder := opened.table.ladder) and not (is_exact and num_rows <= FEW_ROWS and self._ladder is None):
            first = 2 * self._k if ladder.setting == "hnsw.ef_search" else max(1, ladder.most // 64)
            default = [first << stage for stage in range(NUM_STAGES)]
            rungs = sorted({min(value, ladder.most) for value in (default if self._ladder is None else self._ladder)})
            stages += [_Stage(f"{ladder.setting} = {rung}", ladder.settings(rung)) for rung in rungs]
        if is_exact:
            stages.append(_Stage("exact", {"enable_indexscan": "off"}, is_exact=True))
        if not stages:
            table = opened.table
            raise SourceError(
                f"{self._address}: table {table.name} has no HNSW or IVFFlat index to look in, and about "
                f"{num_rows:,} rows, more than exact_rows={self._exact_rows:,}:  CREATE INDEX ON {table.name} "
                f"USING hnsw ({table.columns['embedding']} {table.vector_type[1]}_cosine_ops)"
            )
        return stages

    async def _find_words(self, opened: _Opened, query: str) -> "list[Row]":
        """Return the rows with the query's words; none if this search is off, slow (2 s) or ends with a SourceError."""
        configuration = self._words if self._words is not None else opened.table.words
        if configuration is None or self._words == "":
            return []
        timeout_s = min(self._timeout_s, WORDS_TIMEOUT_S)
        try:
            return await opened.link.run(
                lambda connection: opened.search.words(connection, query, configuration), {}, timeout_s=timeout_s
            )
        except SourceError:  # a timeout, a text too long for a tsvector, characters outside the encoding
            return []

    async def _find_nearest(self, opened: _Opened, stage: _Stage, embedding: "asyncio.Task[str]") -> "list[Row]":
        """Wait for the query's vector, and return the rows that this stage finds. StatementTimeoutError if too slow."""
        vector = await embedding
        return await opened.link.run(
            lambda connection: opened.search.nearest(connection, vector, is_exact=stage.is_exact),
            stage.settings,
            timeout_s=self._timeout_s,
        )


async def _words_before_embedding(words: "asyncio.Task[list[Row]]", embedding: "asyncio.Task[str]") -> "list[Row]":
    """Return the result of the search by words; none if the query is embedded first, since its vector finds better.

    In this case the search by words is cancelled. This takes another connection to the server, and is not awaited.
    """
    await asyncio.wait([words, embedding], return_when=asyncio.FIRST_COMPLETED)
    if not words.done():
        words.cancel()
        return []
    return words.result()


def _changes(rows: "Rows", best: tuple[Chunk, ...], before: tuple[Chunk, ...], num_left: int) -> list[SourceEvent]:
    """Return a stage's events: new truncations, and an update if the passages or their order changed."""
    events: list[SourceEvent] = [*rows.newly_cut()]
    old, new = ([(chunk.uri, chunk.passage, chunk.text) for chunk in chunks] for chunks in (before, best))
    if new != old:
        events += rows.skip_blank(Update(best, Hint(num_chunks=num_left)))
    return events
