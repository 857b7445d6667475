"""Filling a table of PostgreSQL with the passages of a folder of documents, and keeping it as the folder is.

    documents ──passages──▶ those that are new or changed ──worker: embedder──▶ vectors ──▶ table

Each passage stands beside a digest of what was embedded. So a build that was stopped or killed goes on where it was,
and one after a change of few documents embeds only these.
"""

import asyncio
import hashlib
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrag.sources.index.build import PassageWords, refuse_event_loop
from streamrag.sources.index.document_passages import (
    OnProgress,
    find_documents,
    nothing_to_index,
    read_documents,
)
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER
from streamrag.sources.index.embedder_pool import EmbedderPool, num_build_threads
from streamrag.sources.postgres.arguments import TableName, require_psycopg, storable, table_parts
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import Count, validated

if TYPE_CHECKING:
    from streamrag.sources.postgres.table_writer import TableWriter


@dataclass(frozen=True, slots=True)
class TableSummary:
    """A summary of what was filled, and of what was left out."""

    num_documents: int
    """Documents in the folder."""
    num_passages: int
    """Passages in the folder."""
    num_embedded: int
    """Passages that are new or changed since the last build."""
    num_duplicates: int
    """Passages left out because the same text had come before."""
    num_removed: int
    """Passages removed: of documents that changed and, with `prune`, of those that are not in the folder."""
    dimension: int
    skipped: tuple[tuple[str, str], ...]
    """Files and folders that were not read: path within the folder, and the reason."""
    duration_s: float


@validated
def build_table(
    folder: str | os.PathLike[str],
    dsn: str,
    *,
    table: TableName = "passages",
    embedder: str = DEFAULT_EMBEDDER,
    words: str = "english",
    prune: bool = False,
    passage_words: PassageWords = 180,
    max_file_bytes: Count = 10 << 20,
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
    refuse_event_loop("build_table")
    require_psycopg()
    tell = on_progress or (lambda done, total, step: None)
    build = _Build(Path(folder).resolve(), passage_words, max_file_bytes, tell)
    pool = EmbedderPool(embedder, size=1, num_threads=num_build_threads())
    writer = asyncio.run(build.run(dsn, table_parts(table), words, pool, prune))
    return build.summary(writer, clock() - started_s)


class _Build:
    """The documents of a folder, on their way into a table."""

    def __init__(self, folder: Path, passage_words: int, max_file_bytes: int, tell: OnProgress) -> None:
        self.folder, self._passage_words, self._tell = folder, passage_words, tell
        self._paths, self.skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=folder / ".none")
        self.uris: list[str] = []
        self.num_duplicates = 0
        self.seen: set[bytes] = set()

    async def run(self, dsn: str, parts: tuple[str, ...], words: str, pool: EmbedderPool, prune: bool) -> "TableWriter":
        """Fill the table, and return what has written to it."""
        import psycopg

        from streamrag.sources.postgres.link import Address
        from streamrag.sources.postgres.table import at_start
        from streamrag.sources.postgres.table_writer import TableWriter

        address = Address(dsn)

        def tell(done: int) -> None:
            self._tell(done, len(self._paths), "filling")

        documents = read_documents(self.folder, self._paths, self.skipped, self._passage_words, tell)
        try:
            async with AsyncExitStack() as stack:
                connection = await stack.enter_async_context(await address.connect(autocommit=True))
                writer = TableWriter(connection, address, parts, self._tell)
                await writer.lock()
                stack.push_async_callback(pool.aclose)
                await writer.make_table(await pool.start(), words)
                while item := await asyncio.to_thread(next, documents, None):
                    document, passages = item
                    self.uris.append(storable(document.uri))
                    await writer.add(pool, self.uris[-1], storable(document.title), self._new_passages(passages))
                await writer.flush(pool)
                tell(len(self._paths))
                if prune and self.uris:
                    await writer.remove_others(self.uris)
                await writer.make_indexes()
        except (psycopg.Error, UnicodeError) as error:
            raise at_start(address, error) from None
        return writer

    def _new_passages(self, texts: list[str]) -> dict[int, str]:
        """Return the passages that no document had before.

        Navigation and licences that every page repeats would fill the k nearest with one text.
        """
        passages = {}
        for number, text in enumerate(map(storable, texts)):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in self.seen:
                self.num_duplicates += 1
            else:
                self.seen.add(digest)
                passages[number] = text
        return passages

    def summary(self, writer: "TableWriter", duration_s: float) -> TableSummary:
        """Return what was filled.

        :raises ConfigurationError: the folder gives no passages.
        """
        if not self.seen:
            raise nothing_to_index(self.folder, self.skipped)
        return TableSummary(
            num_documents=len(self.uris),
            num_passages=len(self.seen),
            num_embedded=writer.num_embedded,
            num_duplicates=self.num_duplicates,
            num_removed=writer.num_removed,
            dimension=writer.dimension,
            skipped=tuple(sorted(self.skipped)),
            duration_s=duration_s,
        )
