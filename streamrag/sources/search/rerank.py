"""Rerankers: what scores passages for a query by reading both, slowly.

`find_reranker` runs in the caller's process and imports nothing heavy; the rest in workers only.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.sources.embedder import FUNCTION, NUM_CACHED_QUERIES, EmbedderPlace
from streamrag.support.bounded_reading import without_lone_surrogates
from streamrag.support.messages import message_of

if TYPE_CHECKING:
    from streamrag.sources.workers.worker_main import Handler

LATE_INTERACTION = "late-interaction"

Score: TypeAlias = Callable[[str, list[str]], Sequence[float]]
"""A query and passages to one score for each; larger is better."""


@dataclass(frozen=True, slots=True)
class RerankerPlace:
    """Where a worker loads a reranker from."""

    name: str
    """As the caller named it, for messages."""
    kind: str
    location: str
    env: dict[str, str]
    """For the worker's environment."""


def find_reranker(reranker: str, embedder: EmbedderPlace) -> RerankerPlace:
    """Where the reranker of this name is. The name is the caller's own word: it may import code, and download.

    :raises ConfigurationError: a path at which there is nothing, or an embedder that has no token embeddings.
    :raises MissingDependencyError: it needs a package that is not installed.
    """
    path = Path(reranker).expanduser()
    if not reranker:
        raise ConfigurationError(
            f"reranker='' names nothing: name a cross-encoder, module:function, or {LATE_INTERACTION!r}"
        )
    if FUNCTION.fullmatch(reranker) and not path.exists():
        return RerankerPlace(reranker, "function", reranker, {})
    if not find_spec("sentence_transformers"):
        raise MissingDependencyError("sentence-transformers", "pip install 'streamrag[embed]'")
    if reranker == LATE_INTERACTION:
        if FUNCTION.fullmatch(embedder.location):
            raise ConfigurationError(
                f"reranker={reranker!r} compares token embeddings, and embedder={embedder.name!r} is a function, which "
                "gives none: name a cross-encoder instead"
            )
        return RerankerPlace(reranker, LATE_INTERACTION, embedder.location, embedder.env)
    if path.is_dir():
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return RerankerPlace(reranker, "cross-encoder", str(path.resolve()), env)
    if reranker.startswith(("/", "./", "../", "~")):
        raise ConfigurationError(f"reranker={reranker!r}: there is no such folder. Name a sentence-transformers model")
    return RerankerPlace(reranker, "cross-encoder", reranker, {"TOKENIZERS_PARALLELISM": "false"})


# --------------------------------------------------------------------------------------------------- in the workers


def _function(location: str, device: str) -> Score:
    module, _, name = location.partition(":")
    function: Score = getattr(importlib.import_module(module), name)
    return function


def _cross_encoder(location: str, device: str) -> Score:
    import torch
    from sentence_transformers import CrossEncoder

    torch.set_num_threads(1)
    model = CrossEncoder(location, device=device)

    def score(query: str, texts: list[str]) -> Sequence[float]:
        pairs = [(query, text) for text in texts]
        scores: Sequence[float] = model.predict(pairs, batch_size=len(pairs), show_progress_bar=False).tolist()
        return scores

    return score


def _late_interaction(location: str, device: str) -> Score:
    """For each token of the query the most similar token of the passage; the mean of those similarities.

    Source: Khattab and Zaharia, "ColBERT", SIGIR 2020. Theirs are embeddings trained for it; these are whatever a model
    for whole texts has inside.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(location, device=device)
    special = torch.tensor(model.tokenizer.all_special_ids)

    def tokens(encode: Callable[..., Any], texts: list[str]) -> list[Any]:
        """For each text (its number of tokens, dimension), rows of length 1, without [CLS] and the like."""
        made = encode(texts, output_value=None, batch_size=len(texts), show_progress_bar=False)
        kept = [row["token_embeddings"][_is_text(row, special)] for row in made]
        return [torch.nn.functional.normalize(rows.float().cpu(), dim=-1) for rows in kept]

    @lru_cache(NUM_CACHED_QUERIES)
    def query_tokens(query: str) -> Any:
        return tokens(model.encode_query, [query])[0]

    def score(query: str, texts: list[str]) -> Sequence[float]:
        wanted = query_tokens(query)
        if not len(wanted):
            return [0.0] * len(texts)
        passages = tokens(model.encode_document, texts)
        return [(wanted @ rows.T).amax(1).mean().item() if len(rows) else -1.0 for rows in passages]

    return score


def _is_text(row: dict[str, Any], special: Any) -> Any:
    import torch

    ids = row["input_ids"].cpu()
    return (row["attention_mask"].cpu().bool() & ~torch.isin(ids, special)).to(row["token_embeddings"].device)


_KINDS: dict[str, Callable[[str, str], Score]] = {
    "function": _function,
    "cross-encoder": _cross_encoder,
    LATE_INTERACTION: _late_interaction,
}


class _Reranker:
    def __init__(self, *, kind: str, location: str, name: str, device: str) -> None:
        self._kind, self._location, self._name, self._device = kind, location, name, device
        self._score: Score | None = None

    def handle(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`load` may be left out: a worker that replaces another starts at `score`."""
        match header:
            case {"do": "load"}:  # a model of another kind, as one with three classes, is found here
                return self._scores("What is this?", ["This is a passage.", "And another one."])
            case {"do": "score", "query": query, "texts": texts}:
                return self._scores(query, texts)
        raise AssertionError(header)

    def _scores(self, query: str, texts: list[str]) -> dict[str, Any]:
        score = self._score = self._score or self._load()
        try:
            found = score(without_lone_surrogates(query), [without_lone_surrogates(text) for text in texts])
            scores = [float(each) for each in found]
        except Exception as error:  # anybody's model or code
            raise self._error(f"failed: {type(error).__name__}: {message_of(error)}") from error
        if len(scores) != len(texts) or not all(map(math.isfinite, scores)):
            raise self._error(f"gave {str(scores)[:100]} for {len(texts)} passages; it must give a finite number each")
        return {"scores": scores}

    def _load(self) -> Score:
        try:
            return _KINDS[self._kind](self._location, self._device)
        except Exception as error:  # anybody's files or code: whatever it raises, it cannot be loaded
            raise self._error(f"cannot be loaded: {type(error).__name__}: {message_of(error)}") from error

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"reranker={self._name!r} {what}")


def make_reranker(**options: Any) -> "Handler":
    """For `WorkerPool`. Nothing is loaded before the first job, so that its errors are errors of a job."""
    return _Reranker(**options).handle
