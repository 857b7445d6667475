"""Fill a table of PostgreSQL with the passages of a folder of documents, and keep it in sync with the folder.

    documents ──▶ passages ──▶ new and changed ones ──worker: embedder──▶ vectors ──▶ table

Each row has a digest of the embedded text. So the next build embeds only the passages that have changed, or that a
stopped build has not reached.
"""

import asyncio
import hashlib
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrag.sources.documents.file_worker import file_worker
from streamrag.sources.documents.reader import Read
from streamrag.sources.index.build import PassageWords, refuse_event_loop
from streamrag.sources.index.document_passages import OnProgress, find_documents, nothing_to_index, read_documents
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER
from streamrag.sources.index.embedder_pool import NUM_BUILD_THREADS, EmbedderPool
from streamrag.sources.postgres.arguments import TableName, require_psycopg, storable, table_parts
from streamrag.support.clock import monotonic
from streamrag.support.validation import Count, validated

if TYPE_CHECKING:
    from streamrag.sources.postgres.table_writer import TableWriter


@dataclass(frozen=True, slots=True)
class TableSummary:
    """A summary of a build: what the table was filled with, and what was left out."""

    num_documents: int
    """Documents in the folder."""
    num_passages: int
    """Passages in the folder."""
    num_embedded: int
    """New passages, and those that have changed since the last build."""
    num_duplicates: int
    """Passages left out because an earlier one has the same text."""
    num_removed: int
    """Removed passages of documents that changed and, with `prune`, of documents that are not in the folder."""
    dimension: int
    """Numbers in the vector of a passage."""
    skipped: tuple[tuple[str, str], ...]
    """Skipped files and folders: path within the folder, and the reason."""
    duration_s: float
    """Seconds that the build took."""


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
) -> TableSummary:
    """Fill a table with the text, Markdown, HTML and PDF files below `folder`, and return the build's summary. Blocks.

    The table is for `PgVectorSource`, and is created if it does not exist, with an HNSW index of the vectors and a GIN
    index of the words; so is the extension, if the user is allowed to. Unchanged passages are kept, changed documents
    are replaced, and a stopped build is resumed. Of passages with equal text, only the first is in the table.

    `words` is the text search configuration of the GIN index. With `prune`, documents that are not in the folder are
    removed from the table. `on_progress` is called with (done, total, step) for the steps filling and indexing.

    :raises IndexExistsError: the table exists, and streamrag did not make it.
    :raises IndexMismatchError: the table was filled with another embedder.
    :raises ConfigurationError: there are no documents, the embedder is unusable, or this thread has an event loop.
    :raises MissingDependencyError: the driver or the embedder's package is not installed.
    :raises VectorIndexError: the server refuses, or another build fills the table.
    :raises SourceError: the server cannot be reached, or the connection broke; written rows stay.
    :raises WorkerError: the embedding process died.
    """
    started_s = monotonic()
    refuse_event_loop("build_table")
    require_psycopg()
    report = on_progress or (lambda done, total, step: None)
    build = _Build(Path(folder).resolve(), passage_words, max_file_bytes, report)
    pool = EmbedderPool(embedder, size=1, num_threads=NUM_BUILD_THREADS)
    with file_worker() as read:
        writer = asyncio.run(build.run(dsn, table_parts(table), words, pool, prune, read))
    return build.summary(writer, monotonic() - started_s)


class _Build:
    """A transfer of a folder's documents into a table."""

    def __init__(self, folder: Path, passage_words: int, max_file_bytes: int, report: OnProgress) -> None:
        self.folder, self._passage_words, self._report = folder, passage_words, report
        self._paths, self.skipped = find_documents(folder, max_file_bytes=max_file_bytes)
        self.uris: list[str] = []
        self.num_duplicates = 0
        self._digests: set[bytes] = set()

    async def run(
        self, dsn: str, parts: tuple[str, ...], words: str, pool: EmbedderPool, prune: bool, read: Read
    ) -> "TableWriter":
        """Lock, fill, perhaps prune, and index the table; return the writer with its counts. Translates driver errors.

        Closes the connection and `pool`. Prunes nothing if no document was read. Rows written before an error stay.
        """
        import psycopg

        from streamrag.sources.postgres.link import Address
        from streamrag.sources.postgres.table_writer import TableWriter

        address = Address(dsn)

        def report(num_done: int) -> None:
            self._report(num_done, len(self._paths), "filling")

        documents = read_documents(self.folder, self._paths, self.skipped, self._passage_words, report, read)
        try:
            async with AsyncExitStack() as stack:
                connection = await stack.enter_async_context(await address.connect(autocommit=True))
                writer = TableWriter(connection, address, parts, self._report)
                await writer.lock()
                stack.push_async_callback(pool.aclose)
                await writer.make_table(await pool.start(), words)
                while document := await asyncio.to_thread(next, documents, None):
                    self.uris.append(storable(document.uri))
                    passages = self._new_passages(document.passages)
                    await writer.add(pool, self.uris[-1], storable(document.title), passages)
                await writer.flush(pool)
                report(len(self._paths))
                if prune and self.uris:
                    await writer.remove_others(self.uris)
                await writer.make_indexes()
        except (psycopg.Error, UnicodeError) as error:
            raise address.explained_at_start(error) from None
        return writer

    def _new_passages(self, texts: list[str]) -> dict[int, str]:
        """Return the passages whose text is new in this build, by number in their document; count others as duplicates.

        Navigation and licences, which every page repeats, would otherwise fill the k nearest with one text.
        """
        passages = {}
        for number, text in enumerate(map(storable, texts)):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in self._digests:
                self.num_duplicates += 1
            else:
                self._digests.add(digest)
                passages[number] = text
        return passages

    def summary(self, writer: "TableWriter", duration_s: float) -> TableSummary:
        """Return the build's summary. ConfigurationError, with the table made already, if there are no passages."""
        if not self._digests:
            raise nothing_to_index(self.folder, self.skipped)
        return TableSummary(
            num_documents=len(self.uris),
            num_passages=len(self._digests),
            num_embedded=writer.num_embedded,
            num_duplicates=self.num_duplicates,
            num_removed=writer.num_removed,
            dimension=writer.dimension,
            skipped=tuple(sorted(self.skipped)),
            duration_s=duration_s,
        )
