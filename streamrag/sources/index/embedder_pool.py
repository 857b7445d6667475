"""An embedder in worker processes, for sources that do not store their vectors in an index folder."""

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streamrag.sources.index.embedder import Embedder, EmbedderIdentity, find_embedder
from streamrag.sources.index.worker_jobs import JobHandler, new_pool, run_job, start_and_load
from streamrag.sources.workers.pool import Share

if TYPE_CHECKING:
    from streamrag.sources.index.embedder import Vectors

NUM_BUILD_THREADS = min(8, os.cpu_count() or 1)
"""Threads for embedding many passages."""


class EmbedderPool:
    """A pool of processes that embed, each with its own copy of the embedder.

    made_with: the embedder of the vectors that are searched; a worker whose embedder differs fails its jobs.

    :raises ConfigurationError: the embedder's name is empty, or a path that does not exist.
    :raises MissingDependencyError: a package is not installed.
    """

    def __init__(
        self, embedder: str, *, size: int, num_threads: int = 1, made_with: EmbedderIdentity | None = None
    ) -> None:
        place = find_embedder(embedder)
        handler = EmbedderHandler(place.location, place.name, num_threads, astuple(made_with) if made_with else None)
        self.workers = new_pool(handler, size=size, name="embedding worker", env=place.env)

    async def start(self) -> EmbedderIdentity:
        """Load the embedder in each worker, which takes many seconds, and return its identity.

        :raises ConfigurationError: it cannot be loaded.
        :raises IndexMismatchError: it is not the embedder that made the vectors.
        :raises WorkerError: a worker cannot start.
        """
        name, dimension, probe = (await start_and_load(self.workers))["identity"]
        return EmbedderIdentity(name, dimension, tuple(probe))

    async def query(self, text: str, share: Share) -> str:
        """Return the query's vector in pgvector's text format, such as `[0.1,0.2]`."""
        (vector,) = (await run_job(self.workers, {"do": "query", "text": text}, share))["vectors"]
        return str(vector)

    async def passages(self, texts: Sequence[str]) -> list[str]:
        """Return the texts' vectors in pgvector's text format."""
        return list((await run_job(self.workers, {"do": "passages", "texts": list(texts)}))["vectors"])

    async def aclose(self) -> None:
        """Stop the worker processes. Does nothing when not started."""
        await self.workers.aclose()


@dataclass
class EmbedderHandler(JobHandler):
    """A handler that embeds texts for an `EmbedderPool`."""

    location: str
    embedder: str
    num_threads: int
    made_with: tuple[str, int, list[float]] | None

    def load(self) -> dict[str, Any]:
        """Load the embedder, and return its `identity` as a list."""
        return {"identity": astuple(self._embedder.identity)}

    def query(self, text: str) -> dict[str, Any]:
        """Return `vectors`: the query's vector, as a text for pgvector."""
        return {"vectors": _as_texts(self._embedder.query(text)[None])}

    def passages(self, texts: list[str]) -> dict[str, Any]:
        """Return `vectors`: the texts' vectors, as texts for pgvector."""
        return {"vectors": _as_texts(self._embedder.passages(texts))}

    @cached_property
    def _embedder(self) -> Embedder:
        """The embedder, loaded at first use and compared with `made_with`. With one thread it uses no GPU."""
        device = "cpu" if self.num_threads == 1 else None
        embedder = Embedder(self.location, self.embedder, num_threads=self.num_threads, device=device)
        if self.made_with:
            embedder.require(EmbedderIdentity(*self.made_with), "the vectors")  # type: ignore[arg-type]
        return embedder


def _as_texts(vectors: "Vectors") -> list[str]:
    """Format each row in pgvector's text format. Nine digits represent a float32 exactly."""
    return [f"[{','.join(f'{value:.9g}' for value in row)}]" for row in vectors.tolist()]
