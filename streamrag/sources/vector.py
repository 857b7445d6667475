"""A vector index as a source: a progressive search, each stage of which looks at more of the index."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamrag.core import Chunk, CutShort, Hint, Progress, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError, WorkerError
from streamrag.sources.embedder import EmbedderPlace, embedder_of_index, find_embedder
from streamrag.sources.index_folder import Manifest, check_index, corrupt, explain
from streamrag.sources.search import MAX_BEAM_WIDTH, require_diskann
from streamrag.sources.workers import Share, WorkerJobError, WorkerPool, WorkerTimeoutError

NUM_STAGES = 5

JOB_TIMEOUT_S = 300.0
"""A search takes milliseconds; in a worker that replaced another, loading the embedder comes before it."""


@dataclass(frozen=True, slots=True)
class _Opened:
    manifest: Manifest
    workers: WorkerPool


class VectorSource:
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
        self._folder = Path(index).absolute()
        self._k = k
        self._beam_width = beam_width
        self._num_workers = num_workers
        self._embedder = embedder
        counts: Mapping[str, tuple[object, int]] = {
            "k": (k, 1 << 16),
            "beam_width": (beam_width, MAX_BEAM_WIDTH),
            "num_workers": (num_workers, 32),
        }
        for name, (value, most) in counts.items():
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigurationError(f"VectorSource: {name}={value!r} must be a whole number from 1 to {most}")
        self._ladder = tuple(2 * k << stage for stage in range(NUM_STAGES)) if ladder is None else _checked(ladder, k)
        self._opened: _Opened | None = None

    async def start(self, progress: Progress) -> None:
        """Check the index, load the embedder (many seconds), open the index.

        :raises MissingDependencyError: DiskANN or the embedder's package is not installed.
        :raises IndexMissingError: there is no index.
        :raises IndexCorruptError: the index is damaged.
        :raises IndexMismatchError: it was made with another embedder or dimension, or another version of streamrag; or
            with an embedder that must be named.
        :raises ConfigurationError: the embedder cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
        if self._opened:
            return
        progress(f"checking the index {self._folder}")
        manifest, manifest_sha256, place = await asyncio.to_thread(self._check)
        workers = self._new_pool(manifest, manifest_sha256, place)
        try:
            progress(f"loading the embedder {place.name}")
            await workers.start()
            await self._load(workers)
            progress(f"opening the index of {manifest.num_passages} passages")
            await self._open(workers)
        except BaseException:
            await workers.aclose()
            raise
        self._opened = _Opened(manifest, workers)
        progress("the index is ready")

    def _check(self) -> tuple[Manifest, str, EmbedderPlace]:
        manifest, manifest_sha256 = check_index(self._folder)
        require_diskann()
        named = self._embedder
        place = find_embedder(named) if named is not None else embedder_of_index(self._folder, manifest.embedder)
        return manifest, manifest_sha256, place

    def _new_pool(self, manifest: Manifest, manifest_sha256: str, place: EmbedderPlace) -> WorkerPool:
        options = {
            "folder": str(self._folder),
            "manifest_sha256": manifest_sha256,
            "num_passages": manifest.num_passages,
            "location": place.location,
            "embedder": place.name,
            "dimension": manifest.dimension,
            "probe": manifest.probe,
        }
        handler = "streamrag.sources.search:make_searcher"
        return WorkerPool(handler, options, size=self._num_workers, name="index search worker", env=place.env)

    async def _load(self, workers: WorkerPool) -> None:
        """One job for each worker; none is done before all have begun."""
        loads = [self._run(workers, {"do": "load"}) for _ in range(workers.size)]
        for result in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _open(self, workers: WorkerPool) -> None:
        try:
            await self._run(workers, {"do": "open"})
        except WorkerTimeoutError:
            raise
        except WorkerError as error:  # DiskANN trusts its files; what it does with bad ones may end its process
            raise corrupt(self._folder, f"the process that opened it died ({error})") from error

    async def aclose(self) -> None:
        """Stop the workers. Searches that are under way end with an error. Does nothing when not started."""
        opened, self._opened = self._opened, None
        if opened:
            await opened.workers.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """An `Update` for each stage that changes what is best; a `CutShort` if a later stage takes too long.

        :raises ConfigurationError: the source is not started.
        :raises WorkerError: a worker died; the next query has another.
        :raises SourceError: the search failed, or a new worker found that the index has been replaced meanwhile.
        """
        if not self._opened:
            raise ConfigurationError("VectorSource is not started: use it in a Pipeline, or await its start() first")
        manifest, workers = self._opened.manifest, self._opened.workers
        stages = tuple(_stages(self._ladder, manifest.num_passages))
        best: list[int] = []
        share = Share()
        # One job a stage: the stages of other queries come in between.
        for num_left, complexity in zip(reversed(range(len(stages))), stages, strict=True):
            job = {
                "do": "search",
                "query": query,
                "k": min(self._k, manifest.num_passages),
                "complexity": complexity,
                "beam_width": self._beam_width,
            }
            try:
                found = await self._run(workers, job, share)
            except WorkerTimeoutError:
                if not best:
                    raise
                num_done = len(stages) - num_left - 1
                yield CutShort(
                    f"the search took longer than {JOB_TIMEOUT_S:g} s after {num_done} of {len(stages)} stages"
                )
                return
            except ConfigurationError as error:  # what was found to be wrong with the index, or with the embedder
                raise SourceError(str(error)) from error
            if found["ids"] != best:
                best = found["ids"]
                yield Update(tuple(_chunks(found)), Hint(num_chunks=num_left))

    async def _run(self, workers: WorkerPool, job: Mapping[str, Any], share: Share | None = None) -> dict[str, Any]:
        try:
            return await workers.run(job, timeout_s=JOB_TIMEOUT_S, share=share)
        except WorkerJobError as error:
            raise explain(error, f"searching the index {self._folder} failed") from error


def _checked(ladder: Sequence[int], k: int) -> tuple[int, ...]:
    is_whole = isinstance(ladder, Sequence) and len(ladder) > 0 and all(type(length) is int for length in ladder)
    if not is_whole or ladder[0] < 2 * k or any(a >= b for a, b in pairwise(ladder)):
        raise ConfigurationError(
            f"VectorSource: ladder={ladder!r} must be growing whole numbers, the first at least 2 * k = {2 * k}"
        )
    return tuple(ladder)


def _stages(ladder: Sequence[int], num_passages: int) -> Iterator[int]:
    """The lengths of candidate lists, up to one that holds every passage."""
    for length in ladder:
        yield min(length, num_passages)
        if length >= num_passages:
            return


def _chunks(found: Mapping[str, Any]) -> Iterator[Chunk]:
    for fields, distance in zip(found["passages"], found["distances"], strict=True):
        yield Chunk(**fields, score=1 - distance / 2)
