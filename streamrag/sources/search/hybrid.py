"""A source that combines keyword search, vector search and a reranker, and refines its results step by step."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field

from streamrag.core import Chunk, CutShort, Hint, Progress, Skipped, Source, SourceEvent, Update
from streamrag.core.lifecycle import start_all, started_once
from streamrag.core.retrieval import Retrieval
from streamrag.errors import ConfigurationError
from streamrag.sources.index.embedder import check_model_name, embedder_of_index
from streamrag.sources.index.index_folder import Manifest, check_index, kind_in_manifest, with_title
from streamrag.sources.index.keywords import KeywordSearcher
from streamrag.sources.index.packages import require_package
from streamrag.sources.index.worker_jobs import NumWorkers, new_pool, run_job, start_and_load
from streamrag.sources.search.refinement import Failures, MeanDuration, Refinement
from streamrag.sources.search.reranker import RerankerPlace, RerankerPool, find_reranker, loop_time
from streamrag.sources.search.sentences import BestSentences
from streamrag.sources.search.vector import NUM_STAGES, IvfSource, VectorSource
from streamrag.sources.workers.pool import Share, WorkerPool
from streamrag.support.messages import short_repr
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Count, Seconds, validated

KEYWORD_TIMEOUT_S = 10.0  # a keyword search takes about a millisecond, or a second in a worker that replaced another
MAX_WAITING_EVENTS = 16  # bound of the queue of the vector search's events
_Events: TypeAlias = "asyncio.Queue[SourceEvent | Exception | None]"
"""Events of the vector search, its error if it fails, and None at its end."""
_AtMost4096 = Annotated[Count, Field(le=1 << 12)]


@dataclass(frozen=True, slots=True)
class _Opened:
    num_passages: int
    keywords: WorkerPool
    reranker: RerankerPool | None
    parts: AsyncExitStack
    """Closes the three searches."""


@dataclass(frozen=True, slots=True)
class _KeywordSearch:
    workers: WorkerPool

    async def start(self, progress: Progress) -> None:
        progress("opening the keyword index")
        await start_and_load(self.workers)

    async def aclose(self) -> None:
        await self.workers.aclose()


class HybridSource:
    """A search of an index made by `build_index` or `streamrag index build`: by keywords, by vectors, then reranked.

    Whenever the `k` best passages or their order change, an `Update` has all of them:

    1. The keyword search (BM25) answers in about a millisecond.
    2. Each stage of the vector search refines the result by reciprocal rank fusion.
    3. The reranker scores the first `candidates` passages of the fused ranking, `batch_size` at a time, best first.

    A reranker's scores cannot be compared with ranks, so scored passages come first, by score, and the others follow in
    fused order. Scored passages keep their relative order: a later batch only inserts passages, so the passages above
    the best newcomer keep their place and their KV. Chunks have no `score`, because the three kinds of scores are not
    comparable.

    If a part fails or takes too long, the source ends with a `CutShort` that names the part; it fails only if no other
    part has found anything. `Hint.num_chunks` counts the remaining stages and batches, and `Hint.end_s` estimates their
    duration from recent queries.

    index: the index's folder.
    k: number of passages to find; all of them if the index has fewer.
    reranker: "late-interaction", which compares the token embeddings of the index's embedder and needs no other model;
        the path or name of a sentence-transformers `CrossEncoder`; or `module:function`, a function from the query and
        a list of texts to a list of numbers, larger for better. It is imported or loaded. None stops after the fusion.
    sentences: return this number of best sentences of the `k` best passages, as scored by the reranker, instead of
        whole passages; for small models. It delays the first update by some tens of milliseconds.
    candidates: number of passages that are reranked, by default 2 * `k`, at least 20. Each search contributes as many,
        and at least 4 * `k` and 40.
    batch_size: number of passages in one reranking job.
    rerank_timeout_s: most seconds that reranking may take for a query, including the wait for a worker.
    num_workers: number of reranking processes for all queries, each with its own model, on the CPU. The keyword search
        and the vector search have one process each.
    vectors: a source for the vector search, in place of a `VectorSource` with one stage: one with a longer ladder or
        more workers, or another source with the same passages. It is started and closed with this one.
    embedder: the embedder of the index, if it is not the default; see `VectorSource`.

    :raises ConfigurationError: an option is invalid.
    """

    name = "HybridSource"
    """Name for errors and schedulers; give sources that behave differently different names."""

    @validated
    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: _AtMost4096 = 10,
        reranker: str | None = None,
        sentences: _AtMost4096 | None = None,
        candidates: _AtMost4096 | None = None,
        batch_size: _AtMost4096 = 4,
        rerank_timeout_s: Seconds = 60.0,
        num_workers: NumWorkers = 1,
        vectors: Source | None = None,
        embedder: str | None = None,
    ) -> None:
        self._folder = Path(index).absolute()
        self._k = k
        self._depth = max(40, 4 * k, candidates or 0)
        self._candidates = candidates or max(20, 2 * k)
        if self._candidates < k:
            raise ConfigurationError(f"candidates={candidates} must be at least k={k}")
        if sentences is not None and reranker is None:
            raise ConfigurationError("sentences need a reranker to score them: name one")
        if vectors is not None and (isinstance(vectors, type) or not callable(getattr(vectors, "stream", None))):
            raise ConfigurationError(f"vectors={short_repr(vectors)} is no source")
        if reranker is not None:
            check_model_name("reranker", reranker)
        self._reranker = reranker
        self._sentences = sentences
        self._batch_size = batch_size
        self._new_reranker = partial(RerankerPool, size=num_workers, timeout_s=rerank_timeout_s)
        self._embedder = embedder
        self._vectors, self._num_stages = self._own_vectors() if vectors is None else (vectors, None)
        self._opened: _Opened | None = None
        self._search_duration, self._batch_duration = MeanDuration(), MeanDuration()

    def _own_vectors(self) -> tuple[Source, int | None]:
        """Return the vector search for the index's kind, and the most stages that it has."""
        k = self._depth
        if kind_in_manifest(self._folder) == "ivf":
            return IvfSource(self._folder, k=k, embedder=self._embedder), NUM_STAGES
        return VectorSource(self._folder, k=k, ladder=(4 * k,), embedder=self._embedder), 1

    @started_once
    async def start(self, progress: Progress) -> None:
        """Check the index, then start keyword search, vector source and reranker together, which takes many seconds.

        If one fails, all are closed.

        :raises AlreadyStartedError: the source is started.
        :raises MissingDependencyError: a package is not installed.
        :raises IndexMissingError: there is no index.
        :raises IndexCorruptError: the index is damaged.
        :raises IndexMismatchError: another embedder made it, or one that must be named.
        :raises ConfigurationError: the embedder or the reranker cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
        manifest, manifest_sha256, place = await asyncio.to_thread(self._check)
        searcher = KeywordSearcher(str(self._folder), manifest_sha256, manifest.num_passages)
        keywords = new_pool(searcher, size=1, name="keyword search worker")
        reranker = self._new_reranker(place) if place else None
        parts = await start_all([_KeywordSearch(keywords), reranker, self._vectors], progress)
        self._opened = _Opened(manifest.num_passages, keywords, reranker, parts)

    def _check(self) -> tuple[Manifest, str, RerankerPlace | None]:
        """Check index and packages, or raise as `start`; return manifest, its hash and the reranker's place, if any."""
        manifest, manifest_sha256 = check_index(self._folder)
        require_package("snowballstemmer")
        if self._reranker is None:
            return manifest, manifest_sha256, None
        embedder = embedder_of_index(self._folder, manifest.embedder, self._embedder)
        return manifest, manifest_sha256, find_reranker(self._reranker, embedder)

    async def aclose(self) -> None:
        """Stop the search processes. Running searches fail. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            await opened.parts.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` whenever the best passages or their order change; at the end a `CutShort` if a part failed.

        With `sentences`, updates have the best sentences of the passages instead. Each `Skipped` of the vectors is
        yielded too.

        :raises ConfigurationError: the source is not started.
        :raises SourceError: a part failed, and no other part found anything or the source was closed meanwhile.
        """
        if not self._opened:
            raise ConfigurationError("HybridSource is not started: use it in a Pipeline, or await its start() first")
        opened = self._opened
        failures = Failures(lambda: self._opened is opened)
        async with aclosing(self._passages(opened, query, failures)) as events:
            if self._sentences and opened.reranker:
                selection = BestSentences(self._sentences, opened.reranker.scorer(query))
                events = selection.select_in_events(events, failures)
            async with aclosing(events):
                async for event in events:
                    yield event
        if failures.missing:
            yield CutShort("; ".join(failures.missing))

    async def _passages(self, opened: _Opened, query: str, failures: Failures) -> AsyncGenerator[SourceEvent, None]:
        """Yield the updates of keyword search, vector search and reranker, in this order, and each Skipped.

        Each part that fails is recorded in `failures`; at the end, the first error is raised if no part found anything.
        """
        refinement = Refinement(self._k)
        num_batches = ceil(min(self._candidates, opened.num_passages) / self._batch_size) if opened.reranker else 0
        queue: _Events = asyncio.Queue(MAX_WAITING_EVENTS)
        began_s = loop_time()
        vector_task = asyncio.create_task(self._pull(query, queue), name="hybrid source vectors")
        try:
            with failures.record("the keyword search"):
                refinement.rank("keywords", await self._by_keywords(opened.keywords, query))
            if refinement.best:
                yield Update(refinement.best, self._hint(self._num_stages, began_s, num_batches))
            while (event := await queue.get()) is not None:
                if isinstance(event, Skipped):
                    yield event
                elif (num_stages := _apply(event, refinement, failures)) is not None:
                    yield Update(refinement.best, self._hint(num_stages, began_s, num_batches))
            self._search_duration.add(loop_time() - began_s)
            if opened.reranker and refinement.best:
                async with aclosing(self._rerank(opened.reranker, refinement, query, failures)) as updates:
                    async for update in updates:
                        yield update
        finally:
            await cancel_and_wait([vector_task])
        if failures.errors and not refinement.best:
            raise failures.errors[0]

    async def _by_keywords(self, workers: WorkerPool, query: str) -> tuple[Chunk, ...]:
        job = {"do": "search", "query": query, "k": self._depth}
        answer = await run_job(workers, job, Share(), timeout_s=KEYWORD_TIMEOUT_S)
        return tuple(Chunk(**fields) for fields in answer["passages"])

    async def _pull(self, query: str, queue: _Events) -> None:
        """Put the events of the vector search into the queue, then its error, if any, then None."""
        try:
            async with aclosing(Retrieval(self._vectors, query).events()) as events:
                async for event in events:
                    await queue.put(event)
        except Exception as error:  # handled by the reader of the queue
            await queue.put(error)
        await queue.put(None)

    async def _rerank(
        self, reranker: RerankerPool, refinement: Refinement, query: str, failures: Failures
    ) -> AsyncGenerator[Update, None]:
        """Yield an update for each batch that changes the best passages. Each batch is one job; all share one deadline.

        A batch that fails is recorded in `failures`, and ends the reranking.
        """
        candidates = refinement.fused[: self._candidates]
        batches = [candidates[i : i + self._batch_size] for i in range(0, len(candidates), self._batch_size)]
        score = reranker.scorer(query, is_one_deadline=True)
        for number, batch in enumerate(batches):
            began_s = loop_time()
            scores = None
            with failures.record(f"reranking, after {number} of {len(batches)} batches,"):
                texts = [with_title(chunk.title, chunk.text) for chunk in batch]
                scores = await score(texts)
            if scores is None:
                return
            self._batch_duration.add(loop_time() - began_s)
            if refinement.score(batch, scores):
                yield Update(refinement.best, self._hint(0, began_s, len(batches) - number - 1))

    def _hint(self, num_stages: int | None, began_s: float, num_batches: int) -> Hint:
        """Return a hint of the remaining stages and batches, and of their duration by recent queries, where known."""
        num_chunks = None if num_stages is None else num_stages + num_batches
        search_s = max(0.0, self._search_duration.mean_s - (loop_time() - began_s)) if num_stages != 0 else 0.0
        batches_s = num_batches * self._batch_duration.mean_s if num_batches else 0.0
        end_s = search_s + batches_s
        return Hint(num_chunks=num_chunks, end_s=end_s if end_s < inf else None)


def _apply(event: SourceEvent | Exception, refinement: Refinement, failures: Failures) -> int | None:
    """Rank the chunks of an event of the vector search, or record its error or `CutShort`.

    Return the remaining stages by its hint, 0 if unknown; None if `best` did not change.
    """
    if isinstance(event, CutShort):
        failures.missing.append(event.reason)
        return None
    if isinstance(event, Exception):
        with failures.record("the vector search"):
            raise event
        return None
    assert not isinstance(event, Skipped)
    before = () if isinstance(event, Update) else refinement.rankings.get("vectors", ())
    after = event.chunks if isinstance(event, Update) else (event.chunk,)
    if not refinement.rank("vectors", (*before, *after)):
        return None
    return (event.hint and event.hint.num_chunks) or 0
