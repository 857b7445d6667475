"""Writing an index anew, in a hidden folder beside it, and putting it in the place of the old one.

    passages ──▶ passages.jsonl ──worker: embedder──▶ vectors ──worker: DiskANN or faiss──▶ index ──exchange──▶ out

Nothing in a folder that is an index ever changes: `building` gives a folder to fill, `write_passages` and then
`write_derived` fill it, and `publish` makes it the index. A program that is killed leaves the old index or the new one.
What it had embedded stays in the hidden folder, and the next build of the same index goes on with it.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from streamrag.core import Chunk
from streamrag.errors import VectorIndexError, WorkerError
from streamrag.sources.building import OnProgress
from streamrag.sources.embedder import EmbedderPlace
from streamrag.sources.index.embedded import KEPT
from streamrag.sources.index_folder import (
    DUPLICATES,
    MANIFEST,
    PASSAGES,
    IndexKind,
    Manifest,
    describe_files,
    explain,
    read_passages,
    stored_line,
    with_title,
)
from streamrag.sources.search.keywords import write_keywords
from streamrag.sources.workers.pool import WorkerJobError, WorkerPool
from streamrag.support.files import exchange_folders, sync
from streamrag.support.temp_dirs import held, locked_folder
from streamrag.versions import installed_versions

NUM_TEXTS_AT_ONCE = 128
"""Texts in one job of the embedding worker, which sorts them by length: 2-5 s on a CPU; then progress is reported."""

MAX_EMBEDDING_THREADS = 8


@dataclass(frozen=True, slots=True)
class Corpus:
    """What passages there are."""

    num_documents: int
    num_passages: int
    num_duplicates: int


@contextmanager
def building(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, gone at the end unless it was published, or what it holds is worth keeping."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(out.parent, f".{out.name}.building-", kept=KEPT) as folder:
        yield folder


def write_passages(passages: Iterable[Mapping[str, Any]], unfinished: Path) -> Corpus:
    """The passages of an index to be, and those left out because the same text came before.

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
            (first_ones if is_new else others).write(stored_line(Chunk(**fields)))
    return Corpus(len(documents), len(seen), num_duplicates)


def write_derived(
    unfinished: Path,
    corpus: Corpus,
    place: EmbedderPlace,
    *,
    kind: IndexKind,
    passage_words: int,
    old: Path | None,
    tell: OnProgress,
) -> tuple[Manifest, int]:
    """All that follows from `passages.jsonl`: the keyword index, vectors, what searches them, and the manifest.

    Vectors of the index `old` are used again. Returns the number of passages that had to be embedded, too.
    """
    write_keywords(unfinished)
    made, num_embedded = asyncio.run(_write_vectors(unfinished, corpus, place, kind, old, tell))
    for name in KEPT:
        (unfinished / name).unlink()
    library = {"diskann": "diskannpy", "ivf": "faiss-cpu"}[kind]
    manifest = Manifest(
        kind=kind,
        created=datetime.now(UTC),
        embedder=place.name,
        num_documents=corpus.num_documents,
        num_passages=corpus.num_passages,
        passage_words=passage_words,
        packages=installed_versions("streamrag", library, "numpy", "sentence-transformers", "torch"),
        files=describe_files(unfinished),
        **made,
    )
    (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=2, exclude_none=True) + "\n")
    return manifest, num_embedded


async def _write_vectors(
    unfinished: Path, corpus: Corpus, place: EmbedderPlace, kind: IndexKind, old: Path | None, tell: OnProgress
) -> tuple[dict[str, Any], int]:
    """The files of DiskANN or faiss, made in a worker process; its answer about the embedder and about them."""
    options = {
        "folder": str(unfinished),
        "kind": kind,
        "location": place.location,
        "embedder": place.name,
        "num_threads": min(MAX_EMBEDDING_THREADS, os.cpu_count() or 1),
        "old": str(old) if old else None,
    }
    handler = "streamrag.sources.index.build_worker:make_builder"
    pool = WorkerPool(handler, options, size=1, name="index building worker", env=place.env)
    total = corpus.num_passages
    try:
        await pool.start()
        tell(0, total, "embedding")
        made = await pool.run({"do": "load"})
        num_done = num_embedded = 0
        texts = (with_title(fields["title"], fields["text"]) for fields in read_passages(unfinished, PASSAGES))
        while batch := list(islice(texts, NUM_TEXTS_AT_ONCE)):
            answer = await pool.run({"do": "embed", "texts": batch})
            num_embedded += answer["num_embedded"]
            num_done += len(batch)
            tell(num_done, total, "embedding")
        tell(0, total, "indexing")
        made |= await _finish(pool, total)
        tell(total, total, "indexing")
        return made, num_embedded
    except WorkerJobError as error:
        if error.kind == "OSError":
            raise VectorIndexError(f"building the index in {unfinished.parent} failed: {error.message}") from error
        raise explain(error, "building the index failed") from error
    finally:
        await pool.aclose()


async def _finish(pool: WorkerPool, num_passages: int) -> dict[str, Any]:
    try:
        return await pool.run({"do": "finish", "num_passages": num_passages})
    except WorkerJobError:
        raise
    except WorkerError as error:  # on a disk that is full, DiskANN ends its process, or raises
        raise VectorIndexError(f"building the index failed: {error}. Is there room for its files?") from error


def publish(unfinished: Path, out: Path, check: Callable[[], None]) -> None:
    """`unfinished` becomes `out`, in place of the index that may be there; `check` raises if that must not be.

    Those who have the old one open go on with it: its files stay until they close them.
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
