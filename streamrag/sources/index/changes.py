"""Add, replace and remove documents of an index without embedding the other documents again.

A change writes a new index from the old passages and vectors that stay and from the new ones, and then exchanges the
folders. It costs the time to build DiskANN's graph, or to sort the vectors into faiss's lists.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from streamrag.errors import ConfigurationError, VectorIndexError
from streamrag.sources.index.build import read_passages_of, refuse_event_loop
from streamrag.sources.index.document_passages import (
    OnProgress,
    find_documents,
    nothing_to_index,
    reason_to_skip,
    relative_name,
)
from streamrag.sources.index.embedder import embedder_of_index
from streamrag.sources.index.generation import Generation, IndexSummary
from streamrag.sources.index.index_folder import (
    DUPLICATES,
    PASSAGES,
    StoredPassage,
    check_index,
    passage_line,
    read_passages,
)
from streamrag.sources.index.packages import LIBRARIES, require_package
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import Count, validated

ADDED = "added.jsonl"
"""A file of the new passages, in the building folder only."""


@validated
def add_documents(
    index: str | os.PathLike[str],
    paths: Iterable[str | os.PathLike[str]],
    *,
    folder: str | os.PathLike[str] | None = None,
    embedder: str | None = None,
    max_file_bytes: Count = 10 << 20,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Add files, and the files below folders, to an index; replace documents of the index that have their names.

    A document's name is its path within `folder`: pass the folder that the index was built from. Without `folder`, the
    name of a file is its file name, and the name of a file below a folder is its path within that folder. Only new
    passages are embedded. Open sources continue with the old index. Returns the summary of the whole new index. Blocks:
    in a coroutine, use `asyncio.to_thread`.

    Pass `embedder` where `VectorSource` needs it.

    :raises ConfigurationError: a path does not exist or is outside `folder`, nothing can be indexed, or an event loop
        runs in this thread.
    :raises IndexMissingError: there is no index. Like IndexCorruptError and IndexMismatchError, before any change.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the embedding process died.
    :raises VectorIndexError: a file cannot be written, or another program changed the index meanwhile.
    """
    refuse_event_loop("add_documents")
    change = _Change(index, embedder, on_progress, clock)
    base_folder = Path(folder).resolve() if folder is not None else None
    roots = [Path(path) for path in paths]
    documents: dict[Path, list[Path]] = {}
    for path in roots:
        base, files, skipped = _documents(path, base_folder, change.out, max_file_bytes)
        documents.setdefault(base, []).extend(files)
        change.generation.skipped += skipped
    return change.write(lambda unfinished: change.with_documents(documents, roots, unfinished))


@validated
def remove_documents(
    index: str | os.PathLike[str],
    names: Iterable[str],
    *,
    embedder: str | None = None,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Remove documents from an index, by the `uri` of their chunks or by the name of a folder.

    Embeds only passages that were left out as duplicates of a removed one. Otherwise like `add_documents`.

    :raises ConfigurationError: a name is not in the index, or nothing would be left.
    :raises IndexMissingError: there is no index. Like IndexCorruptError and IndexMismatchError, before any change.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the embedding process died.
    :raises VectorIndexError: a file cannot be written, or another program changed the index meanwhile.
    """
    refuse_event_loop("remove_documents")
    change = _Change(index, embedder, on_progress, clock)
    uris = {fields["uri"] for fields in change.old_passages()}
    removed: set[str] = set()
    for name in names:
        matching = {uri for uri in uris if uri == name or uri.startswith(name.rstrip("/") + "/")}
        if not matching:
            raise ConfigurationError(f"{change.out} has no document {name!r}: name a document as its chunks' uri")
        removed |= matching
    if removed == uris:
        raise ConfigurationError(f"{change.out} would be empty: remove the folder instead")
    return change.write(lambda _: (fields for fields in change.old_passages() if fields["uri"] not in removed))


class _Change:
    """An existing index and the generation that will replace it."""

    def __init__(
        self, index: str | os.PathLike[str], embedder: str | None, on_progress: OnProgress | None, clock: Clock
    ) -> None:
        self.out = Path(index).resolve()
        manifest, self._manifest_sha256 = check_index(self.out)
        require_package(LIBRARIES[manifest.kind])
        place = embedder_of_index(self.out, manifest.embedder, embedder)
        self.generation = Generation(self.out, place, manifest.kind, manifest.passage_words, on_progress, clock)

    def old_passages(self) -> Iterator[StoredPassage]:
        """Yield the index's passages, then the duplicates, any of which may replace a removed twin."""
        return chain(read_passages(self.out, PASSAGES), read_passages(self.out, DUPLICATES))

    def with_documents(
        self, documents: dict[Path, list[Path]], roots: list[Path], unfinished: Path
    ) -> Iterator[StoredPassage]:
        """Yield the old passages that stay, then those of the files in `documents`, a list for each base folder.

        Raises ConfigurationError, which names `roots`, if the files have no passages.
        """
        uris: set[str] = set()
        with (unfinished / ADDED).open("w", encoding="utf-8") as file:
            for base, files in documents.items():
                for fields in read_passages_of(base, files, self.generation):
                    uris.add(fields["uri"])
                    file.write(passage_line(fields))
        if not uris:
            raise nothing_to_index(", ".join(map(str, roots)), self.generation.skipped)
        yield from (fields for fields in self.old_passages() if fields["uri"] not in uris)
        yield from read_passages(unfinished, ADDED)
        (unfinished / ADDED).unlink()

    def write(self, passages: Callable[[Path], Iterator[StoredPassage]]) -> IndexSummary:
        """Replace the index, and return the summary. VectorIndexError if another program has changed the index.

        passages: a function from the folder being written to the passages of the new index.
        """

        def check_unchanged() -> None:
            if check_index(self.out)[1] != self._manifest_sha256:
                raise VectorIndexError(f"{self.out} was changed by another program meanwhile: repeat the change")

        return self.generation.write(passages, check_unchanged, documents=self.out, old=self.out)


def _documents(
    path: Path, base_folder: Path | None, out: Path, max_file_bytes: int
) -> tuple[Path, list[Path], list[tuple[str, str]]]:
    """Return the base folder of the document names, the files at or below `path`, and the skipped ones.

    :raises ConfigurationError: `path` does not exist, or is outside of `base_folder`.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist")
    absolute = path.absolute() if path.is_symlink() else path.resolve()
    base = base_folder or (absolute if absolute.is_dir() else absolute.parent)
    if not absolute.is_relative_to(base):
        raise ConfigurationError(f"{path} is not within {base}, so it has no name there")
    if absolute.is_dir():
        return base, *find_documents(absolute, max_file_bytes=max_file_bytes, leave_out=out)
    if reason := reason_to_skip(absolute, max_file_bytes, out):
        return base, [], [(relative_name(absolute, base), reason)]
    return base, [absolute], []
