"""Adding documents to an index, replacing them and removing them, without embedding the others again.

The index is written anew from the passages and vectors that stay and those that come, and then takes the place of the
old one: the cost is the time to build DiskANN's graph, or to sort the vectors into faiss's lists.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from streamrag.errors import ConfigurationError, VectorIndexError
from streamrag.sources.index.build import read_passages_of, refuse_event_loop, require_library
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
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import Count, validated

ADDED = "added.jsonl"
"""The passages that come, in the building folder only."""


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
    """Put files, and the files below folders, into an index; those that it has already are replaced.

    A document is known by its path within `folder`: name the folder that the index was built from. Without it, a file
    is known by its name alone, and what is below a folder by its path within that. Only passages that are new are
    embedded. Sources that have the index open go on with it as it was.

    `embedder` is named where `VectorSource` wants it named. An index of format 1 kept no vectors and is embedded whole.

    :raises ConfigurationError: a path that is not there or not within `folder`, or nothing that can be indexed.
    :raises IndexMissingError: there is no index. As are IndexCorruptError and IndexMismatchError, before any change.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the process that embeds died.
    :raises VectorIndexError: a file cannot be written, or another program changed the index meanwhile.
    """
    refuse_event_loop("add_documents")
    change = _Change(index, embedder, on_progress, clock)
    root = Path(folder).resolve() if folder is not None else None
    named = [Path(path) for path in paths]
    found: dict[Path, list[Path]] = {}
    for path in named:
        within, documents, skipped = _documents(path, root, change.out, max_file_bytes)
        found.setdefault(within, []).extend(documents)
        change.generation.skipped += skipped
    return change.write(lambda unfinished: change.passages_with(found, named, unfinished))


def remove_documents(
    index: str | os.PathLike[str],
    names: Iterable[str],
    *,
    embedder: str | None = None,
    on_progress: OnProgress | None = None,
    clock: Clock = monotonic,
) -> IndexSummary:
    """Take documents out of an index, by the names that their chunks have as `uri`, or those of folders.

    Nothing is embedded, unless a passage that was left out as a duplicate of one that goes now stands for itself.
    Otherwise as `add_documents`.

    :raises ConfigurationError: a name that the index does not have, or all that it has.
    :raises IndexMissingError: there is no index. As are IndexCorruptError and IndexMismatchError, before any change.
    :raises MissingDependencyError: DiskANN, faiss or the embedder's package is not installed.
    :raises WorkerError: the process that embeds died.
    :raises VectorIndexError: a file cannot be written, or another program changed the index meanwhile.
    """
    refuse_event_loop("remove_documents")
    change = _Change(index, embedder, on_progress, clock)
    uris = {fields["uri"] for fields in change.old_passages()}
    gone: set[str] = set()
    for name in names:
        matching = {uri for uri in uris if uri == name or uri.startswith(name.rstrip("/") + "/")}
        if not matching:
            raise ConfigurationError(f"{change.out} has no document {name!r}: a document is named as its chunks' uri")
        gone |= matching
    if gone == uris:
        raise ConfigurationError(f"{change.out} would be empty: remove the folder instead")
    return change.write(lambda _: (each for each in change.old_passages() if each["uri"] not in gone))


class _Change:
    """An index, and the next generation that is made of it."""

    def __init__(
        self, index: str | os.PathLike[str], embedder: str | None, on_progress: OnProgress | None, clock: Clock
    ) -> None:
        self.out = Path(index).resolve()
        manifest, self._manifest_sha256 = check_index(self.out)
        require_library(manifest.kind)
        place = embedder_of_index(self.out, manifest.embedder, embedder)
        self.generation = Generation(self.out, place, manifest.kind, manifest.passage_words, on_progress, clock)

    def old_passages(self) -> Iterator[StoredPassage]:
        """Yield the index's passages, then those left out as duplicates: one may take the place of its twin."""
        return chain(read_passages(self.out, PASSAGES), read_passages(self.out, DUPLICATES))

    def passages_with(
        self, found: dict[Path, list[Path]], named: list[Path], unfinished: Path
    ) -> Iterator[StoredPassage]:
        """Yield the passages that stay, then those of the documents `found`, by the folders that they are named in."""
        uris: set[str] = set()
        with (unfinished / ADDED).open("w", encoding="utf-8") as file:
            for within, documents in found.items():
                for fields in read_passages_of(within, documents, self.generation):
                    uris.add(fields["uri"])
                    file.write(passage_line(fields))
        if not uris:
            raise nothing_to_index(", ".join(map(str, named)), self.generation.skipped)
        yield from (fields for fields in self.old_passages() if fields["uri"] not in uris)
        yield from read_passages(unfinished, ADDED)
        (unfinished / ADDED).unlink()

    def write(self, passages: Callable[[Path], Iterator[StoredPassage]]) -> IndexSummary:
        """Write the next index, of these passages, in the place of this one."""
        return self.generation.write(passages, self._check_unchanged, documents=self.out, old=self.out)

    def _check_unchanged(self) -> None:
        if check_index(self.out)[1] != self._manifest_sha256:
            raise VectorIndexError(f"{self.out} was changed by another program meanwhile: do it again")


def _documents(
    path: Path, root: Path | None, out: Path, max_file_bytes: int
) -> tuple[Path, list[Path], list[tuple[str, str]]]:
    """Return the folder within which the documents at `path` are named, the documents, and what is skipped."""
    if not path.exists():
        raise ConfigurationError(f"{path} is not there")
    whole = path.absolute() if path.is_symlink() else path.resolve()
    within = root or (whole if whole.is_dir() else whole.parent)
    if not whole.is_relative_to(within):
        raise ConfigurationError(f"{path} is not within {within}, so it has no name there")
    if whole.is_dir():
        return within, *find_documents(whole, max_file_bytes=max_file_bytes, leave_out=out)
    if reason := reason_to_skip(whole, max_file_bytes, out):
        return within, [], [(relative_name(whole, within), reason)]
    return within, [whole], []
