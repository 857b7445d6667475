"""Rerankers in worker processes. They score a passage by reading it together with the query."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from streamrag.core import Progress
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.index.embedder import (
    FUNCTION,
    NUM_CACHED_QUERIES,
    ModelPlace,
    find_model,
    load_function,
    load_model,
)
from streamrag.sources.index.worker_jobs import JobHandler, new_pool, run_in_each, run_job, start_and_load
from streamrag.sources.workers.pool import Share
from streamrag.support.bounded_reading import without_lone_surrogates
from streamrag.support.messages import message_of
from streamrag.support.tasks import cancel_and_wait

LATE_INTERACTION = "late-interaction"
ScorePassages: TypeAlias = Callable[[str, list[str]], Sequence[float]]
"""A function of a query and passages that returns a score for each; larger is better."""


class TooSlowError(SourceError):
    """Reranking took longer than its timeout."""


@dataclass(frozen=True)
class RerankerPlace(ModelPlace):
    """The place from which a worker loads a reranker."""

    kind: str


def find_reranker(reranker: str, embedder: ModelPlace) -> RerankerPlace:
    """Return where the reranker of this name is, and its kind; "late-interaction" has the place of the embedder.

    :raises ConfigurationError: there is no such reranker, or `embedder` has no token embeddings.
    :raises MissingDependencyError: a package is not installed.
    """
    place, kind = find_model("reranker", reranker), "cross-encoder"
    if reranker == LATE_INTERACTION:
        if FUNCTION.fullmatch(embedder.location):
            raise ConfigurationError(
                f"reranker={reranker!r} compares token embeddings, and embedder={embedder.name!r} is a function, which "
                "gives none: name a cross-encoder instead"
            )
        place, kind = embedder, LATE_INTERACTION
    elif FUNCTION.fullmatch(place.location):
        kind = "function"
    return RerankerPlace(reranker, place.location, place.env, kind)


class RerankerPool:
    """A pool of processes that rerank, each with its own model.

    timeout_s: most seconds that reranking may take for one query, including the wait for a worker.
    """

    def __init__(self, place: RerankerPlace, *, size: int, timeout_s: float) -> None:
        handler = RerankerHandler(place.kind, place.location, place.name)
        self.workers = new_pool(handler, size=size, name="reranking worker", env=place.env)
        self._name = place.name
        self._timeout_s = timeout_s
        self.loading: asyncio.Task[object] | None = None

    async def start(self, progress: Progress) -> None:
        """Load the reranker in each worker, which may download a model.

        :raises ConfigurationError: it cannot be loaded.
        :raises WorkerError: a worker cannot start.
        """
        progress(f"loading the reranker {self._name}")
        await start_and_load(self.workers)

    async def aclose(self) -> None:
        """Stop the workers, even while they load the reranker."""
        if self.loading:
            await cancel_and_wait([self.loading])
        await self.workers.aclose()

    def scorer(self, query: str, *, is_one_deadline: bool = False) -> Callable[[list[str]], Awaitable[list[float]]]:
        """Return an async function that scores texts for the query; larger is better.

        The function raises SourceError if reranking fails, and TooSlowError on timeout. The timeout applies to each
        call, or with `is_one_deadline` to all calls together, counted from now.
        """
        share, began_s = Share(), loop_time()

        async def score(texts: list[str]) -> list[float]:
            return await self._score(
                query, texts, share, (began_s if is_one_deadline else loop_time()) + self._timeout_s
            )

        return score

    async def _score(self, query: str, texts: list[str], share: Share, end_s: float) -> list[float]:
        """Return a worker's scores, or raise TooSlowError at `end_s`. A failure reloads the model in the background."""
        try:
            async with asyncio.timeout_at(end_s):
                job = {"do": "score", "query": query, "texts": texts}
                scores: list[float] = (await run_job(self.workers, job, share, timeout_s=None))["scores"]
                return scores
        except TimeoutError:
            self._load_again()
            raise TooSlowError(f"it took longer than {self._timeout_s:g} s") from None
        except SourceError:
            self._load_again()
            raise

    def _load_again(self) -> None:
        """Load the model of a replaced worker in the background, where no query's timeout can cancel it."""
        if self.loading is None or self.loading.done():
            self.loading = asyncio.create_task(run_in_each(self.workers, {"do": "load"}), name="load a reranker")
            self.loading.add_done_callback(lambda task: task.cancelled() or task.exception())


