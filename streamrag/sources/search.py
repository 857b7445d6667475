"""The inside of the worker processes of a vector index: DiskANN, which is never loaded anywhere else.

diskannpy holds the GIL while it searches and prints to C stdout, which is why it lives here. Further faults of
diskannpy 0.7.0, and what is done about them:

- With numpy 2, `search()` returns the first id k times; `batch_search()` of one query is right.
- With `num_threads=1` opening hangs; two are used.
- What it does not find is uninitialised memory: k is never over the number of vectors, and answers are cut.
- Of more than 49 equal vectors the others cannot be reached, nor what lies behind them; so none are quite equal.
- A `_disk.index` that is cut short opens, and answers nonsense; sizes are checked before (`check_index`).
"""

import os
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from streamrag.errors import IndexMismatchError, MissingDependencyError
from streamrag.sources.embedder import Embedder
from streamrag.sources.index_folder import MANIFEST, PassageStore, corrupt, sha256

if TYPE_CHECKING:
    from streamrag.sources.worker_main import Handler


GRAPH_DEGREE = 48
BUILD_COMPLEXITY = 100
SEARCH_MEMORY_GB, BUILD_MEMORY_GB = 1.0, 2.0
"""Under 1 GB of compressed vectors is held by each searcher: 384 dimensions are lossless up to 2.6 million passages."""

NUM_DISKANN_THREADS = 2
MAX_BEAM_WIDTH = 64
NOISE = 1e-5
"""Length of what is added to each vector; similarities change by no more."""

NO_CACHE = {"num_nodes_to_cache": 0, "cache_mechanism": 2}
"""Caching 1,000 nodes has been measured to save under 0.2 ms of 1-5 ms; mechanism 1 takes 0.3 s to open."""

NOT_FOR_SEARCHING = ("ann_vectors.bin", "ann_mem.index.data", "ann_sample_data.bin", "ann_sample_ids.bin")

VECTORS_HEADER = struct.Struct("<II")
"""DiskANN's: number of vectors, dimension; float32 rows follow."""


def require_diskann() -> None:
    """:raises MissingDependencyError: DiskANN is not installed. For the caller's process; imports nothing."""
    if not find_spec("diskannpy"):
        raise MissingDependencyError(
            "diskannpy",
            "pip install --no-deps diskannpy==0.7.0   (it asks for an old numpy, but runs with the current one; "
            "there are wheels for CPython up to 3.11 on Linux x86-64)",
        )


class _Searcher:
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
            case {"do": "search", "query": query, "k": k, "complexity": complexity, "beam_width": beam_width}:
                return self._search(self._load().query(query), k, complexity, beam_width)
        raise AssertionError(header)

    def _load(self) -> Embedder:
        if self._embedder is None:
            embedder = Embedder(self._location, self._name, num_threads=1, device="cpu")
            if not embedder.matches(self._dimension, self._probe):
                raise IndexMismatchError(
                    f"{self._folder} was not made with embedder={self._name!r} ({embedder.dimension} dimensions, "
                    f"the index has {self._dimension}): name the embedder that it was made with, or build it again"
                )
            self._embedder = embedder
        return self._embedder

    def _open(self) -> Any:
        if self._index is None:
            manifest = self._folder / MANIFEST
            if not manifest.exists() or sha256(manifest) != self._manifest_sha256:  # before a replacing worker opens it
                raise IndexMismatchError(f"{self._folder} was replaced while it was in use: start the source again")
            self._passages = PassageStore(self._folder, self._num_passages)
            import diskannpy

            try:
                self._index = diskannpy.StaticDiskIndex(
                    str(self._folder), num_threads=NUM_DISKANN_THREADS, index_prefix="ann", **NO_CACHE
                )
            except Exception as error:  # RuntimeError, MemoryError, IndexError and others have been seen
                reason = f"DiskANN cannot open it, {type(error).__name__}: {error}"
                raise corrupt(self._folder, reason) from error
        return self._index

    def _search(self, query: Any, k: int, complexity: int, beam_width: int) -> dict[str, Any]:
        """The `k` nearest passages with their squared distances, nearest first."""
        found = self._open().batch_search(
            query[None], k_neighbors=k, complexity=complexity, num_threads=NUM_DISKANN_THREADS, beam_width=beam_width
        )
        ids, distances = found.identifiers[0].tolist(), found.distances[0].tolist()
        num_found = 0
        while num_found < k and ids[num_found] < self._num_passages and ids[num_found] not in ids[:num_found]:
            if num_found and distances[num_found] < distances[num_found - 1]:
                break
            num_found += 1
        if num_found < min(k, 2):
            raise corrupt(self._folder, f"it answers with passages {ids} of {self._num_passages}")
        ids, distances = ids[:num_found], distances[:num_found]
        assert self._passages
        return {"ids": ids, "distances": distances, "passages": self._passages.read(ids)}


