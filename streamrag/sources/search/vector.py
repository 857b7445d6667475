"""A DiskANN index as a source: a progressive search, each stage of which looks at more of the index."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.sources.index.diskann import MAX_BEAM_WIDTH, require_diskann
from streamrag.sources.index.index_folder import Manifest
from streamrag.sources.options import check_whole, is_growing
from streamrag.sources.search.index_source import Found, IndexSource

NUM_STAGES = 5


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
    """Its name for errors and schedulers; give two sources that behave differently two names."""

    _kind = "diskann"
    _handler = "streamrag.sources.index.diskann:make_searcher"

    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: int = 5,
        ladder: Sequence[int] | None = None,
        beam_width: int = 8,
        num_workers: int = 1,
        embedder: str | None = None,
    ) -> None:
        super().__init__(index, k=k, num_workers=num_workers, embedder=embedder)
        check_whole(self.name, "beam_width", beam_width, 1, MAX_BEAM_WIDTH)
        self._beam_width = beam_width
        self._ladder = tuple(2 * k << stage for stage in range(NUM_STAGES)) if ladder is None else _checked(ladder, k)

    def _require_library(self) -> None:
        require_diskann()

    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        lengths = _lengths(self._ladder, manifest.num_passages)
        return [{"complexity": length, "beam_width": self._beam_width} for length in lengths]

    def _merge(self, best: Sequence[Found], found: Sequence[Found], k: int) -> list[Found]:
        """Each search repeats those before it, and finds what they found or better."""
        return list(found)


def _checked(ladder: Sequence[int], k: int) -> tuple[int, ...]:
    if not is_growing(ladder, 2 * k) or not ladder:
        raise ConfigurationError(
            f"VectorSource: ladder={ladder!r} must be growing whole numbers, the first at least 2 * k = {2 * k}"
        )
    return tuple(map(int, ladder))


def _lengths(ladder: Sequence[int], num_passages: int) -> Iterator[int]:
    """The lengths of candidate lists, up to one that holds every passage."""
    for length in ladder:
        yield min(length, num_passages)
        if length >= num_passages:
            return
