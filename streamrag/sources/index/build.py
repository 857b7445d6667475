"""Build an index from a folder of documents."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamrag.errors import ConfigurationError, IndexExistsError
from streamrag.sources.documents.file_worker import file_worker
from streamrag.sources.index.document_passages import OnProgress, find_documents, read_documents
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER, find_embedder
from streamrag.sources.index.generation import Generation, IndexSummary
from streamrag.sources.index.index_folder import IndexKind, StoredPassage, looks_like_index
from streamrag.sources.index.packages import LIBRARIES, is_installed, require_package
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import Count, validated

PassageWords = Annotated[Count, Field(ge=10)]


@validated
def build_index(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    embedder: str = DEFAULT_EMBEDDER,
    kind: IndexKind | None = None,
    force: bool = False,
    passage_words: PassageWords = 180,
    max_file_bytes: Count = 10 << 20,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Build the vector index `out` from the text, Markdown, HTML and PDF files below `folder`; return its summary.

    `embedder` is the name or path of a sentence-transformers model, or `module:function` of a function from `list[str]`
    to a 2-D array of floats. `kind` is "diskann", for `VectorSource`, or "ivf", for `IvfSource`; by default, "diskann"
    if DiskANN is installed. The default of `passage_words` suits all-MiniLM-L6-v2, which reads 256 word pieces.
    `on_progress` is called with (done, total, step) for the steps reading, embedding and indexing. Blocks for minutes.

    With `force`, an existing index at `out` is replaced atomically once the new one is complete: a build that fails, is
    interrupted or is killed leaves the old index unchanged. Its finished embeddings stay in a hidden folder beside
    `out`, named `.NAME.building-` and eight characters, and the next build of `out` with the same embedder reuses them.

    :raises IndexExistsError: `out` exists, and `force` is not set or it is not an index.
    :raises ConfigurationError: there are no documents, the embedder is unusable, or this thread has an event loop.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the embedding process died.
    :raises VectorIndexError: a file cannot be written.
    """
    refuse_event_loop("build_index")
    require_package("snowballstemmer")
    kind = kind or ("diskann" if is_installed("diskannpy") else "ivf")
    require_package(LIBRARIES[kind])
    folder, out = Path(folder).resolve(), Path(out).resolve()
    generation = Generation(out, find_embedder(embedder), kind, passage_words, on_progress, clock)
    _check_out(out, force)
    paths, generation.skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=out)
    passages = partial(read_passages_of, folder, paths, generation)
    # `out` is checked again at the end: another program may have made an index there meanwhile.
    return generation.write(lambda _: passages(), lambda: _check_out(out, force), documents=folder)


def refuse_event_loop(function: str) -> None:
    """Raise ConfigurationError if an event loop runs in this thread, which the function of this name would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(f"{function} would block the event loop: use `await asyncio.to_thread({function}, ...)`")


def _check_out(out: Path, force: bool) -> None:
    """Raise IndexExistsError unless `out` is absent, an empty folder or, if `force` is set, an index."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not looks_like_index(out):
        raise IndexExistsError(f"{out} exists and is not a vector index: name another place, or remove it yourself")
    if not force:
        raise IndexExistsError(f"{out} exists: use force=True (--force) to replace it, or name another place")


def read_passages_of(folder: Path, paths: list[Path], generation: Generation) -> Iterator[StoredPassage]:
    """Yield the passages of these files, and add unusable files and lost PDF pages to `generation.skipped`.

    Documents are named by their paths within `folder`.
    """

    def report(num_done: int) -> None:
        generation.report(num_done, len(paths), "reading")

    words = generation.passage_words
    with file_worker() as read:
        for document in read_documents(folder, paths, generation.skipped, words, report, read):
            for number, text in enumerate(document.passages):
                yield {"uri": document.uri, "title": document.title, "passage": number, "text": text}
    report(len(paths))
