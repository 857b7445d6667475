"""DiskANN in the worker processes that build and search an index. No other process loads it.

diskannpy holds the GIL while it searches, and prints to C stdout. Further faults of diskannpy 0.7.0 and their remedies:

- With numpy 2, `search()` returns the first id k times; `batch_search()` of one query is right.
- With `num_threads=1` opening hangs; two are used.
- Missing results are uninitialised memory: k never exceeds the number of vectors, and results are cut.
- If more than 49 vectors are equal, the others and all vectors behind them are unreachable: noise tells them apart.
- A truncated `_disk.index` opens and returns nonsense: `check_index` checks the sizes before.
"""

import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.sources.index.index_folder import NODES, VECTORS, Manifest, corrupt, sha256_of
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.workers.limits import memory_limited

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


GRAPH_DEGREE = 48
BUILD_COMPLEXITY = 100
SEARCH_MEMORY_GB, BUILD_MEMORY_GB = 1.0, 2.0
"""Each searcher holds less than 1 GB of compressed vectors, lossless for 2.6 million passages of 384 dimensions."""
NUM_DISKANN_THREADS = 2
BEAM_WIDTH = 8
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
MAX_CHANGED_SHARE = 0.1
"""Largest share of passages beside the graph, and of removed ones in it, with which a graph is kept."""
VECTORS_HEADER = struct.Struct("<II")
"""DiskANN's number of vectors and dimension; float32 rows follow."""


class DiskAnnSearcher(IndexSearcher):
    """A searcher of DiskANN's graph."""

    def _open_index(self) -> tuple[Any, Any, Any, Any]:
        """Return DiskANN's graph, its nodes' passages, the passages beside it, and vectors of the latter, or None.

        Raises IndexCorruptError if the files do not match or DiskANN cannot open them.
        """
        import diskannpy
        import numpy as np

        nodes = stored_nodes(self._path, self.num_passages)
        added = np.setdiff1d(np.arange(self.num_passages), nodes)
        vectors = stored_vectors(self._path, self.num_passages, self.dimension) if len(added) else None
        if vectors is not None and not np.isfinite(vectors := vectors[added]).all():
            raise corrupt(self._path, f"{VECTORS} has no vectors for all passages beside the graph")
        with (self._path / METADATA).open("rb") as file:
            metadata = file.read(METADATA_FIELDS.size)
        if metadata != METADATA_FIELDS.pack(0, 0, len(nodes), self.dimension):
            raise corrupt(self._path, f"{METADATA} does not describe {len(nodes)} passages")
        try:
            with memory_limited(len(nodes) * self.dimension + SPARE_BYTES):
                graph = diskannpy.StaticDiskIndex(
                    str(self._path), num_threads=NUM_DISKANN_THREADS, index_prefix="ann", **NO_CACHE
                )
        except Exception as error:  # RuntimeError, MemoryError, IndexError and others have been seen
            raise corrupt(self._path, f"DiskANN cannot open it, {type(error).__name__}: {error}") from error
        return graph, nodes, added, vectors

    def _search(  # type: ignore[override]
        self, index: Any, vector: Any, *, k: int, complexity: int
    ) -> tuple[list[int], list[float]]:
        """Return the `k` nearest passages of the graph and beside it, and their squared distances, nearest first.

        The search of the graph widens while removed nodes leave too few.
        """
        import numpy as np

        graph, nodes, added, vectors = index
        length = min(complexity, len(nodes))
        num_live = int(np.count_nonzero(nodes >= 0))
        while True:
            num_results = min(k, length) if num_live == len(nodes) else length
            ids, distances = self._search_graph(graph, len(nodes), vector, num_results, length)
            found = [(distance, int(nodes[id])) for id, distance in zip(ids, distances, strict=True) if nodes[id] >= 0]
            if num_live == len(nodes) or len(found) >= min(k, num_live) or length == len(nodes):
                break
            length = min(2 * length, len(nodes))  # too many of the nearest were removed
        if len(added):
            found += zip(np.maximum(2 - 2 * (vectors @ vector), 0).tolist(), added.tolist(), strict=True)
        best = sorted(found)[:k]
        return [passage for _, passage in best], [distance for distance, _ in best]

    def _search_graph(
        self, graph: Any, num_nodes: int, vector: Any, k: int, complexity: int
    ) -> tuple[list[int], list[float]]:
        """Return up to `k` nearest nodes and distances: those before a node that does not exist, is repeated, or is
        nearer than the one before. Raises IndexCorruptError if fewer than min(k, 2) are left.
        """
        options = {"k_neighbors": k, "complexity": complexity, "beam_width": BEAM_WIDTH}
        result = graph.batch_search(vector[None], **options, num_threads=NUM_DISKANN_THREADS)
        ids, distances = result.identifiers[0].tolist(), result.distances[0].tolist()
        num_valid = 0
        while num_valid < k and ids[num_valid] < num_nodes and ids[num_valid] not in ids[:num_valid]:
            if num_valid and distances[num_valid] < distances[num_valid - 1]:
                break
            num_valid += 1
        if num_valid < min(k, 2):
            raise corrupt(self._path, f"it answers with nodes {ids} of {num_nodes}")
        return ids[:num_valid], distances[:num_valid]


def build_graph(folder: Path, vectors: "Vectors", num_threads: int) -> None:
    """Write DiskANN's graph of the vectors, with a little noise that tells equal ones apart. OSError if it fails."""
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


def keep_graph(old: Path, manifest: Manifest, folder: Path, nodes: Any, num_passages: int) -> bool:
    """Copy the graph of the index `old` into `folder`, and return True; else False, with no copy left.

    False means that over a tenth of the passages have changed, or that files of `old` differ from its `manifest`.

    nodes: the new passage of each node of the graph, -1 for a removed one; written beside the graph.
    """
    import numpy as np

    if np.count_nonzero(nodes >= 0) < (1 - MAX_CHANGED_SHARE) * max(len(nodes), num_passages):
        return False
    names = [name for name in manifest.files if name.startswith("ann_")]
    with suppress(FileNotFoundError):  # another program has changed the index
        for name in names:
            shutil.copyfile(old / name, folder / name)
        if all(sha256_of(folder / name) == manifest.files[name].sha256 for name in names):
            nodes.astype(np.int32).tofile(folder / NODES)
            return True
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return False


def stored_nodes(folder: Path, num_passages: int) -> Any:
    """Return the passage of each node of an index's graph, -1 for a removed one; without a file, node i has passage i.

    :raises IndexCorruptError: a passage does not exist or has two nodes, or all are removed.
    """
    import numpy as np

    path = folder / NODES
    if not path.is_file():
        return np.arange(num_passages, dtype=np.int32)
    nodes = np.fromfile(path, np.int32, count=2 * num_passages)
    passages = nodes[nodes >= 0]
    if (
        not len(passages)
        or nodes.min() < -1
        or passages.max() >= num_passages
        or len(np.unique(passages)) < len(passages)
    ):
        raise corrupt(folder, f"{NODES} is not of {num_passages} passages")
    return nodes


def stored_vectors(folder: Path, num_passages: int, dimension: int) -> "Vectors":
    """Return an index's vectors in passage order, mapped into memory; raise IndexCorruptError if damaged."""
    import numpy as np

    path = folder / VECTORS
    if path.stat().st_size != num_passages * dimension * 4:
        raise corrupt(folder, f"{VECTORS} is not of {num_passages} passages")
    return np.memmap(path, np.float32, "r", shape=(num_passages, dimension))
