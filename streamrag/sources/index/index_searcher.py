"""The base of the handlers that search an index in worker processes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrag.sources.index.embedder import Embedder, EmbedderIdentity
from streamrag.sources.index.index_folder import PassageStore, check_unchanged
from streamrag.sources.index.worker_jobs import JobHandler, silence_stdout


@dataclass
class IndexSearcher(JobHandler, ABC):
    """A handler of search jobs. Subclasses open and search an index of their kind."""

    folder: str
    manifest_sha256: str
    num_passages: int
    location: str
    embedder: str
    dimension: int
    probe: Sequence[float]
    num_lists: int = 0
    """Number of inverted lists, for an index of kind "ivf"."""

    @property
    def _path(self) -> Path:
        return Path(self.folder)

    def load(self) -> dict[str, Any]:
        """Load the embedder, and return its `dimension`; raise IndexMismatchError if it did not make the index."""
        return {"dimension": self._embedder.dimension}

    def open(self) -> dict[str, Any]:
        """Open the index for searches, and return its `num_passages`."""
        return {"num_passages": len(self._opened[1])}

    def search(self, query: str, **options: Any) -> dict[str, Any]:
        """Return the ids, squared distances and fields of the passages that one stage finds, nearest first."""
        vector = self._embedder.query(query)
        index, passages = self._opened
        ids, distances = self._search(index, vector, **options)
        return {"ids": ids, "distances": distances, "passages": passages.read(ids)}

    @cached_property
    def _embedder(self) -> Embedder:
        embedder = Embedder(self.location, self.embedder, num_threads=1, device="cpu")
        embedder.require(EmbedderIdentity("", self.dimension, tuple(self.probe)), f"the vectors of {self.folder}")
        return embedder

    @cached_property
    def _opened(self) -> tuple[Any, PassageStore]:
        """The library's index and its passages, opened at first use. Raises if the index was replaced meanwhile."""
        silence_stdout()
        # Checked before, for a replacement worker, and after, so that all opened files are of one index.
        check_unchanged(self._path, self.manifest_sha256)
        passages = PassageStore(self._path, self.num_passages)
        index = self._open_index()
        check_unchanged(self._path, self.manifest_sha256)
        return index, passages

    @abstractmethod
    def _open_index(self) -> Any:
        """Open the index's files, and return the object that `_search` gets; raise IndexCorruptError for damage."""

    @abstractmethod
    def _search(self, index: Any, vector: Any, **options: Any) -> tuple[list[int], list[float]]:
        """Return the ids of the passages that one stage finds, and their squared distances, nearest first."""
