"""The base of sources that search an index in stages."""

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
from streamrag.sources.index.embedder import ModelPlace, check_model_name, embedder_of_index
from streamrag.sources.index.index_folder import IndexKind, Manifest, StoredPassage, check_index, corrupt
from streamrag.sources.index.index_searcher import IndexSearcher
from streamrag.sources.index.packages import LIBRARIES, require_package
from streamrag.sources.index.worker_jobs import JOB_TIMEOUT_S, new_pool, run_job, start_and_load
from streamrag.sources.workers.pool import Share, WorkerPool, WorkerTimeoutError
from streamrag.support.validation import Count

NumPassages = Annotated[Count, Field(le=1 << 16)]


@dataclass(frozen=True, slots=True)
class Hit:
    distance: float
    """Squared distance to the query."""
    number: int
    fields: StoredPassage


@dataclass(frozen=True, slots=True)
class _Opened:
    manifest: Manifest
    workers: WorkerPool


class IndexSource(ABC):
    """A source that searches an index in stages, in worker processes. Subclasses define the stages."""

    name: str
    _kind: ClassVar[IndexKind]
    _searcher: ClassVar[type[IndexSearcher]]

    def __init__(self, index: str | os.PathLike[str], *, k: int, num_workers: int, embedder: str | None) -> None:
        if embedder is not None:
            check_model_name("embedder", embedder)
        self._folder = Path(index).absolute()
        self._k = k
        self._num_workers = num_workers
        self._embedder = embedder
        self._opened: _Opened | None = None

    @abstractmethod
    def _stages(self, manifest: Manifest) -> Sequence[Mapping[str, Any]]:
        """Return the options of each stage's job."""

    def _job(self, stage: Mapping[str, Any], best: Sequence[Hit], k: int) -> Mapping[str, Any]:
        """Return the options of a stage's job, by default the stage's; they may depend on the results so far."""
        return stage

    @abstractmethod
    def _merge(self, best: Sequence[Hit], hits: Sequence[Hit], k: int) -> list[Hit]:
        """Return the best passages after a stage found `hits`."""

    @started_once
    async def start(self, progress: Progress) -> None:
        """Check and open the index, and load the embedder, which takes many seconds; if that fails, stop the workers.

        :raises AlreadyStartedError: the source is started.
        :raises MissingDependencyError: the index's library or the embedder's package is not installed.
        :raises IndexMissingError: there is no index.
        :raises IndexCorruptError: the index is damaged.
        :raises IndexMismatchError: it is of the other kind or another version; or another embedder made it, or one that
            must be named.
        :raises ConfigurationError: the embedder cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
        progress(f"checking the index {self._folder}")
        manifest, manifest_sha256, place = await asyncio.to_thread(self._check)
        model = place.location, place.name, manifest.dimension, manifest.probe
        searcher = self._searcher(str(self._folder), manifest_sha256, manifest.num_passages, *model)
        searcher.num_lists = manifest.num_lists or 0
        workers = new_pool(searcher, size=self._num_workers, name="index search worker", env=place.env)
        progress(f"loading the embedder {place.name}")
        await start_and_load(workers)
        try:
            progress(f"opening the index of {manifest.num_passages} passages")
            await self._open(workers)
        except BaseException:
            await workers.aclose()
            raise
        self._opened = _Opened(manifest, workers)
        progress("the index is ready")

    def _check(self) -> tuple[Manifest, str, ModelPlace]:
        """Check index and packages, or raise as `start`; return the manifest, its hash and the embedder's place."""
        manifest, manifest_sha256 = check_index(self._folder)
        if manifest.kind != self._kind:
            other = {"diskann": "VectorSource", "ivf": "IvfSource"}[manifest.kind]
            raise IndexMismatchError(f"{self._folder} is an index of kind {manifest.kind!r}: use {other}")
        require_package(LIBRARIES[self._kind])
        return manifest, manifest_sha256, embedder_of_index(self._folder, manifest.embedder, self._embedder)

    async def _open(self, workers: WorkerPool) -> None:
        """Open the index in one worker; raise IndexCorruptError if that kills the process."""
        try:
            await run_job(workers, {"do": "open"})
        except WorkerTimeoutError:
            raise
        except WorkerError as error:  # the libraries trust their files, and bad ones may crash the process
            raise corrupt(self._folder, f"the process that opened it died ({error})") from error

    async def aclose(self) -> None:
        """Stop the search processes. Running searches fail. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            await opened.workers.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for each stage that changes the best passages; end with a `CutShort` if one is too slow.

        :raises ConfigurationError: the source is not started.
        :raises WorkerError: a worker died, and the next query gets a new one; or a stage was too slow, and none found
            anything.
        :raises SourceError: the search failed, or a new worker found that the index was replaced.
        """
        if not self._opened:
            raise ConfigurationError(f"{self.name} is not started: use it in a Pipeline, or await its start() first")
        manifest, workers = self._opened.manifest, self._opened.workers
        stages = self._stages(manifest)
        k = min(self._k, manifest.num_passages)
        best: list[Hit] = []
        share = Share()
        for num_done, stage in enumerate(stages):  # a job for each, so that queries share the workers
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
