"""Keyword search, then vectors, then a reranker as one source: each refines what is best so far."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.core import Chunk, CutShort, Hint, Progress, Skipped, Source, SourceEvent, Update
from streamrag.errors import ConfigurationError, IndexMismatchError, SourceError
from streamrag.retrieving import Retrieval
from streamrag.sources.embedder import embedder_of_index, find_embedder
from streamrag.sources.index_folder import KEYWORDS, Manifest, check_index, explain, said_kind, with_title
from streamrag.sources.options import check_whole
from streamrag.sources.search.ivf import NUM_STAGES, IvfSource
from streamrag.sources.search.keywords import require_stemmer
from streamrag.sources.search.refining import Failures, Pace, Refinement
from streamrag.sources.search.rerank import RerankerPlace, find_reranker
from streamrag.sources.search.sentences import Narrowing
from streamrag.sources.search.vector import VectorSource
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool
from streamrag.starting import start_all, started_once
from streamrag.support.messages import is_number, short
from streamrag.support.tasks import cancel_regardless

START_TIMEOUT_S = 300.0
"""Loading a reranker; a model may be downloaded."""

KEYWORD_TIMEOUT_S = 10.0
"""A keyword search takes about a millisecond, and in a worker that replaced another, a second."""

MAX_COMING = 16
"""Stages of the vector search that may be ahead of whoever reads."""

_Coming: TypeAlias = "asyncio.Queue[SourceEvent | Exception | None]"
"""Events of the vector search, its error if it has one, and None at its end."""


@dataclass(frozen=True, slots=True)
class _Opened:
    num_passages: int
    keywords: WorkerPool
    reranker: WorkerPool | None
    vectors: AsyncExitStack
    """What closes the vector search, once it is started."""


class HybridSource:
    """Searches an index made by `build_index` or `streamrag index build` by keywords and by vectors, and reranks.

    What is best so far is sent as an `Update` with the `k` best passages, whenever they or their order have changed:

    1. The keyword search (BM25) answers in about a millisecond.
    2. The vector search refines that by reciprocal rank fusion, each of its stages if it has several.
    3. The reranker scores the first `candidates` passages of the fused ranking, `batch_size` at a time, best first.

    Scores of a reranker cannot be compared with ranks, so what has been scored stands first, by its scores, and the
    rest follows as it was fused. What has been scored keeps its order for good: a later batch can only put passages in
    between, so the passages above the best newcomer stay as they are, and so does their KV. Scores of chunks are left
    out: those of the three would say nothing side by side.

    A part that fails or takes too long ends the source with a `CutShort`, which says what is missing, unless no other
    part has found anything. `Hint.num_chunks` counts the stages and batches still to come, and `Hint.end_s` is what
    they took lately, once that is known.

    index: the index's folder.
    k: passages to find; all of them if the index has fewer.
    reranker: "late-interaction", which compares the token embeddings of the index's embedder and needs nothing else; a
        path or name of a sentence-transformers `CrossEncoder`; or `module:function`, a function from the query and a
        list of texts to a list of numbers, larger for better. None stops after the fusion. It is imported or loaded.
    sentences: give the best so many sentences of the `k` best passages, as the reranker scores them, and not whole
        passages: for small models. Every update is narrowed so, the first as well, which takes it some tens of
        milliseconds; a passage's sentences are scored once.
    candidates: passages that each search contributes, and that are reranked. By default four times `k`, at least 20.
    batch_size: passages that are scored at once.
    rerank_timeout_s: how long reranking may take for a query, waiting for a worker included.
    rerank_device: where a cross-encoder or the embedder runs, in the words of torch: "cpu", "cuda".
    num_workers: processes that rerank, for all queries. Each holds the model. The keyword search and the vector search
        have a process each beside them.
    vectors: searches by vectors in place of `VectorSource(index, k=candidates, ladder=(4 * candidates,))`: one with a
        longer ladder or more workers, or a source of another kind that has the same passages. It is started and closed
        with this one.
    embedder: what the index was made with, if that is not the default; see `VectorSource`.

    :raises ConfigurationError: a value that cannot work.
    """

    name = "HybridSource"
    """Its name for errors and schedulers; give two sources that behave differently two names."""

    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        k: int = 5,
        reranker: str | None = None,
        sentences: int | None = None,
        candidates: int | None = None,
        batch_size: int = 4,
        rerank_timeout_s: float = 60.0,
        rerank_device: str = "cpu",
        num_workers: int = 1,
        vectors: Source | None = None,
        embedder: str | None = None,
    ) -> None:
        check_whole(self.name, "k", k, 1, 1 << 12)
        candidates = max(20, 4 * k) if candidates is None else candidates
        check_whole(self.name, "candidates", candidates, k, 1 << 12)
        check_whole(self.name, "batch_size", batch_size, 1, 1 << 12)
        check_whole(self.name, "num_workers", num_workers, 1, 32)
        if not is_number(rerank_timeout_s) or not 0 < rerank_timeout_s < inf:
            raise ConfigurationError(f"HybridSource: rerank_timeout_s={short(rerank_timeout_s)} must be over 0 seconds")
        if not isinstance(reranker, str | None) or not isinstance(rerank_device, str):
            raise ConfigurationError("HybridSource: reranker and rerank_device are names")
        if sentences is not None:
            check_whole(self.name, "sentences", sentences, 1, 1 << 12)
            if reranker is None:
                raise ConfigurationError("HybridSource: sentences are scored by a reranker: name one")
        if vectors is not None and (isinstance(vectors, type) or not callable(getattr(vectors, "stream", None))):
            raise ConfigurationError(f"HybridSource: vectors={short(vectors)} is no source")
        self._folder = Path(index).absolute()
        self._k = k
        self._candidates = candidates
        self._reranker = reranker
        self._sentences = sentences
        self._batch_size = batch_size
        self._rerank_timeout_s = rerank_timeout_s
        self._device = rerank_device
        self._num_workers = num_workers
        self._embedder = embedder
        self._num_stages: int | None = None
        """Of the vector search, at most; None where nobody knows."""
        if vectors is None:
            if said_kind(Path(index).absolute()) == "ivf":
                vectors, self._num_stages = IvfSource(index, k=candidates, embedder=embedder), NUM_STAGES
            else:
                self._num_stages = 1
                vectors = VectorSource(index, k=candidates, ladder=(4 * candidates,), embedder=embedder)
        self._vectors = vectors
        self._opened: _Opened | None = None
        self._loading: asyncio.Task[None] | None = None
        self._search_pace, self._batch_pace = Pace(), Pace()

    # ---------------------------------------------------------------------------------------------------- starting

    @started_once
    async def start(self, progress: Progress) -> None:
        """Check the index, load embedder and reranker (many seconds), open the index.

        :raises MissingDependencyError: a package is not installed.
        :raises IndexMissingError: there is no index.
        :raises IndexCorruptError: the index is damaged.
        :raises IndexMismatchError: it was made with another embedder, with an embedder that must be named, or by a
            version of streamrag that made no keyword index.
        :raises ConfigurationError: the embedder or the reranker cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
        manifest, manifest_sha256, place = await asyncio.to_thread(self._check)
        opened = _Opened(
            manifest.num_passages,
            self._keyword_pool(manifest, manifest_sha256),
            self._rerank_pool(place) if place else None,
            AsyncExitStack(),
        )
        starting = (self._start_pools(opened, progress), self._start_vectors(opened, progress))
        starts = [asyncio.create_task(each, name="hybrid source start") for each in starting]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await cancel_regardless(starts)
            await self._close(opened)
            raise
        self._opened = opened

    def _check(self) -> tuple[Manifest, str, RerankerPlace | None]:
        manifest, manifest_sha256 = check_index(self._folder)
        require_stemmer()
        if KEYWORDS not in manifest.files:
            raise IndexMismatchError(
                f"{self._folder} has no keyword index: it was made by an older streamrag. Build it again:  "
                f"streamrag index build FOLDER --out {self._folder} --force"
            )
        if self._reranker is None:
            return manifest, manifest_sha256, None
        named = self._embedder
        embedder = find_embedder(named) if named is not None else embedder_of_index(self._folder, manifest.embedder)
        return manifest, manifest_sha256, find_reranker(self._reranker, embedder)

    def _keyword_pool(self, manifest: Manifest, manifest_sha256: str) -> WorkerPool:
        options = {
            "folder": str(self._folder),
            "manifest_sha256": manifest_sha256,
            "num_passages": manifest.num_passages,
        }
        handler = "streamrag.sources.search.keywords:make_keyword_searcher"
        return WorkerPool(handler, options, size=1, name="keyword search worker")

    def _rerank_pool(self, place: RerankerPlace) -> WorkerPool:
        options = {"kind": place.kind, "location": place.location, "name": place.name, "device": self._device}
        handler = "streamrag.sources.search.rerank:make_reranker"
        return WorkerPool(handler, options, size=self._num_workers, name="reranking worker", env=place.env)

    async def _start_pools(self, opened: _Opened, progress: Progress) -> None:
        progress("opening the keyword index")
        await opened.keywords.start()
        await _run(opened.keywords, {"do": "open"}, timeout_s=START_TIMEOUT_S)
        if opened.reranker:
            progress(f"loading the reranker {self._reranker}")
            await opened.reranker.start()
            await self._load(opened.reranker)

    async def _start_vectors(self, opened: _Opened, progress: Progress) -> None:
        opened.vectors.push_async_callback((await start_all([self._vectors], progress)).aclose)

    async def _load(self, workers: WorkerPool) -> None:
        """One job for each worker: those that have loaded the model answer at once."""
        loads = (_run(workers, {"do": "load"}, timeout_s=START_TIMEOUT_S) for _ in range(self._num_workers))
        for result in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _load_again(self, workers: WorkerPool) -> None:
        """For a worker that was replaced: no query whose time runs out while the model is loaded stops that again."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(workers), name="hybrid source load")
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def aclose(self) -> None:
        """Stop the workers. Searches that are under way end with an error. Does nothing when not started."""
        opened, self._opened, self.is_started = self._opened, None, False
        if opened:
            await self._close(opened)

    async def _close(self, opened: _Opened) -> None:
        if self._loading:
            await cancel_regardless([self._loading])
        closing = [part.aclose() for part in (opened.keywords, opened.reranker, opened.vectors) if part]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    # --------------------------------------------------------------------------------------------------- searching

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """An `Update` whenever the best passages or their order change; a `CutShort` if a part fails or is too slow.

        :raises ConfigurationError: the source is not started.
        :raises SourceError: a part failed, and no other found anything.
        """
        if not self._opened:
            raise ConfigurationError("HybridSource is not started: use it in a Pipeline, or await its start() first")
        opened = self._opened
        failures = Failures(lambda: self._opened is opened)
        async with aclosing(self._passages(opened, query, failures)) as events:
            if self._sentences and opened.reranker:
                events = self._narrowing(opened.reranker, self._sentences, query).narrowed(events, failures)
            async with aclosing(events):
                async for event in events:
                    yield event
        if failures.missing:
            yield CutShort("; ".join(failures.missing))

    def _narrowing(self, workers: WorkerPool, num_sentences: int, query: str) -> Narrowing:
        share = Share()

        async def score(texts: list[str]) -> list[float]:
            try:
                return await self._score(workers, query, texts, share, _now() + self._rerank_timeout_s)
            except SourceError:
                self._load_again(workers)
                raise

        return Narrowing(num_sentences, score)

    async def _passages(self, opened: _Opened, query: str, failures: Failures) -> AsyncGenerator[SourceEvent, None]:
        refinement = Refinement(self._k)
        num_batches = ceil(min(self._candidates, opened.num_passages) / self._batch_size) if opened.reranker else 0
        coming: _Coming = asyncio.Queue(MAX_COMING)
        began_s = _now()
        pulling = asyncio.create_task(self._pull(query, coming), name="hybrid source vectors")
        try:
            with failures.noted("the keyword search"):
                found = await self._by_keywords(opened.keywords, query)
                refinement.rank("keywords", found)
            if refinement.best:
                yield Update(refinement.best, self._hint(self._num_stages, began_s, num_batches))
            while (came := await coming.get()) is not None:
                if isinstance(came, Skipped):
                    yield came
                elif isinstance(came, CutShort):
                    failures.missing.append(came.reason)
                elif isinstance(came, Exception):
                    with failures.noted("the vector search"):
                        raise came
                else:
                    before = () if isinstance(came, Update) else refinement.rankings.get("vectors", ())
                    after = came.chunks if isinstance(came, Update) else (came.chunk,)
                    num_stages = (came.hint and came.hint.num_chunks) or 0
                    if refinement.rank("vectors", (*before, *after)):
                        yield Update(refinement.best, self._hint(num_stages, began_s, num_batches))
            self._search_pace.note(_now() - began_s)
            if opened.reranker and refinement.best:
                async with aclosing(self._rerank(opened.reranker, refinement, query, failures)) as updates:
                    async for update in updates:
                        yield update
        finally:
            await cancel_regardless([pulling])
        if failures.errors and not refinement.best:
            raise failures.errors[0]

    async def _by_keywords(self, workers: WorkerPool, query: str) -> tuple[Chunk, ...]:
        job = {"do": "search", "query": query, "k": self._candidates}
        found = await _run(workers, job, timeout_s=KEYWORD_TIMEOUT_S, share=Share())
        return tuple(Chunk(**fields) for fields in found["passages"])

    async def _pull(self, query: str, coming: _Coming) -> None:
        end: Exception | None = None
        try:
            async with aclosing(Retrieval(self._vectors, query).events()) as events:
                async for event in events:
                    await coming.put(event)
        except Exception as error:  # raised again, or told, where the events are read
            end = error
        if end:
            await coming.put(end)
        await coming.put(None)

    async def _rerank(
        self, workers: WorkerPool, refinement: Refinement, query: str, failures: Failures
    ) -> AsyncGenerator[Update, None]:
        """An update for each batch that changes what is best. One job a batch: those of other queries come between."""
        candidates = refinement.fused[: self._candidates]
        batches = [candidates[i : i + self._batch_size] for i in range(0, len(candidates), self._batch_size)]
        share, end_s = Share(), _now() + self._rerank_timeout_s
        for number, batch in enumerate(batches):
            began_s = _now()
            texts = [with_title(chunk.title, chunk.text) for chunk in batch]
            scores = None
            with failures.noted(f"reranking, after {number} of {len(batches)} batches,"):
                scores = await self._score(workers, query, texts, share, end_s)
            if scores is None:
                self._load_again(workers)
                return
            self._batch_pace.note(_now() - began_s)
            if refinement.score(batch, scores):
                yield Update(refinement.best, self._hint(0, began_s, len(batches) - number - 1))

    async def _score(
        self, workers: WorkerPool, query: str, texts: list[str], share: Share, end_s: float
    ) -> list[float]:
        try:
            async with asyncio.timeout_at(end_s):
                result = await _run(workers, {"do": "score", "query": query, "texts": texts}, share=share)
        except TimeoutError:
            raise SourceError(f"it took longer than {self._rerank_timeout_s:g} s") from None
        scores: list[float] = result["scores"]
        return scores

    def _hint(self, num_stages: int | None, began_s: float, num_batches: int) -> Hint:
        num_chunks = None if num_stages is None else num_stages + num_batches
        search_s = max(0.0, self._search_pace.mean_s - (_now() - began_s)) if num_stages != 0 else 0.0
        batches_s = num_batches * self._batch_pace.mean_s if num_batches else 0.0
        end_s = search_s + batches_s
        return Hint(num_chunks=num_chunks, end_s=end_s if end_s < inf else None)


async def _run(
    workers: WorkerPool, job: Mapping[str, Any], *, timeout_s: float | None = None, share: Share | None = None
) -> dict[str, Any]:
    """A worker's answer. For a query, which has a share, whatever is wrong is a failed retrieval."""
    try:
        return await workers.run(job, timeout_s=timeout_s, share=share)
    except WorkerJobError as error:
        explained = explain(error, f"{workers.name} failed")
        raise SourceError(str(explained)) if share else explained from error


def _now() -> float:
    return asyncio.get_running_loop().time()