def loop_time() -> float:
    """Return the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


def _cross_encoder(location: str) -> ScorePassages:
    """Load a cross-encoder, and return a function that scores all texts in one batch."""
    model = load_model("reranker", location, num_threads=1, device="cpu")

    def score(query: str, texts: list[str]) -> Sequence[float]:
        pairs = [(query, text) for text in texts]
        scores: Sequence[float] = model.predict(pairs, batch_size=len(pairs), show_progress_bar=False).tolist()
        return scores

    return score


def _late_interaction(location: str) -> ScorePassages:
    """Return a function whose score is the mean, over the query's tokens, of the similarity to the passage's most
    similar token; 0 for a query without tokens, -1 for a passage without.

    Source: Khattab and Zaharia, "ColBERT", SIGIR 2020. ColBERT trains token embeddings for this; here they are those
    of a model for whole texts.
    """
    model = load_model("embedder", location, num_threads=1, device="cpu")
    import torch

    special = torch.tensor(model.tokenizer.all_special_ids)

    def tokens(encode: Callable[..., Any], texts: list[str]) -> list[Any]:
        """Return (tokens, dimension) for each text, rows of length 1, without special tokens such as [CLS]."""
        outputs = encode(texts, output_value=None, batch_size=len(texts), show_progress_bar=False)
        embeddings = [output["token_embeddings"][_is_text(output, special)] for output in outputs]
        return [torch.nn.functional.normalize(rows.float(), dim=-1) for rows in embeddings]

    @lru_cache(NUM_CACHED_QUERIES)
    def query_tokens(query: str) -> Any:
        return tokens(model.encode_query, [query])[0]

    def score(query: str, texts: list[str]) -> Sequence[float]:
        query_rows = query_tokens(query)
        if not len(query_rows):
            return [0.0] * len(texts)
        passages = tokens(model.encode_document, texts)
        return [(query_rows @ rows.T).amax(1).mean().item() if len(rows) else -1.0 for rows in passages]

    return score


def _is_text(output: dict[str, Any], special: Any) -> Any:
    """Return a mask of the tokens that are neither padding nor special."""
    import torch

    return output["attention_mask"].bool() & ~torch.isin(output["input_ids"], special)


_KINDS: dict[str, Callable[[str], ScorePassages]] = {
    "function": load_function,
    "cross-encoder": _cross_encoder,
    LATE_INTERACTION: _late_interaction,
}


@dataclass
class RerankerHandler(JobHandler):
    """A handler that scores passages for a `RerankerPool`."""

    kind: str
    location: str
    reranker: str

    def load(self) -> dict[str, Any]:
        """Load the model, and score two passages to detect one of the wrong kind, such as one with three classes."""
        return self.score("What is this?", ["This is a passage.", "And another one."])

    def score(self, query: str, texts: list[str]) -> dict[str, Any]:
        """Return `scores`, a finite number for each text, larger for better; ConfigurationError for anything else."""
        score = self._score
        try:
            values = score(without_lone_surrogates(query), [without_lone_surrogates(text) for text in texts])
            scores = [float(value) for value in values]
        except Exception as error:  # the caller's model or code may raise anything
            raise self._error(f"failed: {type(error).__name__}: {message_of(error)}") from error
        if len(scores) != len(texts) or not all(map(math.isfinite, scores)):
            raise self._error(f"gave {str(scores)[:100]} for {len(texts)} passages; it must give a finite number each")
        return {"scores": scores}

    @cached_property
    def _score(self) -> ScorePassages:
        """The function that scores, loaded at first use. Raises ConfigurationError if it cannot be loaded."""
        try:
            return _KINDS[self.kind](self.location)
        except Exception as error:  # the caller's files or code may raise anything
            raise self._error(f"cannot be loaded: {type(error).__name__}: {message_of(error)}") from error

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"reranker={self.reranker!r} {problem}")
