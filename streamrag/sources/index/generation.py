"""The next version of an index, written in a hidden folder beside it and put in the place of the old one.

    passages ──▶ passages.jsonl ──worker: embedder──▶ vectors ──worker: DiskANN or faiss──▶ index ──exchange──▶ out

Nothing in a folder that is an index ever changes. A program that is killed leaves the old index or the new one. What it
had embedded stays in the hidden folder, and the next build of the same index goes on with it.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from streamrag.errors import VectorIndexError, WorkerError
from streamrag.sources.index.document_passages import OnProgress, nothing_to_index
from streamrag.sources.index.embedder import ModelPlace
from streamrag.sources.index.embedder_pool import num_build_threads
from streamrag.sources.index.embedding_file import KEPT
from streamrag.sources.index.index_folder import (
    DUPLICATES,
    MANIFEST,
    PASSAGES,
    IndexKind,
    Manifest,
    StoredPassage,
    describe_files,
    passage_line,
    read_passages,
    with_title,
)
from streamrag.sources.index.keywords import write_keywords
from streamrag.sources.index.worker_jobs import explain
from streamrag.sources.workers.pool import WorkerJobError, WorkerPool
from streamrag.support.clock import Clock
from streamrag.support.files import exchange_folders, sync
from streamrag.support.temp_dirs import held, locked_folder
from streamrag.support.versions import installed_versions

NUM_TEXTS_AT_ONCE = 128
"""Texts in one job of the embedding worker, which sorts them by length: 2-5 s on a CPU; then progress is reported."""


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """A summary of what was built, and of what was left out."""

    num_documents: int
    num_passages: int
    num_duplicates: int
    """Passages left out because the same text had come before."""
    dimension: int
    skipped: tuple[tuple[str, str], ...]
    """Files and folders that were not read: path within the folder, and the reason."""
    duration_s: float
    size_bytes: int
    kind: IndexKind
    num_embedded: int
    """Passages that had to be embedded: neither the index nor a build that was stopped had their vectors."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The numbers of what is indexed."""

    num_documents: int
    num_passages: int
    num_duplicates: int


