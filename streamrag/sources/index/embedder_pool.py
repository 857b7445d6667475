"""An embedder in worker processes, for sources whose vectors lie elsewhere."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrag.errors import IndexMismatchError
from streamrag.sources.index.embedder import Embedder, find_embedder, unlike
from streamrag.sources.index.index_folder import explain
from streamrag.sources.workers.pool import Share, WorkerJobError, WorkerPool

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors
    from streamrag.sources.workers.worker_main import Handler

JOB_TIMEOUT_S = 300.0
"""A query takes milliseconds; in a worker that replaced another, loading the embedder comes before it."""

MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an embedder is, whatever it is called."""

    name: str
    dimension: int
    probe: tuple[float, ...]
    """The first numbers of what it makes of one sentence."""


class EmbeddingPool:
    """Processes that embed, each with an embedder of its own.

    made_with: what the vectors to search were made with; a worker with another embedder answers with an error.

    :raises ConfigurationError: the embedder names nothing.
    :raises MissingDependencyError: it needs a package that is not installed.
    """

    def __init__(self, embedder: str, *, size: int, num_threads: int = 1, made_with: Loaded | None = None) -> None:
        place = find_embedder(embedder)
        self._name = place.name
        options = {
            "location": place.location,
            "embedder": place.name,
            "num_threads": num_threads,
            "dimension": made_with.dimension if made_with else None,
            "probe": made_with.probe if made_with else None,
        }
        handler = "streamrag.sources.index.embedder_pool:make_embedding"
        self.workers = WorkerPool(handler, options, size=size, name="embedding worker", env=place.env)

    async def start(self) -> Loaded:
        """Load the embedder in each worker, which takes many seconds.

        :raises ConfigurationError: it cannot be loaded.
        :raises IndexMismatchError: it is not what the vectors were made with.
        :raises WorkerError: a worker cannot start.
        """
        await self.workers.start()
        try:
            loads = [self._run({"do": "load"}) for _ in range(self.workers.size)]
            for found in await asyncio.gather(*loads, return_exceptions=True):  # none is done before all have begun
                if isinstance(found, BaseException):
                    raise found
                loaded = Loaded(self._name, found["dimension"], tuple(found["probe"]))
        except BaseException:
            await self.aclose()
            raise
        return loaded

    async def query(self, text: str, share: Share) -> str:
        """The query's vector, as a database takes it: `[0.1,0.2]`."""
        (vector,) = (await self._run({"do": "query", "text": text}, share))["vectors"]
        return str(vector)

    async def passages(self, texts: Sequence[str]) -> list[str]:
        """The vectors of these texts, likewise."""
        return list((await self._run({"do": "passages", "texts": list(texts)}))["vectors"])

    async def _run(self, job: Mapping[str, Any], share: Share | None = None) -> dict[str, Any]:
        try:
            return await self.workers.run(job, timeout_s=JOB_TIMEOUT_S, share=share)
        except WorkerJobError as error:
            raise explain(error, "embedding failed") from error

    async def aclose(self) -> None:
        """Stop the workers. Does nothing when not started."""
        await self.workers.aclose()


def building_threads() -> int:
    """Threads for embedding many passages."""
    return min(MAX_THREADS, os.cpu_count() or 1)


class _Embedding:
    def __init__(
        self, *, location: str, embedder: str, num_threads: int, dimension: int | None, probe: list[float] | None
    ) -> None:
        self._location, self._name, self._num_threads = location, embedder, num_threads
        self._dimension, self._probe = dimension, probe
        self._embedder: Embedder | None = None

    def handle(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`load`, `query` and `passages`, in any order: a worker that replaces another starts with any of them."""
        embedder = self._load()
        match header:
            case {"do": "load"}:
                return {"dimension": embedder.dimension, "probe": embedder.probe}
            case {"do": "query", "text": text}:
                return {"vectors": _as_texts(embedder.query(text)[None])}
            case {"do": "passages", "texts": texts}:
                return {"vectors": _as_texts(embedder.passages(texts))}
        raise AssertionError(header)

    def _load(self) -> Embedder:
        if self._embedder is None:
            device = "cpu" if self._num_threads == 1 else None
            embedder = Embedder(self._location, self._name, num_threads=self._num_threads, device=device)
            if self._dimension is not None and self._probe and not embedder.matches(self._dimension, self._probe):
                raise IndexMismatchError(
                    f"the vectors were not made with embedder={self._name!r}: "
                    f"{unlike(embedder.dimension, self._dimension)}. Name the embedder that they were made with"
                )
            self._embedder = embedder
        return self._embedder


def _as_texts(vectors: "Vectors") -> list[str]:
    """Nine digits are a float32 exactly."""
    return [f"[{','.join(f'{value:.9g}' for value in row)}]" for row in vectors.tolist()]


def make_embedding(**options: Any) -> "Handler":
    """For `WorkerPool`. Nothing is loaded before the first job, so that its errors are errors of a job."""
    return _Embedding(**options).handle