def _silence_stdout() -> None:
    """DiskANN tells hundreds of lines there, which would push out what the process says on stderr before it dies."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)


def make_searcher(**options: Any) -> "Handler":
    """For `WorkerPool`. Nothing is loaded before the first job, so that its errors are errors of a job."""
    _silence_stdout()
    return _Searcher(**options).handle


class _Builder:
    def __init__(self, *, folder: str, location: str, embedder: str, num_threads: int) -> None:
        self._folder = folder
        self._location, self._name = location, embedder
        self._num_threads = num_threads
        self._path = Path(folder, NOT_FOR_SEARCHING[0])
        self._embedder: Embedder | None = None
        self._vectors: BinaryIO | None = None
        self._random: Any = None
        self._num_vectors = 0

    def handle(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        """First `load`, then `embed` for each batch of texts, then `finish`."""
        match header:
            case {"do": "load"}:
                return self._load()
            case {"do": "embed", "texts": texts}:
                self._embed(texts)
                return {}
            case {"do": "finish"}:
                try:
                    self._finish()
                except RuntimeError as error:  # all that C++ tells of a disk that is full
                    raise OSError(f"DiskANN failed: {error}. Is there room for its files?") from error
                return {}
        raise AssertionError(header)

    def _load(self) -> dict[str, Any]:
        import numpy as np

        self._embedder = Embedder(self._location, self._name, num_threads=self._num_threads, device=None)
        self._random = np.random.default_rng(0)
        self._vectors = self._path.open("wb")
        self._vectors.write(VECTORS_HEADER.pack(0, 0))
        return {"dimension": self._embedder.dimension, "probe": self._embedder.probe}

    def _embed(self, texts: list[str]) -> None:
        assert self._embedder
        assert self._vectors
        vectors = self._embedder.passages(texts)
        vectors += self._random.standard_normal(vectors.shape, dtype="float32") * (NOISE / vectors.shape[1] ** 0.5)
        self._vectors.write(vectors.tobytes())
        self._num_vectors += len(texts)

    def _finish(self) -> None:
        import diskannpy
        import numpy as np

        assert self._embedder
        assert self._vectors
        self._vectors.seek(0)
        self._vectors.write(VECTORS_HEADER.pack(self._num_vectors, self._embedder.dimension))
        self._vectors.close()
        diskannpy.build_disk_index(
            str(self._path),
            vector_dtype=np.float32,
            distance_metric="l2",
            index_directory=self._folder,
            index_prefix="ann",
            complexity=BUILD_COMPLEXITY,
            graph_degree=GRAPH_DEGREE,
            search_memory_maximum=SEARCH_MEMORY_GB,
            build_memory_maximum=BUILD_MEMORY_GB,
            num_threads=max(NUM_DISKANN_THREADS, self._num_threads),
            pq_disk_bytes=0,
        )
        for name in NOT_FOR_SEARCHING:
            Path(self._folder, name).unlink(missing_ok=True)


def make_builder(**options: Any) -> "Handler":
    """For `WorkerPool`."""
    _silence_stdout()
    return _Builder(**options).handle
