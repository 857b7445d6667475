"""A source that searches an index in stages, whatever its kind."""

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from streamrag.core import Chunk, CutShort, Hint, Progress, SourceEvent, Update
from streamrag.core.lifecycle import started_once
from streamrag.errors import ConfigurationError, IndexMismatchError, WorkerError
from streamrag.sources.index.build import require_library
from streamrag.sources.index.embedder import ModelPlace, embedder_of_index
from streamrag.sources.index.index_folder import IndexKind, Manifest, StoredPassage, check_index, corrupt
from streamrag.sources.index.worker_jobs import JOB_TIMEOUT_S, run_in_each, run_job
from streamrag.sources.workers.pool import Share, WorkerPool, WorkerTimeoutError
from streamrag.support.validation import Count

NumPassages = Annotated[Count, Field(le=1 << 16)]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that a stage found."""

    distance: float
    """Squared."""
    number: int
    fields: StoredPassage


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
        self._opened: _Opened | None = None

    def _options(self, manifest: Manifest) -> Mapping[str, Any]:
        """Return what the worker is told beside what all kinds have."""
        return {}

    @abstractmethod
    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        """Return what is special to the job of each stage."""

    def _job(self, stage: Mapping[str, Any], best: Sequence[Hit], k: int) -> Mapping[str, Any]:
        return stage

    @abstractmethod
    def _merge(self, best: Sequence[Hit], found: Sequence[Hit], k: int) -> list[Hit]:
        """Return the best passages after a stage."""

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
            await run_in_each(workers, {"do": "load"})
            progress(f"opening the index of {manifest.num_passages} passages")
            await self._open(workers)
        except BaseException:
            await workers.aclose()
            raise
        self._opened = _Opened(manifest, workers)
        progress("the index is ready")

    def _check(self) -> tuple[Manifest, str, ModelPlace]:
        manifest, manifest_sha256 = check_index(self._folder)
        if manifest.kind != self._kind:
            other = {"diskann": "VectorSource", "ivf": "IvfSource"}[manifest.kind]
            raise IndexMismatchError(f"{self._folder} is an index of kind {manifest.kind!r}: use {other}")
        require_library(self._kind)
        return manifest, manifest_sha256, embedder_of_index(self._folder, manifest.embedder, self._embedder)

    def _new_pool(self, manifest: Manifest, manifest_sha256: str, place: ModelPlace) -> WorkerPool:
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

    async def _open(self, workers: WorkerPool) -> None:
        try:
            await run_job(workers, {"do": "open"})
        except WorkerTimeoutError:
            raise
        except WorkerError as error:  # the libraries trust their files; what they do with bad ones may end the process
            raise corrupt(self._folder, f"the process that opened it died ({error})") from error

    async def aclose(self) -> None:
        """Stop the search processes. Searches that are under way end with an error. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            await opened.workers.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for each stage that changes what is best; a `CutShort` if a later stage takes too long.

        :raises ConfigurationError: the source is not started.
        :raises WorkerError: a worker died; the next query has another.
        :raises SourceError: the search failed, or a new worker found that the index has been replaced meanwhile.
        """
        if not self._opened:
            raise ConfigurationError(f"{self.name} is not started: use it in a Pipeline, or await its start() first")
        manifest, workers = self._opened.manifest, self._opened.workers
        stages = self._stages(manifest)
        k = min(self._k, manifest.num_passages)
        best: list[Hit] = []
        share = Share()
        for num_done, stage in enumerate(stages):  # one job each: the stages of other queries come in between
            job = {"do": "search", "query": query, "k": k, **self._job(stage, best, k)}
            try:
                answer = await run_job(workers, job, share)
            except WorkerTimeoutError:
                if not best:
                    raise
                progress = f"after {num_done} of {len(stages)} stages"
                yield CutShort(f"the search took longer than {JOB_TIMEOUT_S:g} s {progress}")
                return
            before = [each.number for each in best]
            fields = zip(answer["distances"], answer["ids"], answer["passages"], strict=True)
            best = self._merge(best, [Hit(*each) for each in fields], k)
            if [each.number for each in best] != before:
                chunks = (Chunk(**each.fields, score=1 - each.distance / 2) for each in best)
                yield Update(tuple(chunks), Hint(num_chunks=len(stages) - num_done - 1))
