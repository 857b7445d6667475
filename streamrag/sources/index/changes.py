"""Adding documents to an index, replacing them and removing them, without embedding the others again.

The index is written anew from the passages and vectors that stay and those that come, and then takes the place of the
old one: what that costs is the time to build DiskANN's graph, or to sort the vectors into faiss's lists.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from streamrag.clock import Clock, monotonic
from streamrag.core import Chunk
from streamrag.errors import ConfigurationError, VectorIndexError
from streamrag.sources.building import OnProgress, nothing_to_index, refuse_event_loop
from streamrag.sources.index.build import (
    IndexSummary,
    read_passages_of,
    require_library,
    summary_of,
)
from streamrag.sources.index.document_passages import find_documents, reason_to_skip, relative_name
from streamrag.sources.index.embedder import embedder_of_index, find_embedder
from streamrag.sources.index.generation import building, publish, write_derived, write_passages
from streamrag.sources.index.index_folder import DUPLICATES, PASSAGES, check_index, read_passages, stored_line

ADDED = "added.jsonl"
"""The passages that come, in the building folder only."""


def add_documents(
    index: str | os.PathLike[str],
    paths: Iterable[str | os.PathLike[str]],
    *,
    folder: str | os.PathLike[str] | None = None,
    embedder: str | None = None,
    max_file_bytes: int = 10 << 20,
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
    skipped: list[tuple[str, str]] = []
    found: dict[Path, list[Path]] = {}
    named = [Path(path) for path in paths]
    for path in named:
        for name, documents in _documents(path, root, change.out, max_file_bytes, skipped):
            found.setdefault(name, []).extend(documents)

    def passages(unfinished: Path) -> Iterator[dict[str, Any]]:
        uris: set[str] = set()
        with (unfinished / ADDED).open("w", encoding="utf-8") as file:
            for name, documents in found.items():
                words = change.manifest.passage_words
                for fields in read_passages_of(name, documents, skipped, words, change.tell):
                    uris.add(fields["uri"])
                    file.write(stored_line(Chunk(**fields)))
        if not uris:
            raise nothing_to_index(", ".join(map(str, named)), skipped)
        yield from (fields for fields in change.old_passages() if fields["uri"] not in uris)
        yield from read_passages(unfinished, ADDED)
        (unfinished / ADDED).unlink()

    return change.write(passages, skipped)


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
    return change.write(lambda unfinished: (each for each in change.old_passages() if each["uri"] not in gone), [])


class _Change:
    """An index, and how the next one is made of it."""

    def __init__(
        self, index: str | os.PathLike[str], embedder: str | None, on_progress: OnProgress | None, clock: Clock
    ) -> None:
        self._clock, self._started_s = clock, clock()
        self.out = Path(index).resolve()
        self.manifest, self._manifest_sha256 = check_index(self.out)
        require_library(self.manifest.kind)
        self._place = (
            find_embedder(embedder) if embedder is not None else embedder_of_index(self.out, self.manifest.embedder)
        )
        self.tell: OnProgress = on_progress or (lambda done, total, step: None)

    def old_passages(self) -> Iterator[dict[str, Any]]:
        """Those that the index has, then those left out of it as duplicates: one may take the place of its twin."""
        return chain(read_passages(self.out, PASSAGES), read_passages(self.out, DUPLICATES))

    def write(
        self, passages: Callable[[Path], Iterator[dict[str, Any]]], skipped: list[tuple[str, str]]
    ) -> IndexSummary:
        """The next index, of these passages, in the place of this one."""
        try:
            with building(self.out) as unfinished:
                corpus = write_passages(passages(unfinished), unfinished)
                manifest, num_embedded = write_derived(
                    unfinished,
                    corpus,
                    self._place,
                    kind=self.manifest.kind,
                    passage_words=self.manifest.passage_words,
                    old=self.out,
                    tell=self.tell,
                )
                publish(unfinished, self.out, self._check_unchanged)
        except OSError as error:
            raise VectorIndexError(f"changing {self.out} failed: {error}") from error
        return summary_of(manifest, corpus, skipped, num_embedded, self._clock() - self._started_s)

    def _check_unchanged(self) -> None:
        if check_index(self.out)[1] != self._manifest_sha256:
            raise VectorIndexError(f"{self.out} was changed by another program meanwhile: do it again")


def _documents(
    path: Path, root: Path | None, out: Path, max_file_bytes: int, skipped: list[tuple[str, str]]
) -> Iterator[tuple[Path, list[Path]]]:
    """The documents at `path`, with the folder within which they are named."""
    if not path.exists():
        raise ConfigurationError(f"{path} is not there")
    whole = path.absolute() if path.is_symlink() else path.resolve()
    within = root or (whole if whole.is_dir() else whole.parent)
    if not whole.is_relative_to(within):
        raise ConfigurationError(f"{path} is not within {within}, so it has no name there")
    if whole.is_dir():
        documents, left_out = find_documents(whole, max_file_bytes=max_file_bytes, leave_out=out)
        skipped.extend(left_out)
        yield within, documents
    elif reason := reason_to_skip(whole, max_file_bytes, out):
        skipped.append((relative_name(whole, within), reason))
    else:
        yield within, [whole]
