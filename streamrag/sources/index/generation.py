"""Write the next version of an index in a hidden folder beside it, then exchange the two folders.

    passages ──▶ passages.jsonl ──worker: embedder──▶ vectors ──worker: DiskANN or faiss──▶ index ──exchange──▶ out

The files of a published index never change. A killed program leaves either the old index or the new one. Its finished
embeddings stay in the hidden folder, and the next build of the same index reuses them.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrag.errors import VectorIndexError, WorkerError, distribution_of
from streamrag.sources.index.build_worker import IndexBuilder
from streamrag.sources.index.document_passages import OnProgress, nothing_to_index
from streamrag.sources.index.embedder import ModelPlace
from streamrag.sources.index.embedder_pool import NUM_BUILD_THREADS
from streamrag.sources.index.index_folder import (
    DUPLICATES,
    EMBEDDINGS,
    MANIFEST,
    PASSAGES,
    IndexKind,
    Manifest,
    StoredPassage,
    describe_files,
    passage_line,
)
from streamrag.sources.index.keywords import write_keywords
from streamrag.sources.index.packages import LIBRARIES
from streamrag.sources.index.worker_jobs import explain, new_pool
from streamrag.sources.workers.pool import WorkerJobError, WorkerPool
from streamrag.support.clock import Clock
from streamrag.support.files import exchange_folders, sync
from streamrag.support.temp_dirs import folder_lock, locked_folder
from streamrag.support.versions import installed_versions

TEXTS_PER_JOB = 128
"""Texts in one job of the embedding worker, which sorts them by length: 2-5 s on a CPU between progress reports."""


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """A summary of a build: what the index holds, and what was left out."""

    num_documents: int
    """Documents in the index."""
    num_passages: int
    """Passages in the index, which have different texts."""
    num_duplicates: int
    """Passages left out because an earlier one has the same text."""
    dimension: int
    """Numbers in the vector of a passage."""
    skipped: tuple[tuple[str, str], ...]
    """Skipped files and folders: path within the folder, and the reason."""
    duration_s: float
    """Seconds that the build took."""
    size_bytes: int
    """Size of all files."""
    kind: IndexKind
    """"diskann" is for `VectorSource`, "ivf" for `IvfSource`."""
    num_embedded: int
    """Passages that were embedded, because neither the old index nor a stopped build had their vectors."""


@dataclass
class Generation:
    """The next version of the index `out`, embedded with the model at `place`."""

    out: Path
    place: ModelPlace
    kind: IndexKind
    passage_words: int
    on_progress: OnProgress | None
    clock: Clock
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Files and folders without passages, each with the reason."""

    def __post_init__(self) -> None:
        self._started_s = self.clock()
        self.report: OnProgress = self.on_progress or (lambda done, total, step: None)

    def write(
        self,
        passages: Callable[[Path], Iterator[StoredPassage]],
        check: Callable[[], None],
        *,
        documents: Path,
        old: Path | None = None,
    ) -> IndexSummary:
        """Write an index of the given passages, publish it at `out`, return its summary. VectorIndexError on OSError.

        passages: called with the folder being written, where it may keep a temporary file.
        check: raises if `out` must not be replaced.
        documents: the origin of the passages, for the ConfigurationError if there are none.
        old: the index whose vectors are reused.
        """
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            # The folder is removed at the end, unless it was published or holds reusable embeddings.
            with locked_folder(self.out.parent, f".{self.out.name}.building-", kept=EMBEDDINGS) as unfinished:
                num_documents, num_passages, num_duplicates = _write_passages(passages(unfinished), unfinished)
                if not num_passages:
                    raise nothing_to_index(documents, self.skipped)
                write_keywords(unfinished)
                parameters, num_embedded = asyncio.run(self._write_vectors(unfinished, num_passages, old))
                parameters |= {"num_documents": num_documents, "num_passages": num_passages}
                manifest = self._write_manifest(unfinished, parameters)
                _publish(unfinished, self.out, check)
        except OSError as error:
            raise VectorIndexError(f"writing {self.out} failed: {error}") from error
        return IndexSummary(
            num_documents=num_documents,
            num_passages=num_passages,
            num_duplicates=num_duplicates,
            dimension=manifest.dimension,
            skipped=tuple(sorted(self.skipped)),
            duration_s=self.clock() - self._started_s,
            size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
            kind=manifest.kind,
            num_embedded=num_embedded,
        )

    def _write_manifest(self, unfinished: Path, parameters: dict[str, Any]) -> Manifest:
        """Remove the files of reusable embeddings; write and return a manifest of the others with their hashes."""
        for name in EMBEDDINGS:
            (unfinished / name).unlink()
        library = distribution_of(LIBRARIES[self.kind])
        manifest = Manifest(
            kind=self.kind,
            created=datetime.now(UTC),
            embedder=self.place.name,
            passage_words=self.passage_words,
            packages=installed_versions("streamrag", library, "numpy", "sentence-transformers", "torch"),
            files=describe_files(unfinished),
            **parameters,
        )
        (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=2, exclude_none=True) + "\n")
        return manifest

    async def _write_vectors(self, unfinished: Path, total: int, old: Path | None) -> tuple[dict[str, Any], int]:
        """Embed the passages and build the index files in a worker, which is closed at the end; report both steps.

        Return the worker's parameters for the manifest, and the number of passages that had to be embedded.
        """
        place, old_folder = self.place, str(old) if old else None
        builder = IndexBuilder(str(unfinished), self.kind, place.location, place.name, NUM_BUILD_THREADS, old_folder)
        pool = new_pool(builder, size=1, name="index building worker", env=place.env)
        try:
            await pool.start()
            parameters = await _run(pool, {"do": "load"})
            num_reused, num_embedded = total - parameters.pop("num_missing"), 0
            self.report(num_reused, total, "embedding")
            while num_new := (await _run(pool, {"do": "embed", "num_texts": TEXTS_PER_JOB}))["num_embedded"]:
                num_embedded += num_new
                self.report(num_reused + num_embedded, total, "embedding")
            self.report(0, total, "indexing")
            parameters |= await _run(pool, {"do": "finish", "num_passages": total})
            self.report(total, total, "indexing")
            return parameters, num_embedded
        finally:
            await pool.aclose()


