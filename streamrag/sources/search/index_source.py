"""What the sources that search an index share: starting, the stages of a search, and closing."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from streamrag.core import Chunk, CutShort, Hint, Progress, SourceEvent, Update
from streamrag.errors import ConfigurationError, IndexMismatchError, SourceError, WorkerError
from streamrag.sources.index.embedder import EmbedderPlace, embedder_of_index, find_embedder
from streamrag.sources.index.index_folder import IndexKind, Manifest, check_index, corrupt, explain
from streamrag.sources.options import check_whole
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool, WorkerTimeoutError
from streamrag.starting import started_once

JOB_TIMEOUT_S = 300.0
"""A search takes milliseconds; in a worker that replaced another, loading the embedder comes before it."""

MOST_PASSAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """A passage that a stage found."""

    distance: float
    """Squared."""
    number: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Opened:
    manifest: Manifest
    workers: WorkerPool


class IndexSource(ABC):
    """An index of one kind, searched in stages, in worker processes."""

    name: str
    _kind: ClassVar[IndexKind]
    _handler: ClassVar[str]

    def __init__(self, index: str | os.PathLike[str], *, k: int, num_workers: int, embedder: str | None) -> None:
        self._folder = Path(index).absolute()
        self._k = k
        self._num_workers = num_workers
        self._embedder = embedder
        check_whole(self.name, "k", k, 1, MOST_PASSAGES)
        check_whole(self.name, "num_workers", num_workers, 1, 32)
        self._opened: _Opened | None = None

    @abstractmethod
    def _require_library(self) -> None:
        """:raises MissingDependencyError: what searches this kind of index is not installed."""

    def _options(self, manifest: Manifest) -> Mapping[str, Any]:
        """For the worker, beside what all kinds have."""
        return {}

    @abstractmethod
    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        """What is special to the job of each stage."""

    def _job(self, stage: Mapping[str, Any], best: Sequence[Found], k: int) -> Mapping[str, Any]:
        return stage

    @abstractmethod
    def _merge(self, best: Sequence[Found], found: Sequence[Found], k: int) -> list[Found]:
        """The best passages after a stage."""

    @started_once
    async def start(self, progress: Progress) -> None:
        """Check the index, load the embedder (many seconds), open the index.

        :raises MissingDependencyError: the index's library or the embedder's package is not installed.
        :raises IndexMissingError: there is no index.
        :raises IndexCorruptError: the index is damaged.
        :raises IndexMismatchError: it was made with another embedder or dimension, or another version of streamrag; or
            with an embedder that must be named; or it is of the other kind.
        :raises ConfigurationError: the embedder cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
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
        if manifest.kind != self._kind:
            other = {"diskann": "VectorSource", "ivf": "IvfSource"}[manifest.kind]
            raise IndexMismatchError(f"{self._folder} is an index of kind {manifest.kind!r}: use {other}")
        self._require_library()
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
            **self._options(manifest),
        }
        return WorkerPool(self._handler, options, size=self._num_workers, name="index search worker", env=place.env)

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
        except WorkerError as error:  # the libraries trust their files; what they do with bad ones may end the process
            raise corrupt(self._folder, f"the process that opened it died ({error})") from error

    async def aclose(self) -> None:
        """Stop the workers. Searches that are under way end with an error. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            await opened.workers.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """An `Update` for each stage that changes what is best; a `CutShort` if a later stage takes too long.

        :raises ConfigurationError: the source is not started.
        :raises WorkerError: a worker died; the next query has another.
        :raises SourceError: the search failed, or a new worker found that the index has been replaced meanwhile.
        """
        if not self._opened:
            raise ConfigurationError(f"{self.name} is not started: use it in a Pipeline, or await its start() first")
        manifest, workers = self._opened.manifest, self._opened.workers
        stages = self._stages(manifest)
        k = min(self._k, manifest.num_passages)
        best: list[Found] = []
        share = Share()
        # One job a stage: the stages of other queries come in between.
        for num_left, stage in zip(reversed(range(len(stages))), stages, strict=True):
            job = {"do": "search", "query": query, "k": k, **self._job(stage, best, k)}
            try:
                answer = await self._run(workers, job, share)
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
            before = [each.number for each in best]
            best = self._merge(best, _found(answer), k)
            if [each.number for each in best] != before:
                chunks = (Chunk(**each.fields, score=1 - each.distance / 2) for each in best)
                yield Update(tuple(chunks), Hint(num_chunks=num_left))

    async def _run(self, workers: WorkerPool, job: Mapping[str, Any], share: Share | None = None) -> dict[str, Any]:
        try:
            return await workers.run(job, timeout_s=JOB_TIMEOUT_S, share=share)
        except WorkerJobError as error:
            raise explain(error, f"searching the index {self._folder} failed") from error


def _found(answer: Mapping[str, Any]) -> list[Found]:
    return [Found(*each) for each in zip(answer["distances"], answer["ids"], answer["passages"], strict=True)]
