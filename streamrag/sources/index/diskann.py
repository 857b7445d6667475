"""DiskANN in the worker processes that build and search an index; it is never loaded anywhere else.

diskannpy holds the GIL while it searches and prints to C stdout, which is why it lives here. Further faults of
diskannpy 0.7.0, and what is done about them:

- With numpy 2, `search()` returns the first id k times; `batch_search()` of one query is right.
- With `num_threads=1` opening hangs; two are used.
- What it does not find is uninitialised memory: k is never over the number of vectors, and answers are cut.
- Of more than 49 equal vectors the others cannot be reached, nor what lies behind them; so none are quite equal.
- A `_disk.index` that is cut short opens, and answers nonsense; sizes are checked before (`check_index`).
"""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.errors import MissingDependencyError
from streamrag.sources.index.index_folder import VECTORS, corrupt
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.workers.memory_limit import memory_limited

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


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

NUM_ROWS_AT_ONCE = 8192

METADATA, METADATA_FIELDS = "ann_metadata.bin", struct.Struct("<QQQQ")
"""DiskANN's element type (0: float32), metric (0: L2), number of vectors and dimension. It believes the file."""

SPARE_BYTES = 256 << 20
"""Memory for opening an index, beside a byte for each number of a compressed vector; 18 MiB have been measured."""

VECTORS_HEADER = struct.Struct("<II")
"""DiskANN's: number of vectors, dimension; float32 rows follow."""


def require_diskann() -> None:
    """Check that DiskANN is installed. For the caller's process; imports nothing.

    :raises MissingDependencyError: it is not.
    """
    if not find_spec("diskannpy"):
        raise MissingDependencyError(
            "diskannpy",
            "pip install --no-deps diskannpy==0.7.0   (it asks for an old numpy, but runs with the current one; "
            "there are wheels for CPython up to 3.11 on Linux x86-64)",
        )


class DiskAnnSearcher(IndexSearcher):
    """Searches a graph of DiskANN's."""

    def _open_index(self) -> Any:
        import diskannpy

        with (self.folder / METADATA).open("rb") as file:
            metadata = file.read(METADATA_FIELDS.size)
        if metadata != METADATA_FIELDS.pack(0, 0, self.num_passages, self.dimension):
            raise corrupt(self.folder, f"{METADATA} does not describe {self.num_passages} passages")
        try:
            with memory_limited(self.num_passages * self.dimension + SPARE_BYTES):
                return diskannpy.StaticDiskIndex(
                    str(self.folder), num_threads=NUM_DISKANN_THREADS, index_prefix="ann", **NO_CACHE
                )
        except Exception as error:  # RuntimeError, MemoryError, IndexError and others have been seen
            reason = f"DiskANN cannot open it, {type(error).__name__}: {error}"
            raise corrupt(self.folder, reason) from error

    def _search(  # type: ignore[override]
        self, index: Any, vector: Any, *, k: int, complexity: int, beam_width: int
    ) -> tuple[list[int], list[float]]:
        options = {"k_neighbors": k, "complexity": complexity, "beam_width": beam_width}
        found = index.batch_search(vector[None], **options, num_threads=NUM_DISKANN_THREADS)
        ids, distances = found.identifiers[0].tolist(), found.distances[0].tolist()
        num_found = 0
        while num_found < k and ids[num_found] < self.num_passages and ids[num_found] not in ids[:num_found]:
            if num_found and distances[num_found] < distances[num_found - 1]:
                break
            num_found += 1
        if num_found < min(k, 2):
            raise corrupt(self.folder, f"it answers with passages {ids} of {self.num_passages}")
        return ids[:num_found], distances[:num_found]


# ------------------------------------------------------------------------------------------------------- building


def build_graph(folder: Path, vectors: "Vectors", num_threads: int) -> None:
    """Write DiskANN's files into `folder`.

    :raises OSError: they cannot be written.
    """
    import diskannpy
    import numpy as np

    random = np.random.default_rng(0)
    path = folder / NOT_FOR_SEARCHING[0]
    with path.open("wb") as file:
        file.write(VECTORS_HEADER.pack(*vectors.shape))
        for first in range(0, len(vectors), NUM_ROWS_AT_ONCE):
            rows = vectors[first : first + NUM_ROWS_AT_ONCE]
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
    except RuntimeError as error:  # all that C++ tells of a disk that is full
        raise OSError(f"DiskANN failed: {error}. Is there room for its files?") from error
    for name in NOT_FOR_SEARCHING:
        (folder / name).unlink(missing_ok=True)


def stored_vectors(folder: Path, num_passages: int, dimension: int) -> "Vectors | None":
    """Return the vectors of an index, in the order of its passages; None if it is of format 1, which kept none."""
    import numpy as np

    path = folder / VECTORS
    if not path.exists():
        return None
    if path.stat().st_size != num_passages * dimension * 4:
        raise corrupt(folder, f"{VECTORS} is not of {num_passages} passages")
    return np.memmap(path, np.float32, "r", shape=(num_passages, dimension))
