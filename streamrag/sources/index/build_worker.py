"""The inside of the worker process that builds an index: it embeds what is not known yet, and has the library build."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.errors import IndexMismatchError
from streamrag.sources.index import diskann, inverted_lists
from streamrag.sources.index.embedder import Embedder, unlike
from streamrag.sources.index.embedding_file import EmbeddingFile, are_units, key_of
from streamrag.sources.index.index_folder import (
    PASSAGES,
    VECTORS,
    IndexKind,
    Manifest,
    check_index,
    corrupt,
    read_passages,
    with_title,
)
from streamrag.sources.index.index_searcher import silence_stdout

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors
    from streamrag.sources.workers.worker_main import Handler


class _Builder:
    def __init__(
        self,
        *,
        folder: str,
        kind: IndexKind,
        location: str,
        embedder: str,
        num_threads: int,
        old: str | None,
    ) -> None:
        self._folder = Path(folder)
        self._kind = kind
        self._location, self._name = location, embedder
        self._num_threads = num_threads
        self._old = Path(old) if old else None
        self._old_rows: dict[bytes, int] = {}
        self._old_vectors: Any = None
        self._centroids: Any = None

    def handle(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        """First `load`, then `embed` for each batch of texts, then `finish`."""
        match header:
            case {"do": "load"}:
                return self._load()
            case {"do": "embed", "texts": texts}:
                return {"num_embedded": self._embed(texts)}
            case {"do": "finish", "num_passages": num_passages}:
                return self._finish(num_passages)
        raise AssertionError(header)

    def _load(self) -> dict[str, Any]:
        self._embedder = Embedder(self._location, self._name, num_threads=self._num_threads, device=None)
        if self._old:
            self._read_old(self._old, check_index(self._old)[0])
        self._embedded = EmbeddingFile(self._folder, self._embedder, self._location)
        return {"dimension": self._embedder.dimension, "probe": self._embedder.probe}

    def _read_old(self, old: Path, manifest: Manifest) -> None:
        if not self._embedder.matches(manifest.dimension, list(manifest.probe)):
            raise IndexMismatchError(
                f"the vectors of {old} were not made with embedder={self._name!r}: "
                f"{unlike(self._embedder.dimension, manifest.dimension)}. Name the embedder that they were made with, "
                "or build the index again"
            )
        if manifest.kind == "ivf":
            assert manifest.num_lists is not None
            about = (manifest.num_passages, manifest.dimension, manifest.num_lists)
            self._old_vectors, self._centroids = inverted_lists.stored_vectors(old, *about)
        else:
            self._old_vectors = diskann.stored_vectors(old, manifest.num_passages, manifest.dimension)
        if self._old_vectors is not None:
            keys = [key_of(with_title(fields["title"], fields["text"])) for fields in read_passages(old, PASSAGES)]
            self._old_rows = {key: row for row, key in enumerate(keys)}
            if len(keys) != manifest.num_passages or not are_units(self._old_vectors).all():
                raise corrupt(old, "its vectors are not those of its passages")

    def _embed(self, texts: list[str]) -> int:
        """How many of them had to be embedded."""
        unknown = {
            key: text for text in texts if (key := key_of(text)) not in self._old_rows and key not in self._embedded
        }
        if unknown:
            self._embedded.add(list(unknown), self._embedder.passages(list(unknown.values())))
        return len(unknown)

    def _finish(self, num_passages: int) -> dict[str, Any]:
        vectors = self._arrange(num_passages)
        if self._kind == "ivf":
            num_lists = inverted_lists.build_lists(self._folder, vectors, self._num_threads, self._centroids)
            (self._folder / VECTORS).unlink()
            return {"num_lists": num_lists}
        diskann.build_graph(self._folder, vectors, self._num_threads)
        return {"graph_degree": diskann.GRAPH_DEGREE, "build_complexity": diskann.BUILD_COMPLEXITY}

    def _arrange(self, num_passages: int) -> "Vectors":
        """The vectors in the order of the passages, in a file."""
        import numpy as np

        rows, embedded = self._embedded.rows()
        path = self._folder / VECTORS
        with path.open("wb") as file:  # a disk that is full would end a process that writes to a map
            for fields in read_passages(self._folder, PASSAGES):
                key = key_of(with_title(fields["title"], fields["text"]))
                file.write(embedded[rows[key]] if key in rows else self._old_vectors[self._old_rows[key]])
        return np.memmap(path, np.float32, "r", shape=(num_passages, self._embedder.dimension))


def make_builder(**options: Any) -> "Handler":
    """For `WorkerPool`."""
    silence_stdout()
    return _Builder(**options).handle
