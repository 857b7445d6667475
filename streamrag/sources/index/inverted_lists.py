"""faiss's inverted lists in the worker processes that build and search an index; never loaded anywhere else.

The vectors lie in lists, one around each centroid. A search ranks the centroids by their distance to the query, and
looks at the lists in that order; each job at those which the jobs before it have not looked at.

    centroids, nearest first   |1 2 3|4 5 6|7 8 9 10 11 12| ...
                                job 1 job 2      job 3

The lists are mapped into memory, which all workers share, and which the system takes back when it needs it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrag.errors import MissingDependencyError
from streamrag.sources.index.index_folder import IVF, corrupt
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.workers.memory_limit import memory_limited

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors


NUM_CACHED_RANKINGS = 64
MOST_LISTS = 1 << 14
NUM_ROWS_AT_ONCE = 8192


def require_faiss() -> None:
    """Check that faiss is installed. For the caller's process; imports nothing.

    :raises MissingDependencyError: it is not.
    """
    if not find_spec("faiss"):
        raise MissingDependencyError("faiss-cpu", "pip install 'streamrag[faiss]'")


def num_lists_for(num_passages: int) -> int:
    """Return about the square root: ranking the centroids then costs as much as looking at one list.

    >>> num_lists_for(20), num_lists_for(100_000)
    (4, 316)
    """
    return min(round(math.sqrt(num_passages)), MOST_LISTS)


@dataclass
class FaissSearcher(IndexSearcher):
    """Searches inverted lists of faiss's."""

    num_lists: int

    def _open_index(self) -> tuple[Any, Callable[[bytes], tuple[Any, Any, Any]]]:
        """Return faiss's index, and what ranks its lists, which remembers the last queries."""
        import numpy as np

        index = open_lists(self.folder, self.num_passages, self.dimension, self.num_lists)
        sizes = np.array([index.invlists.list_size(number) for number in range(self.num_lists)])
        return index, lru_cache(NUM_CACHED_RANKINGS)(partial(self._rank_lists, index, sizes))

    def _search(  # type: ignore[override]
        self, index: Any, vector: Any, *, k: int, after: int, until: int, nearer_than: float | None
    ) -> tuple[list[int], list[float]]:
        """Find the `k` nearest passages in the lists from `after` to `until`, if nearer than `nearer_than`."""
        import numpy as np

        faiss_index, rank = index
        lists, distances_of_lists, num_until = rank(vector.tobytes())
        # The first lists may hold fewer than k: then more are looked at, and fewer are left for the next job.
        enough = int(np.searchsorted(num_until, min(k, self.num_passages))) + 1
        first, last = (max(place, enough) if place else 0 for place in (after, until))
        if first >= last:
            return [], []
        faiss_index.nprobe = last - first
        distances, ids = faiss_index.search_preassigned(
            vector[None], k, lists[None, first:last], distances_of_lists[None, first:last]
        )
        is_found = ids[0] >= 0
        if first == 0 and is_found.sum() < min(k, self.num_passages):  # what is not a number is never found
            raise corrupt(self.folder, f"{IVF} has vectors that are none")
        if nearer_than is not None:
            is_found &= distances[0] <= nearer_than
        distances, ids = distances[0][is_found], ids[0][is_found]
        if len(np.unique(ids)) < len(ids) or (ids >= self.num_passages).any() or not np.isfinite(distances).all():
            raise corrupt(self.folder, f"{IVF} answers with passages {ids.tolist()[:100]} of {self.num_passages}")
        order = np.lexsort((ids, distances))
        return ids[order].tolist(), distances[order].tolist()

    def _rank_lists(self, index: Any, sizes: Any, query: bytes) -> tuple[Any, Any, Any]:
        """Return all lists, nearest first; their centroids' distances; the number of vectors up to each list's end."""
        import numpy as np

        vector = np.frombuffer(query, np.float32)
        distances, lists = index.quantizer.search(vector[None], self.num_lists)
        lists = lists[0]
        if not np.array_equal(np.sort(lists), np.arange(self.num_lists)):
            raise corrupt(self.folder, f"{IVF} has centroids that are no vectors")
        return lists, distances[0], np.cumsum(sizes[lists])


BYTES_PER_LIST, SPARE_BYTES = 256, 64 << 20
"""Memory for opening an index beside its centroids, generously."""


def open_lists(folder: Path, num_passages: int, dimension: int, num_lists: int) -> Any:
    """Open faiss's index, its lists mapped into memory.

    :raises IndexCorruptError: the file is not what the manifest says.
    """
    import faiss

    faiss.omp_set_num_threads(1)  # of one query nothing is done at the same time
    # The vectors stay in the file. What else it says that it holds, faiss believes.
    num_more_bytes = 4 * num_lists * (dimension * 4 + BYTES_PER_LIST) + SPARE_BYTES
    try:
        with memory_limited(num_more_bytes):
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


# ------------------------------------------------------------------------------------------------------- building


def build_lists(folder: Path, vectors: "Vectors", num_threads: int, centroids: "Vectors | None") -> int:
    """Write faiss's file into `folder`, and return the number of lists.

    centroids: an older index's, which are used again while they are about as many as there would be anew: each list
        still is around its centroid, and what is searched is exact.
    """
    import faiss

    faiss.omp_set_num_threads(num_threads)
    num_vectors, dimension = vectors.shape
    num_lists = num_lists_for(num_vectors)
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
        index.train(vectors)  # with 256 of them for each list, chosen by a fixed seed
    for first in range(0, num_vectors, NUM_ROWS_AT_ONCE):
        index.add(vectors[first : first + NUM_ROWS_AT_ONCE])
    try:
        faiss.write_index(index, str(folder / IVF))
    except RuntimeError as error:
        raise OSError(f"faiss failed: {error}. Is there room for its file?") from error
    return num_lists


def stored_vectors(folder: Path, num_passages: int, dimension: int, num_lists: int) -> "tuple[Vectors, Vectors]":
    """Return the vectors of an index, in the order of its passages, and the centroids.

    :raises IndexCorruptError: the file is not what the manifest says.
    """
    import faiss
    import numpy as np

    index = open_lists(folder, num_passages, dimension, num_lists)
    vectors = np.full((num_passages, dimension), np.nan, np.float32)
    for number in range(num_lists):
        if size := index.invlists.list_size(number):
            ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size)
            if ((ids < 0) | (ids >= num_passages)).any():
                raise corrupt(folder, f"{IVF} has passages that are not there")
            codes = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * dimension * 4)
            vectors[ids] = codes.view(np.float32).reshape(size, dimension)
    return vectors, index.quantizer.reconstruct_n(0, num_lists)
