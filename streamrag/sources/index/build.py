"""Building an index from a folder of documents."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamrag.clock import Clock, monotonic
from streamrag.errors import ConfigurationError, IndexExistsError, VectorIndexError
from streamrag.sources.building import OnProgress, check_caller, nothing_to_index
from streamrag.sources.index.diskann import require_diskann
from streamrag.sources.index.document_passages import (
    UnusableDocumentError,
    find_documents,
    read_document,
    relative_name,
    split_document,
)
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER, find_embedder
from streamrag.sources.index.generation import Corpus, building, publish, write_derived, write_passages
from streamrag.sources.index.index_folder import IndexKind, Manifest, looks_like_index
from streamrag.sources.index.inverted_lists import require_faiss
from streamrag.sources.index.keywords import require_stemmer


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
    kind: IndexKind
    num_embedded: int
    """Passages that had to be embedded: neither the index nor a build that was stopped had their vectors."""


def build_index(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    embedder: str = DEFAULT_EMBEDDER,
    kind: IndexKind | None = None,
    force: bool = False,
    passage_words: int = 180,
    max_file_bytes: int = 10 << 20,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Make the vector index `out` from the text, Markdown and HTML files below `folder`. Blocks for minutes.

    `embedder` is the name or path of a sentence-transformers model, or `module:function` of a function from
    `list[str]` to a 2-D array of floats. `kind` is "diskann", for `VectorSource`, or "ivf", for `IvfSource`;
    without it, the first of them that is installed. `passage_words` suits all-MiniLM-L6-v2, which sees 256
    word pieces. `on_progress` is called with (done, total, step) for the steps reading, embedding and indexing.

    With `force`, an index at `out` is replaced once the new one is complete, at one moment: a build that fails, is
    interrupted or killed leaves the old one as it is. What it had embedded stays in a hidden folder beside `out`, named
    `.NAME.building-` and eight characters; the next build of `out` with the same embedder goes on with it.

    :raises IndexExistsError: `out` exists: without `force`, or it is not an index.
    :raises ConfigurationError: no documents, or an embedder that cannot be used.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the process that embeds died.
    :raises VectorIndexError: a file cannot be written.
    """
    started_s = clock()
    check_caller("build_index", passage_words, max_file_bytes)
    require_stemmer()
    kind = _installed_kind(kind)
    place = find_embedder(embedder)
    folder, out = Path(folder).resolve(), Path(out).resolve()
    _check_out(out, force)
    tell = on_progress or (lambda done, total, step: None)
    try:
        paths, skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=out)
        with building(out) as unfinished:
            passages = read_passages_of(folder, paths, skipped, passage_words, tell)
            corpus = write_passages(passages, unfinished)
            if not corpus.num_passages:
                raise nothing_to_index(folder, skipped)
            manifest, num_embedded = write_derived(
                unfinished, corpus, place, kind=kind, passage_words=passage_words, old=None, tell=tell
            )
            publish(unfinished, out, lambda: _check_out(out, force))  # it may have come while we were building
    except OSError as error:
        raise VectorIndexError(f"building {out} failed: {error}") from error
    return summary_of(manifest, corpus, skipped, num_embedded, clock() - started_s)


def _installed_kind(kind: IndexKind | None) -> IndexKind:
    if kind is None:
        kind = "ivf" if find_spec("faiss") and not find_spec("diskannpy") else "diskann"
    if kind not in ("diskann", "ivf"):
        raise ConfigurationError(f'kind={kind!r} must be "diskann" or "ivf"')
    require_library(kind)
    return kind


def require_library(kind: IndexKind) -> None:
    """:raises MissingDependencyError: the library of this kind of index is not installed."""
    (require_diskann if kind == "diskann" else require_faiss)()


def _check_out(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not looks_like_index(out):
        raise IndexExistsError(f"{out} exists and is not a vector index: name another place, or remove it yourself")
    if not force:
        raise IndexExistsError(f"{out} exists: use force=True (--force) to replace it, or name another place")


def read_passages_of(
    folder: Path, paths: list[Path], skipped: list[tuple[str, str]], passage_words: int, tell: OnProgress
) -> Iterator[dict[str, Any]]:
    """The passages of these files, named by their paths within `folder`. Adds to `skipped` those that give none."""
    for number, path in enumerate(paths):
        tell(number, len(paths), "reading")
        try:
            document = read_document(path, folder)
        except UnusableDocumentError as error:
            skipped.append((relative_name(path, folder), str(error)))
            continue
        for passage, text in enumerate(split_document(document, passage_words)):
            yield {"uri": document.uri, "title": document.title, "passage": passage, "text": text}
    tell(len(paths), len(paths), "reading")


def summary_of(
    manifest: Manifest, corpus: Corpus, skipped: list[tuple[str, str]], num_embedded: int, duration_s: float
) -> IndexSummary:
    """What the caller is told."""
    return IndexSummary(
        num_documents=corpus.num_documents,
        num_passages=corpus.num_passages,
        num_duplicates=corpus.num_duplicates,
        dimension=manifest.dimension,
        skipped=tuple(sorted(skipped)),
        duration_s=duration_s,
        size_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
        kind=manifest.kind,
        num_embedded=num_embedded,
    )
