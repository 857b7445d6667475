"""An IVF index as a source: a progressive search, each stage of which looks where the stages before it did not."""

import heapq
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.sources.index.index_folder import Manifest, said_kind
from streamrag.sources.index.inverted_lists import MOST_LISTS, require_faiss
from streamrag.sources.options import is_growing
from streamrag.sources.search.index_source import Found, IndexSource
from streamrag.sources.search.vector import VectorSource

FIRST_PROBES, NUM_STAGES = 4, 5


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
    """Its name for errors and schedulers; give two sources that behave differently two names."""

    _kind = "ivf"
    _handler = "streamrag.sources.index.inverted_lists:make_searcher"

    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: int = 5,
        probes: Sequence[int] | None = None,
        exact: bool = False,
        num_workers: int = 1,
        embedder: str | None = None,
    ) -> None:
        super().__init__(index, k=k, num_workers=num_workers, embedder=embedder)
        default = tuple(FIRST_PROBES << stage for stage in range(NUM_STAGES))
        self._probes = default if probes is None else _checked(probes)
        self._exact = exact

    def _require_library(self) -> None:
        require_faiss()

    def _options(self, manifest: Manifest) -> Mapping[str, Any]:
        return {"num_lists": manifest.num_lists}

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        assert manifest.num_lists is not None
        ends = [end for end in self._probes if end < manifest.num_lists]
        if self._exact or len(ends) < len(self._probes):
            ends.append(manifest.num_lists)
        return [{"after": after, "until": until} for after, until in pairwise([0, *ends])]

    def _job(self, stage: Mapping[str, Any], best: Sequence[Found], k: int) -> Mapping[str, Any]:
        return {**stage, "nearer_than": best[-1].distance if len(best) == k else None}

    def _merge(self, best: Sequence[Found], found: Sequence[Found], k: int) -> list[Found]:
        return heapq.nsmallest(k, [*best, *found], key=lambda each: (each.distance, each.number))


def _checked(probes: Sequence[int]) -> tuple[int, ...]:
    if not is_growing(probes, 1) or not probes or probes[-1] > MOST_LISTS:
        raise ConfigurationError(
            f"IvfSource: probes={probes!r} must be growing whole numbers, from 1 to {MOST_LISTS} at most"
        )
    return tuple(map(int, probes))


def index_source(
    index: str | os.PathLike[str], *, k: int = 5, num_workers: int = 1, embedder: str | None = None
) -> VectorSource | IvfSource:
    """The source for an index of either kind, with the defaults of that source.

    Reads the manifest only; what is wrong with an index, its source says when it is started.

    :raises ConfigurationError: a value that cannot work.
    """
    if said_kind(Path(index).absolute()) == "ivf":
        return IvfSource(index, k=k, num_workers=num_workers, embedder=embedder)
    return VectorSource(index, k=k, num_workers=num_workers, embedder=embedder)