async def _run(pool: WorkerPool, job: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's answer; VectorIndexError for its OSError or death in the last job, our own error for others."""
    try:
        return await pool.run(job)
    except WorkerJobError as error:
        if error.kind == "OSError":
            raise VectorIndexError(f"building the index failed: {error.message}") from error
        raise explain(error, "building the index failed") from error
    except WorkerError as error:
        if job["do"] == "finish":  # on a full disk, DiskANN may end its process
            raise VectorIndexError(f"building the index failed: {error}. Is there room for its files?") from error
        raise


def _write_passages(passages: Iterable[StoredPassage], unfinished: Path) -> tuple[int, int, int]:
    """Write the passages to one file, and duplicates of earlier texts to another.

    Navigation and licences, which every page repeats, would otherwise fill the k nearest with one text.
    Return the number of documents, of distinct passages and of duplicates.
    """
    documents: set[str] = set()
    digests: set[bytes] = set()
    num_duplicates = 0
    with (
        (unfinished / PASSAGES).open("w", encoding="utf-8") as distinct,
        (unfinished / DUPLICATES).open("w", encoding="utf-8") as duplicates,
    ):
        for fields in passages:
            documents.add(fields["uri"])
            digest = hashlib.blake2b(fields["text"].encode(), digest_size=16).digest()
            is_duplicate = digest in digests
            digests.add(digest)
            num_duplicates += is_duplicate
            (duplicates if is_duplicate else distinct).write(passage_line(fields))
    return len(documents), len(digests), num_duplicates


def _publish(unfinished: Path, out: Path, check: Callable[[], None]) -> None:
    """Sync `unfinished`, and move it to `out`, whose old index, if any, is removed. `check` raises to prevent that.

    Sources that have the old index open keep its files until they close them.
    """
    for path in [*unfinished.iterdir(), unfinished]:
        sync(path)
    if not out.exists() or not any(out.iterdir()):
        check()
        unfinished.rename(out)
        sync(out.parent)
        return
    with folder_lock(out):
        check()
        exchange_folders(unfinished, out)
        sync(out.parent)
        shutil.rmtree(unfinished, ignore_errors=True)
