"""Building a vector index from a folder of documents.

    documents ──passages──▶ passages.jsonl ──worker: embedder──▶ vectors ──worker: DiskANN──▶ index ──rename──▶ out
                                           ──▶ keywords.sqlite

The whole index is made in a hidden folder beside `out`, which `out` becomes at the very end.
"""

import asyncio
import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.clock import Clock, monotonic
from streamrag.core import Chunk
from streamrag.errors import ConfigurationError, IndexExistsError, VectorIndexError
from streamrag.scratch import locked_folder
from streamrag.sources.embedder import DEFAULT_EMBEDDER, EmbedderPlace, find_embedder
from streamrag.sources.index_folder import (
    MANIFEST,
    PASSAGES,
    Manifest,
    describe_files,
    explain,
    looks_like_index,
    stored_line,
)
from streamrag.sources.keywords import require_stemmer, write_keywords
from streamrag.sources.passages import (
    UnusableDocumentError,
    find_documents,
    read_document,
    relative_name,
    split_document,
)
from streamrag.sources.search import BUILD_COMPLEXITY, GRAPH_DEGREE, require_diskann
from streamrag.sources.workers import WorkerJobError, WorkerPool
from streamrag.versions import installed_versions

NUM_TEXTS_AT_ONCE = 128
"""Texts in one job of the embedding worker, which sorts them by length: 2-5 s on a CPU; then progress is reported."""

MAX_EMBEDDING_THREADS = 8

OnProgress: TypeAlias = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """What was built, and what was left out."""

    num_documents: int
    num_passages: int
    num_duplicates: int
    """Passages left out because the same text had come before."""
    dimension: int
    skipped: tuple[tuple[str, str], ...]
    """Files and folders that were not read: path within the folder, and the reason."""
    duration_s: float
    size_bytes: int


