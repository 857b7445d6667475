"""An index as a source: a progressive search, each stage of which looks at more of the index."""

import heapq
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from streamrag.errors import ConfigurationError
from streamrag.sources.index.diskann import MAX_BEAM_WIDTH
from streamrag.sources.index.index_folder import Manifest, kind_in_manifest
from streamrag.sources.index.inverted_lists import MOST_LISTS
from streamrag.sources.index.worker_jobs import NumWorkers
from streamrag.sources.search.index_source import Hit, IndexSource, NumPassages
from streamrag.support.validation import Count, GrowingCounts, validated

NUM_STAGES = 5
FIRST_PROBES = 4


class VectorSource(IndexSource):
    """Searches an index made by `build_index` or `streamrag index build`.

    A search runs in stages, each with a longer list of candidates than the one before. A stage that changes the `k`
    best passages, or their order, yields an `Update` with all of them, best first; `Hint.num_chunks` counts the stages
    still to come. A chunk's `score` is the cosine similarity to the query.

    index: the index's folder.
    k: passages to find; all of them if the index has fewer.
    ladder: the lengths of the candidate list, one for each stage, growing from 2 * k or more: DiskANN finds too little
        with shorter ones. By default five stages that double from 2 * k. Stages after one that covers the whole index
        are left out.
    beam_width: nodes of the graph that DiskANN reads at once.
    num_workers: processes that embed and search, for all queries. Each holds the embedder (0.6 GB of memory with
        all-MiniLM-L6-v2), the compressed vectors, and 8 bytes for each passage; this process holds none of it.
    embedder: what the index was made with, if that is not the default: a name or path of a sentence-transformers model,
        or `module:function`. It is imported or loaded, so it is never taken from the index.

    :raises ConfigurationError: a value that cannot work.
    """

    name = "VectorSource"
    """Name for errors and schedulers; give two sources that behave differently two names."""

    _kind = "diskann"
    _handler = "streamrag.sources.index.diskann:DiskAnnSearcher"

    @validated
    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: NumPassages = 5,
        ladder: Annotated[GrowingCounts, Field(min_length=1)] | None = None,
        beam_width: Annotated[Count, Field(le=MAX_BEAM_WIDTH)] = 8,
        num_workers: NumWorkers = 1,
        embedder: str | None = None,
    ) -> None:
        super().__init__(index, k=k, num_workers=num_workers, embedder=embedder)
        self._beam_width = beam_width
        self._ladder = ladder or [2 * k << stage for stage in range(NUM_STAGES)]
        if self._ladder[0] < 2 * k:
            raise ConfigurationError(f"ladder={ladder!r} must begin with at least 2 * k = {2 * k}")

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        """Return the lengths of candidate lists, up to one that holds every passage."""
        lengths = dict.fromkeys(min(length, manifest.num_passages) for length in self._ladder)
        return [{"complexity": length, "beam_width": self._beam_width} for length in lengths]

    def _merge(self, best: Sequence[Hit], found: Sequence[Hit], k: int) -> list[Hit]:
        """Return what was found: each search repeats those before it, and finds what they found or better."""
        return list(found)


class IvfSource(IndexSource):
    """Searches an index made by `build_index(kind="ivf")` or `streamrag index build --kind ivf`.

    The passages lie in lists of similar ones. A search runs in stages: the first looks at the lists nearest to the
    query, each later one at the next nearest, so that no work is done twice. A stage that changes the `k` best
    passages, or their order, yields an `Update` with all of them, best first; `Hint.num_chunks` counts the stages still
    to come. A chunk's `score` is the cosine similarity to the query, from the vectors as they were embedded.

    index: the index's folder.
    k: passages to find; all of them if the index has fewer.
    probes: how many lists have been looked at after each stage, growing; by default 4, 8, 16, 32, 64. There are as many
        lists as the root of the number of passages. Where the lists of the first stages hold fewer than k
        passages, more are looked at; stages after one that looks at the last list are left out.
    exact: a last stage looks at all other lists, so that its result is that of comparing every passage.
    num_workers: processes that embed and search, for all queries. Each holds the embedder (0.6 GB of memory with
        all-MiniLM-L6-v2) and 8 bytes for each passage; the lists are mapped from the file, and shared by all.
    embedder: what the index was made with, if that is not the default: a name or path of a sentence-transformers model,
        or `module:function`. It is imported or loaded, so it is never taken from the index.

    :raises ConfigurationError: a value that cannot work.
    """

    name = "IvfSource"
    """Name for errors and schedulers; give two sources that behave differently two names."""

    _kind = "ivf"
    _handler = "streamrag.sources.index.inverted_lists:FaissSearcher"

    @validated
    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: NumPassages = 5,
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

    def _options(self, manifest: Manifest) -> Mapping[str, Any]:
        return {"num_lists": manifest.num_lists}

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        assert manifest.num_lists is not None
        ends = [end for end in self._probes if end < manifest.num_lists]
        if self._exact or len(ends) < len(self._probes):
            ends.append(manifest.num_lists)
        return [{"after": after, "until": until} for after, until in pairwise([0, *ends])]

    def _job(self, stage: Mapping[str, Any], best: Sequence[Hit], k: int) -> Mapping[str, Any]:
        return {**stage, "nearer_than": best[-1].distance if len(best) == k else None}

    def _merge(self, best: Sequence[Hit], found: Sequence[Hit], k: int) -> list[Hit]:
        return heapq.nsmallest(k, [*best, *found], key=lambda each: (each.distance, each.number))


def index_source(
    index: str | os.PathLike[str], *, k: int = 5, num_workers: int = 1, embedder: str | None = None
) -> VectorSource | IvfSource:
    """Return the source for an index of either kind, with the defaults of that source.

    Reads the manifest only; what is wrong with an index, its source says when it is started.

    :raises ConfigurationError: a value that cannot work.
    """
    kind = IvfSource if kind_in_manifest(Path(index).absolute()) == "ivf" else VectorSource
    return kind(index, k=k, num_workers=num_workers, embedder=embedder)
