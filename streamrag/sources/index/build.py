"""Building an index from a folder of documents."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamrag.errors import ConfigurationError, IndexExistsError
from streamrag.sources.index.diskann import require_diskann
from streamrag.sources.index.document_passages import OnProgress, find_documents, read_documents
from streamrag.sources.index.embedder import DEFAULT_EMBEDDER, find_embedder
from streamrag.sources.index.generation import Generation, IndexSummary
from streamrag.sources.index.index_folder import IndexKind, StoredPassage, looks_like_index
from streamrag.sources.index.inverted_lists import require_faiss
from streamrag.sources.index.keywords import require_stemmer
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
    refuse_event_loop("build_index")
    require_stemmer()
    kind = kind or ("ivf" if find_spec("faiss") and not find_spec("diskannpy") else "diskann")
    require_library(kind)
    folder, out = Path(folder).resolve(), Path(out).resolve()
    generation = Generation(out, find_embedder(embedder), kind, passage_words, on_progress, clock)
    _check_out(out, force)
    paths, generation.skipped = find_documents(folder, max_file_bytes=max_file_bytes, leave_out=out)
    # Another index may have come to be there while this one is built.
    passages = partial(read_passages_of, folder, paths, generation)
    return generation.write(lambda _: passages(), lambda: _check_out(out, force), documents=folder)


def refuse_event_loop(function: str) -> None:
    """Refuse to run in an event loop, which `function` would block.

    :raises ConfigurationError: the caller is a coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(f"{function} would block the event loop: use `await asyncio.to_thread({function}, ...)`")


def require_library(kind: IndexKind) -> None:
    """Check that the library of this kind of index is installed.

    :raises MissingDependencyError: it is not.
    """
    (require_diskann if kind == "diskann" else require_faiss)()


def _check_out(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not looks_like_index(out):
        raise IndexExistsError(f"{out} exists and is not a vector index: name another place, or remove it yourself")
    if not force:
        raise IndexExistsError(f"{out} exists: use force=True (--force) to replace it, or name another place")


def read_passages_of(folder: Path, paths: list[Path], generation: Generation) -> Iterator[StoredPassage]:
    """Yield the passages of these files, named by their paths within `folder`; note the files that give none."""

    def tell(done: int) -> None:
        generation.tell(done, len(paths), "reading")

    for document, passages in read_documents(folder, paths, generation.skipped, generation.passage_words, tell):
        for number, text in enumerate(passages):
            yield {"uri": document.uri, "title": document.title, "passage": number, "text": text}
    tell(len(paths))
