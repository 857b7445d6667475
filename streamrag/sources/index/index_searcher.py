"""The inside of the worker processes that search an index, whatever its kind."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrag.errors import IndexMismatchError
from streamrag.sources.index.embedder import Embedder, unlike
from streamrag.sources.index.index_folder import MANIFEST, PassageStore, sha256


class IndexSearcher(ABC):
    """Answers the jobs of a source. What is special to a kind of index is in `_open_index` and `_search`."""

    def __init__(
        self,
        *,
        folder: str,
        manifest_sha256: str,
        num_passages: int,
        location: str,
        embedder: str,
        dimension: int,
        probe: list[float],
    ) -> None:
        self._folder = Path(folder)
        self._manifest_sha256 = manifest_sha256
        self._num_passages = num_passages
        self._location, self._name = location, embedder
        self._dimension, self._probe = dimension, probe
        self._embedder: Embedder | None = None
        self._index: Any = None
        self._passages: PassageStore | None = None

    def handle(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`load`, `open` and `search` may be asked in any order: a worker that replaces another starts at `search`."""
        match header:
            case {"do": "load"}:
                self._load()
                return {}
            case {"do": "open"}:
                self._open()
                return {}
            case {"do": "search", "query": query}:
                vector = self._load().query(query)
                self._open()
                ids, distances = self._search(vector, header)
                assert self._passages
                return {"ids": ids, "distances": distances, "passages": self._passages.read(ids)}
        raise AssertionError(header)

    def _load(self) -> Embedder:
        if self._embedder is None:
            embedder = Embedder(self._location, self._name, num_threads=1, device="cpu")
            if not embedder.matches(self._dimension, self._probe):
                raise IndexMismatchError(
                    f"the vectors of {self._folder} were not made with embedder={self._name!r}: "
                    f"{unlike(embedder.dimension, self._dimension)}. Name the embedder that they were made with, or "
                    "build the index again"
                )
            self._embedder = embedder
        return self._embedder

    def _open(self) -> None:
        if self._index is None:
            self._check_manifest()  # before a worker that replaces another opens it
            self._passages = PassageStore(self._folder, self._num_passages)
            index = self._open_index()
            self._check_manifest()  # all that was opened is of one index
            self._index = index

    def _check_manifest(self) -> None:
        manifest = self._folder / MANIFEST
        if not manifest.exists() or sha256(manifest) != self._manifest_sha256:
            raise IndexMismatchError(f"{self._folder} was replaced while it was in use: start the source again")

    @abstractmethod
    def _open_index(self) -> Any:
        """What `_search` needs, from the files of the index."""

    @abstractmethod
    def _search(self, query: Any, job: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Ids of passages and their squared distances, nearest first."""


def silence_stdout() -> None:
    """DiskANN tells hundreds of lines there, which would push out what the process says on stderr before it dies."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