def build_index(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    embedder: str = DEFAULT_EMBEDDER,
    force: bool = False,
    passage_words: int = 180,
    max_file_bytes: int = 10 << 20,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Make the vector index `out` from the text, Markdown and HTML files below `folder`. Blocks for minutes.

    `embedder` is the name or path of a sentence-transformers model, or `module:function` of a function from
    `list[str]` to a 2-D array of floats. `passage_words` suits all-MiniLM-L6-v2, which sees 256 word pieces.
    `on_progress` is called with (done, total, step) for the steps reading, embedding and indexing.

    With `force`, an index at `out` is replaced once the new one is complete. Two renames do it: a build that fails, is
    interrupted or killed before them leaves the old one as it is; power that fails between them leaves it in a hidden
    folder beside `out`.

    :raises IndexExistsError: `out` exists: without `force`, or it is not an index.
    :raises ConfigurationError: no documents, or an embedder that cannot be used.
    :raises MissingDependencyError: DiskANN or the embedder's package is not installed.
    :raises WorkerError: the process that embeds died.
    :raises VectorIndexError: a file cannot be written.
    """
    started_s = clock()
    _check_caller(passage_words, max_file_bytes)
    require_diskann()
    require_stemmer()
    place = find_embedder(embedder)
    folder, out = Path(folder).resolve(), Path(out).resolve()
    _check_out(out, force)
    tell = on_progress or (lambda done, total, step: None)
    try:
        paths, skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=out)
        with _workspace(out) as unfinished:
            corpus = _write_passages(folder, paths, skipped, unfinished / PASSAGES, passage_words, tell)
            write_keywords(unfinished)
            made = asyncio.run(_write_vectors(unfinished, place, corpus.num_passages, tell))
            manifest = _write_manifest(unfinished, place, corpus, passage_words, made)
            _publish(unfinished, out, force)
    except OSError as error:
        raise VectorIndexError(f"building {out} failed: {error}") from error
    return IndexSummary(
        num_documents=corpus.num_documents,
        num_passages=corpus.num_passages,
        num_duplicates=corpus.num_duplicates,
        dimension=manifest.dimension,
        skipped=corpus.skipped,
        duration_s=clock() - started_s,
        size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
    )


def _check_caller(passage_words: int, max_file_bytes: int) -> None:
    if passage_words < 10:
        raise ConfigurationError(f"passage_words={passage_words!r} must be at least 10")
    if max_file_bytes < 1:
        raise ConfigurationError(f"max_file_bytes={max_file_bytes!r} must be at least 1")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError("build_index would block the event loop: use `await asyncio.to_thread(build_index, ...)`")


def _check_out(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not looks_like_index(out):
        raise IndexExistsError(f"{out} exists and is not a vector index: name another place, or remove it yourself")
    if not force:
        raise IndexExistsError(f"{out} exists: use force=True (--force) to replace it, or name another place")


@contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, gone at the end unless it was renamed. A killed build's is removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked_folder(out.parent, f".{out.name}.building-") as folder:
        yield folder


def _publish(unfinished: Path, out: Path, force: bool) -> None:
    """`unfinished` becomes `out`, in place of the index that may be there."""
    _check_out(out, force)  # it may have come while we were building
    if not out.exists() or not any(out.iterdir()):
        unfinished.rename(out)
        return
    old = out.with_name(f".{out.name}.old-{secrets.token_hex(4)}")
    out.rename(old)
    try:
        unfinished.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)


# -------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True, slots=True)
class _Corpus:
    num_documents: int
    num_passages: int
    num_duplicates: int
    skipped: tuple[tuple[str, str], ...]


def _write_passages(
    folder: Path, paths: list[Path], skipped: list[tuple[str, str]], out: Path, passage_words: int, tell: OnProgress
) -> _Corpus:
    unusable: list[tuple[str, str]] = []
    num_documents = num_duplicates = 0
    seen: set[bytes] = set()
    with out.open("w", encoding="utf-8") as file:
        for number, path in enumerate(paths):
            tell(number, len(paths), "reading")
            try:
                document = read_document(path, folder)
            except UnusableDocumentError as error:
                unusable.append((relative_name(path, folder), str(error)))
                continue
            num_documents += 1
            for passage, text in enumerate(split_document(document, passage_words)):
                # Navigation and licences that every page repeats would fill the k nearest with one text.
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest in seen:
                    num_duplicates += 1
                    continue
                seen.add(digest)
                file.write(stored_line(Chunk(text, document.uri, document.title, passage)))
    tell(len(paths), len(paths), "reading")
    skipped = sorted(skipped + unusable)
    if not seen:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(reason for _, reason in skipped).items())
        raise ConfigurationError(f"{folder} holds no text, Markdown or HTML to index (skipped: {reasons or 'nothing'})")
    return _Corpus(num_documents, len(seen), num_duplicates, tuple(skipped))


async def _write_vectors(unfinished: Path, place: EmbedderPlace, num_passages: int, tell: OnProgress) -> dict[str, Any]:
    """DiskANN's files, made in a worker process; its answer about the embedder."""
    options = {
        "folder": str(unfinished),
        "location": place.location,
        "embedder": place.name,
        "num_threads": min(MAX_EMBEDDING_THREADS, os.cpu_count() or 1),
    }
    pool = WorkerPool(
        "streamrag.sources.search:make_builder", options, size=1, name="index building worker", env=place.env
    )
    try:
        await pool.start()
        tell(0, num_passages, "embedding")
        made = await pool.run({"do": "load"})
        num_done = 0
        with (unfinished / PASSAGES).open(encoding="utf-8") as lines:
            while batch := [_text_to_embed(line) for line in islice(lines, NUM_TEXTS_AT_ONCE)]:
                await pool.run({"do": "embed", "texts": batch})
                num_done += len(batch)
                tell(num_done, num_passages, "embedding")
        tell(0, num_passages, "indexing")
        await pool.run({"do": "finish"})
        tell(num_passages, num_passages, "indexing")
        return made
    except WorkerJobError as error:
        raise explain(error, "building the index failed") from error
    finally:
        await pool.aclose()


def _text_to_embed(line: str) -> str:
    """A passage in the middle of a document often does not say what it is about; the title does."""
    fields = json.loads(line)
    title, text = fields["title"], fields["text"]
    return text if text.startswith(title) else f"{title}\n{text}"


def _write_manifest(
    unfinished: Path, place: EmbedderPlace, corpus: _Corpus, passage_words: int, made: dict[str, Any]
) -> Manifest:
    manifest = Manifest(
        created=datetime.now(UTC),
        embedder=place.name,
        dimension=made["dimension"],
        probe=made["probe"],
        num_documents=corpus.num_documents,
        num_passages=corpus.num_passages,
        passage_words=passage_words,
        graph_degree=GRAPH_DEGREE,
        build_complexity=BUILD_COMPLEXITY,
        packages=installed_versions("streamrag", "diskannpy", "numpy", "sentence-transformers", "torch"),
        files=describe_files(unfinished),
    )
    (unfinished / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    return manifest
