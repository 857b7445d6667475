"""DiskANN in the worker processes that build and search an index. No other process loads it.

diskannpy holds the GIL while it searches, and prints to C stdout. Further faults of diskannpy 0.7.0 and their remedies:

- With numpy 2, `search()` returns the first id k times; `batch_search()` of one query is right.
- With `num_threads=1` opening hangs; two are used.
- Missing results are uninitialised memory: k never exceeds the number of vectors, and results are cut.
- If more than 49 vectors are equal, the others and all vectors behind them are unreachable: noise tells them apart.
- A truncated `_disk.index` opens and returns nonsense: `check_index` checks the sizes before.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.sources.index.index_folder import VECTORS, corrupt
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.workers.memory_limit import memory_limited

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


GRAPH_DEGREE = 48
BUILD_COMPLEXITY = 100
SEARCH_MEMORY_GB, BUILD_MEMORY_GB = 1.0, 2.0
"""Each searcher holds less than 1 GB of compressed vectors, lossless for 2.6 million passages of 384 dimensions."""
NUM_DISKANN_THREADS = 2
MAX_BEAM_WIDTH = 64
NOISE = 1e-5  # length of the noise that is added to each vector, and the most by which similarities change
NO_CACHE = {"num_nodes_to_cache": 0, "cache_mechanism": 2}
"""Caching 1,000 nodes was measured to save under 0.2 ms of 1-5 ms; mechanism 1 takes 0.3 s to open."""
BUILD_FILES = ("ann_vectors.bin", "ann_mem.index.data", "ann_sample_data.bin", "ann_sample_ids.bin")
"""Files that a build leaves and a search does not need. The first holds the input."""
ROWS_PER_WRITE = 8192
METADATA, METADATA_FIELDS = "ann_metadata.bin", struct.Struct("<QQQQ")
"""DiskANN's element type (0: float32), metric (0: L2), number of vectors and dimension, which it does not check."""
SPARE_BYTES = 256 << 20
"""Memory for opening an index beside one byte per number of a compressed vector; 18 MiB were measured."""
VECTORS_HEADER = struct.Struct("<II")
"""DiskANN's number of vectors and dimension; float32 rows follow."""


class DiskAnnSearcher(IndexSearcher):
    def _open_index(self) -> Any:
        import diskannpy

        with (self._path / METADATA).open("rb") as file:
            metadata = file.read(METADATA_FIELDS.size)
        if metadata != METADATA_FIELDS.pack(0, 0, self.num_passages, self.dimension):
            raise corrupt(self._path, f"{METADATA} does not describe {self.num_passages} passages")
        try:
            with memory_limited(self.num_passages * self.dimension + SPARE_BYTES):
                return diskannpy.StaticDiskIndex(
                    str(self._path), num_threads=NUM_DISKANN_THREADS, index_prefix="ann", **NO_CACHE
                )
        except Exception as error:  # RuntimeError, MemoryError, IndexError and others have been seen
            raise corrupt(self._path, f"DiskANN cannot open it, {type(error).__name__}: {error}") from error

    def _search(  # type: ignore[override]
        self, index: Any, vector: Any, *, k: int, complexity: int, beam_width: int
    ) -> tuple[list[int], list[float]]:
        """Return the results before the first invalid one; raise IndexCorruptError if fewer than two are valid."""
        options = {"k_neighbors": k, "complexity": complexity, "beam_width": beam_width}
        result = index.batch_search(vector[None], **options, num_threads=NUM_DISKANN_THREADS)
        ids, distances = result.identifiers[0].tolist(), result.distances[0].tolist()
        num_valid = 0
        while num_valid < k and ids[num_valid] < self.num_passages and ids[num_valid] not in ids[:num_valid]:
            if num_valid and distances[num_valid] < distances[num_valid - 1]:
                break
            num_valid += 1
        if num_valid < min(k, 2):
            raise corrupt(self._path, f"it answers with passages {ids} of {self.num_passages}")
        return ids[:num_valid], distances[:num_valid]


def build_graph(folder: Path, vectors: "Vectors", num_threads: int) -> None:
    """Write DiskANN's graph of the vectors into `folder`, with a little noise that tells equal ones apart."""
    import diskannpy
    import numpy as np

    random = np.random.default_rng(0)
    path = folder / BUILD_FILES[0]
    with path.open("wb") as file:
        file.write(VECTORS_HEADER.pack(*vectors.shape))
        for first in range(0, len(vectors), ROWS_PER_WRITE):
            rows = vectors[first : first + ROWS_PER_WRITE]
            noise = random.standard_normal(rows.shape, dtype="float32") * (NOISE / rows.shape[1] ** 0.5)
            file.write((rows + noise).tobytes())
    try:
        diskannpy.build_disk_index(
            str(path),
            vector_dtype=np.float32,
            distance_metric="l2",
            index_directory=str(folder),
            index_prefix="ann",
            complexity=BUILD_COMPLEXITY,
            graph_degree=GRAPH_DEGREE,
            search_memory_maximum=SEARCH_MEMORY_GB,
            build_memory_maximum=BUILD_MEMORY_GB,
            num_threads=max(NUM_DISKANN_THREADS, num_threads),
            pq_disk_bytes=0,
        )
    except RuntimeError as error:  # DiskANN's only sign of a full disk
        raise OSError(f"DiskANN failed: {error}. Is there room for its files?") from error
    for name in BUILD_FILES:
        (folder / name).unlink(missing_ok=True)


def stored_vectors(folder: Path, num_passages: int, dimension: int) -> "Vectors | None":
    """Return an index's vectors in passage order, mapped into memory; None for format 1. Raises if they are damaged."""
    import numpy as np

    path = folder / VECTORS
    if not path.exists():
        return None
    if path.stat().st_size != num_passages * dimension * 4:
        raise corrupt(folder, f"{VECTORS} is not of {num_passages} passages")
    return np.memmap(path, np.float32, "r", shape=(num_passages, dimension))
