"""Sources that search an index in stages, each of which examines more of the index."""

import heapq
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from streamrag.errors import ConfigurationError
from streamrag.sources.index.diskann import DiskAnnSearcher
from streamrag.sources.index.index_folder import Manifest, kind_in_manifest
from streamrag.sources.index.inverted_lists import MOST_LISTS, FaissSearcher
from streamrag.sources.index.worker_jobs import NumWorkers
from streamrag.sources.search.index_source import Hit, IndexSource, NumPassages
from streamrag.support.validation import GrowingCounts, validated

NUM_STAGES = 5
FIRST_PROBES = 4


class VectorSource(IndexSource):
    """A vector search of an index made by `build_index` or `streamrag index build`.

    A search runs in stages, each with a longer candidate list than the one before. A stage that changes the `k` best
    passages or their order yields an `Update` with all of them, best first; `Hint.num_chunks` counts the remaining
    stages. A chunk's `score` is the cosine similarity to the query.

    index: the index's folder.
    k: number of passages to find; all of them if the index has fewer.
    ladder: the length of the candidate list in each stage, increasing from at least 2 * k, below which DiskANN finds
        too little; by default five stages that double from 2 * k. Stages beyond the size of the index are left out.
    num_workers: number of processes that embed and search for all queries. Each holds the embedder (0.6 GB of memory
        with all-MiniLM-L6-v2), the compressed vectors, and 8 bytes for each passage.
    embedder: the embedder of the index, if it is not the default: the name or path of a sentence-transformers model, or
        `module:function`. It is imported or loaded, so it is never taken from the index.

    :raises ConfigurationError: an option is invalid.
    """

    name = "VectorSource"
    """Name for errors and schedulers; give sources that behave differently different names."""

    _kind = "diskann"
    _searcher = DiskAnnSearcher

    @validated
    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: NumPassages = 10,
        ladder: Annotated[GrowingCounts, Field(min_length=1)] | None = None,
        num_workers: NumWorkers = 1,
        embedder: str | None = None,
    ) -> None:
        super().__init__(index, k=k, num_workers=num_workers, embedder=embedder)
        self._ladder = ladder or [2 * k << stage for stage in range(NUM_STAGES)]
        if self._ladder[0] < 2 * k:
            raise ConfigurationError(f"ladder={ladder!r} must begin with at least 2 * k = {2 * k}")

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        lengths = dict.fromkeys(min(length, manifest.num_passages) for length in self._ladder)
        return [{"complexity": length} for length in lengths]

    def _merge(self, best: Sequence[Hit], hits: Sequence[Hit], k: int) -> list[Hit]:
        return list(hits)  # a longer candidate list finds the same passages or better ones


class IvfSource(IndexSource):
    """A vector search of an index made by `build_index(kind="ivf")` or `streamrag index build --kind ivf`.

    Similar passages are in the same inverted list. A search runs in stages: the first scans the lists nearest to the
    query, and each later one the next nearest, so no list is scanned twice. A stage that changes the `k` best passages
    or their order yields an `Update` with all of them, best first; `Hint.num_chunks` counts the remaining stages. A
    chunk's `score` is the exact cosine similarity to the query.

    index: the index's folder.
    k: number of passages to find; all of them if the index has fewer.
    probes: the number of lists that have been scanned after each stage, increasing; by default 4, 8, 16, 32, 64. An
        index has about as many lists as the square root of its number of passages. The first stages scan more lists if
        theirs hold fewer than `k` passages; stages beyond the last list are left out.
    exact: add a last stage that scans all remaining lists, so that the result is exact.
    num_workers: number of processes that embed and search for all queries. Each holds the embedder (0.6 GB of memory
        with all-MiniLM-L6-v2) and 8 bytes for each passage; the lists are mapped from the file and shared.
    embedder: the embedder of the index, if it is not the default; see `VectorSource`.

    :raises ConfigurationError: an option is invalid.
    """

    name = "IvfSource"
    """Name for errors and schedulers; give sources that behave differently different names."""

    _kind = "ivf"
    _searcher = FaissSearcher

    @validated
    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: NumPassages = 10,
        probes: Annotated[GrowingCounts, Field(min_length=1)] | None = None,
        exact: bool = False,
        num_workers: NumWorkers = 1,
        embedder: str | None = None,
    ) -> None:
        super().__init__(index, k=k, num_workers=num_workers, embedder=embedder)
        self._probes = probes or [FIRST_PROBES << stage for stage in range(NUM_STAGES)]
        self._exact = exact
        if self._probes[-1] > MOST_LISTS:
            raise ConfigurationError(f"probes={probes!r} must be {MOST_LISTS} at most")

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        """Return each stage's range of lists: up to each of `probes`, or the last list if less; with `exact`, all."""
        assert manifest.num_lists is not None
        ends = [end for end in self._probes if end < manifest.num_lists]
        if self._exact or len(ends) < len(self._probes):
            ends.append(manifest.num_lists)
        return [{"after": after, "until": until} for after, until in pairwise([0, *ends])]

    def _job(self, stage: Mapping[str, Any], best: Sequence[Hit], k: int) -> Mapping[str, Any]:
        return {**stage, "nearer_than": best[-1].distance if len(best) == k else None}

    def _merge(self, best: Sequence[Hit], hits: Sequence[Hit], k: int) -> list[Hit]:
        return heapq.nsmallest(k, [*best, *hits], key=lambda each: (each.distance, each.number))


def index_source(
    index: str | os.PathLike[str], *, k: int = 10, embedder: str | None = None
) -> VectorSource | IvfSource:
    """Return an `IvfSource` or a `VectorSource` with default options, depending on the kind of the index.

    Reads only the manifest. The source checks the index when it is started.

    :raises ConfigurationError: an option is invalid.
    """
    kind = IvfSource if kind_in_manifest(Path(index).absolute()) == "ivf" else VectorSource
    return kind(index, k=k, embedder=embedder)
