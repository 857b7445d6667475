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

from streamrag.clock import Clock, monotonic
from streamrag.sources.building import OnProgress, check_caller, nothing_to_index
from streamrag.sources.index.document_passages import (
    UnusableDocumentError,
    find_documents,
    read_document,
    relative_name,
    split_document,
)
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER
from streamrag.sources.index.embedder_pool import EmbeddingPool, building_threads
from streamrag.sources.postgres.link import Address
from streamrag.sources.postgres.names import (
    TableName,
    table_parts,
)
from streamrag.sources.postgres.query import storable
from streamrag.sources.postgres.table import at_start
from streamrag.sources.postgres.table_writer import Document, Filling


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
    check_caller("build_table", passage_words, max_file_bytes)
    address = Address(dsn)
    filling = Filling(address, table_parts(table), words, on_progress or (lambda done, total, step: None))
    reading = _Reading(Path(folder).resolve(), passage_words, max_file_bytes)
    asyncio.run(_build(filling, reading, EmbeddingPool(embedder, size=1, num_threads=building_threads()), prune))
    if not reading.seen:
        raise nothing_to_index(reading.folder, reading.skipped)
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


async def _build(filling: Filling, reading: "_Reading", pool: EmbeddingPool, prune: bool) -> None:
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


class _Reading:
    def __init__(self, folder: Path, passage_words: int, max_file_bytes: int) -> None:
        self.folder, self._passage_words = folder, passage_words
        self.paths, self.skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=folder / ".none")
        self.num_documents = self.num_duplicates = 0
        self.seen: set[bytes] = set()

    def document(self, path: Path) -> Document | None:
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
        return Document(storable(document.uri), storable(document.title), passages)
