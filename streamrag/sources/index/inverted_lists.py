"""faiss's inverted lists in the worker processes that build and search an index. No other process loads faiss.

Each vector is in the list of its nearest centroid. A search ranks the centroids by their distance to the query, and
scans the lists in that order; each job scans the lists that follow those of the job before it.

    centroids, nearest first   |1 2 3|4 5 6|7 8 9 10 11 12| ...
                                job 1 job 2      job 3

The lists are mapped into memory, shared by all workers, and reclaimed by the system when it needs memory.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.sources.index.index_folder import IVF, corrupt
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.workers.limits import memory_limited

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


NUM_CACHED_RANKINGS = 64
MOST_LISTS = 1 << 14
ROWS_PER_ADD = 8192
BYTES_PER_LIST, SPARE_BYTES = 256, 64 << 20
"""Memory for opening an index beside its centroids, generously."""


class FaissSearcher(IndexSearcher):
    """A searcher of faiss's inverted lists."""

    def _open_index(self) -> tuple[Any, Callable[[bytes], tuple[Any, Any, Any]]]:
        """Return faiss's index, and a cached function that ranks its lists for a query vector."""
        import numpy as np

        index = open_lists(self._path, self.num_passages, self.dimension, self.num_lists)
        sizes = np.array([index.invlists.list_size(number) for number in range(self.num_lists)])
        return index, lru_cache(NUM_CACHED_RANKINGS)(partial(self._rank_lists, index, sizes))

    def _search(  # type: ignore[override]
        self, index: Any, vector: Any, *, k: int, after: int, until: int, nearer_than: float | None
    ) -> tuple[list[int], list[float]]:
        """Return up to `k` nearest passages in the lists from `after` to `until`, at most `nearer_than` away.

        The first job scans at least the lists that `k` passages need; a later one skips those. Damaged results raise.
        """
        import numpy as np

        faiss_index, rank = index
        lists, list_distances, num_until = rank(vector.tobytes())
        # If the first lists hold fewer than k, the first job scans more lists, and the next jobs scan fewer.
        min_lists = int(np.searchsorted(num_until, min(k, self.num_passages))) + 1
        first, last = (max(place, min_lists) if place else 0 for place in (after, until))
        if first >= last:
            return [], []
        faiss_index.nprobe = last - first
        distances, ids = faiss_index.search_preassigned(
            vector[None], k, lists[None, first:last], list_distances[None, first:last]
        )
        is_hit = ids[0] >= 0
        if first == 0 and is_hit.sum() < min(k, self.num_passages):  # faiss never finds NaN
            raise corrupt(self._path, f"{IVF} has vectors that are not numbers")
        if nearer_than is not None:
            is_hit &= distances[0] <= nearer_than
        distances, ids = distances[0][is_hit], ids[0][is_hit]
        if len(np.unique(ids)) < len(ids) or (ids >= self.num_passages).any() or not np.isfinite(distances).all():
            raise corrupt(self._path, f"{IVF} answers with passages {ids.tolist()[:100]} of {self.num_passages}")
        order = np.lexsort((ids, distances))
        return ids[order].tolist(), distances[order].tolist()

    def _rank_lists(self, index: Any, sizes: Any, query: bytes) -> tuple[Any, Any, Any]:
        """Return all lists, nearest first, their centroids' distances, and their cumulative sizes; raise if damaged."""
        import numpy as np

        vector = np.frombuffer(query, np.float32)
        distances, lists = index.quantizer.search(vector[None], self.num_lists)
        lists = lists[0]
        if not np.array_equal(np.sort(lists), np.arange(self.num_lists)):
            raise corrupt(self._path, f"{IVF} has centroids that are not vectors")
        return lists, distances[0], np.cumsum(sizes[lists])


def open_lists(folder: Path, num_passages: int, dimension: int, num_lists: int) -> Any:
    """Open faiss's index, its lists mapped into memory. Raises IndexCorruptError if it does not match the manifest."""
    import faiss

    faiss.omp_set_num_threads(1)  # a search of one query is sequential
    # The vectors stay in the file, but faiss trusts every other size that the file declares.
    max_bytes = 4 * num_lists * (dimension * 4 + BYTES_PER_LIST) + SPARE_BYTES
    try:
        with memory_limited(max_bytes):
            index: Any = faiss.read_index(str(folder / IVF), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except (RuntimeError, MemoryError) as error:
        raise corrupt(folder, f"faiss cannot open {IVF}: {error}") from error
    lists: Any = getattr(index, "invlists", None)
    is_ours = (
        isinstance(index, faiss.IndexIVFFlat)
        and isinstance(faiss.downcast_index(index.quantizer), faiss.IndexFlat)
        and index.metric_type == faiss.METRIC_L2
        and (index.d, index.ntotal, index.nlist) == (dimension, num_passages, num_lists)
        and (index.quantizer.d, index.quantizer.ntotal, lists.nlist) == (dimension, num_lists, num_lists)
        and lists.code_size == dimension * 4
        and lists.compute_ntotal() == num_passages
    )
    if not is_ours:
        raise corrupt(folder, f"{IVF} holds no {num_lists} lists of {num_passages} vectors of {dimension} numbers")
    return index


def build_lists(folder: Path, vectors: "Vectors", num_threads: int, centroids: "Vectors | None") -> int:
    """Write faiss's file into `folder`, and return the number of lists.

    centroids: those of an older index, reused if their number is within 1.5 times of the best one: each vector is
        still in the list of its nearest centroid, and results are exact.

    :raises OSError: the file cannot be written.
    """
    import faiss

    faiss.omp_set_num_threads(num_threads)
    num_vectors, dimension = vectors.shape
    # The square root: ranking the centroids costs as much as scanning one list.
    num_lists = min(round(math.sqrt(num_vectors)), MOST_LISTS)
    if centroids is not None and num_lists / 1.5 <= len(centroids) <= num_lists * 1.5:
        num_lists = len(centroids)
    else:
        centroids = None
    quantizer = faiss.IndexFlatL2(dimension)
    index = faiss.IndexIVFFlat(quantizer, dimension, num_lists, faiss.METRIC_L2)
    if centroids is not None:
        quantizer.add(centroids)
        index.is_trained = True
    else:
        index.cp.min_points_per_centroid = 1
        index.train(vectors)  # faiss samples 256 of them for each list, with a fixed seed
    for first in range(0, num_vectors, ROWS_PER_ADD):
        index.add(vectors[first : first + ROWS_PER_ADD])
    try:
        faiss.write_index(index, str(folder / IVF))
    except RuntimeError as error:
        raise OSError(f"faiss failed: {error}. Is there room for its file?") from error
    return num_lists


def stored_vectors(folder: Path, num_passages: int, dimension: int, num_lists: int) -> "tuple[Vectors, Vectors]":
    """Return an index's vectors in passage order, and its centroids. Raises IndexCorruptError if they are damaged."""
    import faiss
    import numpy as np

    index = open_lists(folder, num_passages, dimension, num_lists)
    vectors = np.full((num_passages, dimension), np.nan, np.float32)
    for number in range(num_lists):
        if size := index.invlists.list_size(number):
            ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size)
            if ((ids < 0) | (ids >= num_passages)).any():
                raise corrupt(folder, f"{IVF} has passages that do not exist")
            codes = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * dimension * 4)
            vectors[ids] = codes.view(np.float32).reshape(size, dimension)
    return vectors, index.quantizer.reconstruct_n(0, num_lists)
