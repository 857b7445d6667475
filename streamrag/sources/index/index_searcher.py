"""The inside of the worker processes that search an index, whatever its kind."""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrag.sources.index.embedder import Embedder, EmbedderIdentity
from streamrag.sources.index.index_folder import PassageStore, check_unchanged
from streamrag.sources.index.worker_jobs import JobHandler, silence_stdout


@dataclass
class IndexSearcher(JobHandler, ABC):
    """Answers the jobs of a source. What is special to a kind of index is in `_open_index` and `_search`."""

    _: KW_ONLY
    folder: Path
    manifest_sha256: str
    num_passages: int
    location: str
    embedder: str
    dimension: int
    probe: list[float]

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def load(self) -> dict[str, Any]:
        """Load the embedder, and return the dimension of its vectors."""
        return {"dimension": self._embedder.dimension}

    def open(self) -> dict[str, Any]:
        """Open the index for searches, and return its number of passages."""
        return {"num_passages": len(self._opened[1])}

    def search(self, query: str, **options: Any) -> dict[str, Any]:
        """Return the passages that one stage finds."""
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
        silence_stdout()
        check_unchanged(self.folder, self.manifest_sha256)  # before a worker that replaces another opens it
        passages = PassageStore(self.folder, self.num_passages)
        index = self._open_index()
        check_unchanged(self.folder, self.manifest_sha256)  # all that was opened is of one index
        return index, passages

    @abstractmethod
    def _open_index(self) -> Any:
        """Return what `_search` needs, from the files of the index."""

    @abstractmethod
    def _search(self, index: Any, vector: Any, **options: Any) -> tuple[list[int], list[float]]:
        """Return the ids of passages and their squared distances, nearest first."""