class Generation:
    """The next version of the index `out`, made by the embedder at `place`."""

    def __init__(
        self,
        out: Path,
        place: ModelPlace,
        kind: IndexKind,
        passage_words: int,
        on_progress: OnProgress | None,
        clock: Clock,
    ) -> None:
        self.out, self._place, self._kind, self.passage_words = out, place, kind, passage_words
        self.tell: OnProgress = on_progress or (lambda done, total, step: None)
        self._clock, self._started_s = clock, clock()
        self.skipped: list[tuple[str, str]] = []
        """Files and folders that give no passages, each with the reason."""

    def write(
        self,
        passages: Callable[[Path], Iterator[StoredPassage]],
        check: Callable[[], None],
        *,
        documents: Path,
        old: Path | None = None,
    ) -> IndexSummary:
        """Write the index of these `passages`, which are given the folder being written, and publish it.

        check: raises if `out` must not be replaced now.
        documents: where the passages are from, for the error if there are none.
        old: the index whose vectors are used again.
        """
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            # The folder is gone at the end, unless it was published or holds embeddings that are worth keeping.
            with locked_folder(self.out.parent, f".{self.out.name}.building-", kept=KEPT) as unfinished:
                corpus = write_passages(passages(unfinished), unfinished)
                if not corpus.num_passages:
                    raise nothing_to_index(documents, self.skipped)
                write_keywords(unfinished)
                made, num_embedded = asyncio.run(self._write_vectors(unfinished, corpus.num_passages, old))
                manifest = self._write_manifest(unfinished, corpus, made)
                publish(unfinished, self.out, check)
        except OSError as error:
            raise VectorIndexError(f"writing {self.out} failed: {error}") from error
        return IndexSummary(
            num_documents=corpus.num_documents,
            num_passages=corpus.num_passages,
            num_duplicates=corpus.num_duplicates,
            dimension=manifest.dimension,
            skipped=tuple(sorted(self.skipped)),
            duration_s=self._clock() - self._started_s,
            size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
            kind=manifest.kind,
            num_embedded=num_embedded,
        )

    def _write_manifest(self, unfinished: Path, corpus: Corpus, made: dict[str, Any]) -> Manifest:
        for name in KEPT:
            (unfinished / name).unlink()
        library = {"diskann": "diskannpy", "ivf": "faiss-cpu"}[self._kind]
        manifest = Manifest(
            kind=self._kind,
            created=datetime.now(UTC),
            embedder=self._place.name,
            num_documents=corpus.num_documents,
            num_passages=corpus.num_passages,
            passage_words=self.passage_words,
            packages=installed_versions("streamrag", library, "numpy", "sentence-transformers", "torch"),
            files=describe_files(unfinished),
            **made,
        )
        (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=2, exclude_none=True) + "\n")
        return manifest

    async def _write_vectors(self, unfinished: Path, total: int, old: Path | None) -> tuple[dict[str, Any], int]:
        """Have a worker write the files of DiskANN or faiss. Return its answer about them, and how many were embedded.

        The number embedded counts passages whose vectors are neither in `old` nor in a build that was stopped.
        """
        options = {
            "folder": str(unfinished),
            "kind": self._kind,
            "location": self._place.location,
            "embedder": self._place.name,
            "num_threads": num_build_threads(),
            "old": str(old) if old else None,
        }
        handler = "streamrag.sources.index.build_worker:IndexBuilder"
        pool = WorkerPool(handler, options, size=1, name="index building worker", env=self._place.env)
        try:
            await pool.start()
            self.tell(0, total, "embedding")
            made = await _run(pool, {"do": "load"})
            num_done = num_embedded = 0
            texts = (with_title(fields["title"], fields["text"]) for fields in read_passages(unfinished, PASSAGES))
            while batch := list(islice(texts, NUM_TEXTS_AT_ONCE)):
                num_embedded += (await _run(pool, {"do": "embed", "texts": batch}))["num_embedded"]
                num_done += len(batch)
                self.tell(num_done, total, "embedding")
            self.tell(0, total, "indexing")
            made |= await _run(pool, {"do": "finish", "num_passages": total})
            self.tell(total, total, "indexing")
            return made, num_embedded
        finally:
            await pool.aclose()


async def _run(pool: WorkerPool, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return await pool.run(job)
    except WorkerJobError as error:
        if error.kind == "OSError":
            raise VectorIndexError(f"building the index failed: {error.message}") from error
        raise explain(error, "building the index failed") from error
    except WorkerError as error:
        if job["do"] == "finish":  # on a disk that is full, DiskANN ends its process, or raises
            raise VectorIndexError(f"building the index failed: {error}. Is there room for its files?") from error
        raise


def write_passages(passages: Iterable[StoredPassage], unfinished: Path) -> Corpus:
    """Write the passages of an index to be, and apart those that are left out because the same text came before.

    Navigation and licences that every page repeats would fill the k nearest with one text.
    """
    documents: set[str] = set()
    seen: set[bytes] = set()
    num_duplicates = 0
    with (
        (unfinished / PASSAGES).open("w", encoding="utf-8") as first_ones,
        (unfinished / DUPLICATES).open("w", encoding="utf-8") as others,
    ):
        for fields in passages:
            documents.add(fields["uri"])
            digest = hashlib.blake2b(fields["text"].encode(), digest_size=16).digest()
            is_new = digest not in seen
            seen.add(digest)
            num_duplicates += not is_new
            (first_ones if is_new else others).write(passage_line(fields))
    return Corpus(len(documents), len(seen), num_duplicates)


def publish(unfinished: Path, out: Path, check: Callable[[], None]) -> None:
    """Put `unfinished` in the place of `out`, which may be an index; `check` raises if that must not be.

    Sources that have the old one open go on with it: its files stay until they close them.
    """
    for path in [*unfinished.iterdir(), unfinished]:
        sync(path)
    if not out.exists() or not any(out.iterdir()):
        check()
        unfinished.rename(out)
        sync(out.parent)
        return
    with held(out):
        check()
        exchange_folders(unfinished, out)
        sync(out.parent)
        shutil.rmtree(unfinished, ignore_errors=True)
