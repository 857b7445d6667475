"""The inside of the worker process that builds an index: it embeds new texts, and has the library build."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.sources.index import diskann, inverted_lists
from streamrag.sources.index.embedder import Embedder, EmbedderIdentity
from streamrag.sources.index.embedding_file import EmbeddingFile, are_units, key_of
from streamrag.sources.index.index_folder import (
    PASSAGES,
    VECTORS,
    IndexKind,
    check_index,
    corrupt,
    read_passages,
    with_title,
)
from streamrag.sources.index.worker_jobs import JobHandler, silence_stdout

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


class _OldVectors:
    """The vectors of the index that is changed, by the keys of their texts."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        manifest, _ = check_index(folder)
        made_with = EmbedderIdentity(manifest.embedder, manifest.dimension, manifest.probe)
        embedder.require(made_with, f"the vectors of {folder}")
        self.vectors: Any
        self.centroids: Vectors | None = None
        num_passages, dimension = manifest.num_passages, manifest.dimension
        if manifest.kind == "ivf":
            assert manifest.num_lists is not None
            about = num_passages, dimension, manifest.num_lists
            self.vectors, self.centroids = inverted_lists.stored_vectors(folder, *about)
        else:
            self.vectors = diskann.stored_vectors(folder, num_passages, dimension)
        self.rows: dict[bytes, int] = {}
        if self.vectors is not None:
            keys = [key_of(with_title(fields["title"], fields["text"])) for fields in read_passages(folder, PASSAGES)]
            if len(keys) != num_passages or not are_units(self.vectors).all():
                raise corrupt(folder, "its vectors are not those of its passages")
            self.rows = {key: row for row, key in enumerate(keys)}


@dataclass
class IndexBuilder(JobHandler):
    """Answers `load` first, then `embed` for each batch of texts, then `finish`."""

    folder: str
    kind: IndexKind
    location: str
    embedder: str
    num_threads: int
    old: str | None

    def load(self) -> dict[str, Any]:
        """Load the embedder, and open the vectors that there are."""
        silence_stdout()
        identity, *_ = self._embedder.identity, self._old_vectors, self._embedded
        return {"dimension": identity.dimension, "probe": identity.probe}

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self.location, self.embedder, num_threads=self.num_threads, device=None)

    @cached_property
    def _old_vectors(self) -> _OldVectors | None:
        return _OldVectors(Path(self.old), self._embedder) if self.old else None

    @cached_property
    def _embedded(self) -> EmbeddingFile:
        return EmbeddingFile(Path(self.folder), self._embedder, self.location)

    def embed(self, texts: list[str]) -> dict[str, Any]:
        """Embed what has no vector yet."""
        old = self._old_vectors.rows if self._old_vectors else {}
        unknown = {key: text for text in texts if (key := key_of(text)) not in old and key not in self._embedded}
        if unknown:
            self._embedded.add(list(unknown), self._embedder.passages(list(unknown.values())))
        return {"num_embedded": len(unknown)}

    def finish(self, num_passages: int) -> dict[str, Any]:
        """Have the library write its files."""
        folder = Path(self.folder)
        vectors = self._arrange(folder, num_passages)
        if self.kind == "ivf":
            centroids = self._old_vectors.centroids if self._old_vectors else None
            num_lists = inverted_lists.build_lists(folder, vectors, self.num_threads, centroids)
            (folder / VECTORS).unlink()
            return {"num_lists": num_lists}
        diskann.build_graph(folder, vectors, self.num_threads)
        return {"graph_degree": diskann.GRAPH_DEGREE, "build_complexity": diskann.BUILD_COMPLEXITY}

    def _arrange(self, folder: Path, num_passages: int) -> "Vectors":
        """Write the vectors in the order of the passages, and map the file into memory."""
        import numpy as np

        rows, embedded = self._embedded.rows()
        old = self._old_vectors
        with (folder / VECTORS).open("wb") as file:  # a disk that is full would end a process that writes to a map
            for fields in read_passages(folder, PASSAGES):
                key = key_of(with_title(fields["title"], fields["text"]))
                file.write(embedded[rows[key]] if key in rows or not old else old.vectors[old.rows[key]])
        return np.memmap(folder / VECTORS, np.float32, "r", shape=(num_passages, self._embedder.dimension))
