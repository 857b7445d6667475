"""Any function that finds passages, as a source."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from streamrag.core import Chunk, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.sources.threads import Threads

MAX_CALLS = 32
"""Calls at the same time. Further queries wait: a retriever that hangs takes no threads but these."""

WANTED = "passages: str, Chunk, (text, source), or objects with page_content and metadata"


class RetrieverSource:
    """Asks `retrieve(query)` once, and yields what it returns as one `Update`, in its order.

    `retrieve` may be async; otherwise it runs in a thread, where cancelling the query cannot stop it, and its result is
    dropped. It returns passages, each of them a `str`, a `Chunk`, a pair (text, source), or an object with
    `page_content` and `metadata` such as LangChain's documents, of whose metadata `source` (or `url`) and `title` are
    used. A LangChain retriever becomes a source as `RetrieverSource(retriever.ainvoke)`.

    The source's `name` is the function's. Passages without a source get it too; those without a number are counted
    within their source.

    :raises ConfigurationError: `retrieve` cannot be called.
    """

    def __init__(self, retrieve: Callable[[str], Any]) -> None:
        if not callable(retrieve):
            raise ConfigurationError(f"RetrieverSource: {retrieve!r} cannot be called; give a function of the query")
        self._retrieve = retrieve
        self.name = _name_of(retrieve)
        self._calls = Threads(MAX_CALLS, f"retrieve {self.name}")
        call = getattr(retrieve, "__call__", None)  # noqa: B004 - an object's method may be async where it is not
        self._is_async = inspect.iscoroutinefunction(retrieve) or inspect.iscoroutinefunction(call)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """One `Update`.

        :raises SourceError: `retrieve` raised, or returned something other than passages.
        """
        try:
            found = await self._found(query)
        except StreamRagError:
            raise
        except Exception as error:  # anybody's code: whatever it raises is a failed retrieval
            raise SourceError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        counts: dict[str, int] = {}
        yield Update(tuple(self._chunk(passage, counts) for passage in found))

    async def _found(self, query: str) -> list[Any]:
        if self._is_async:
            found = await self._retrieve(query)
        else:
            found = await self._calls.run(partial(self._call, query))
            if inspect.isawaitable(found):
                found = await found
        return self._listed(found)

    def _call(self, query: str) -> Any:
        found = self._retrieve(query)
        return found if inspect.isawaitable(found) else self._listed(found)  # generators do their work here too

    def _listed(self, found: Any) -> list[Any]:
        if isinstance(found, AsyncIterable):
            raise SourceError(
                f"{self.name} returned an async iterator; a source that streams implements streamrag.Source"
            )
        if isinstance(found, str | bytes | Mapping | Chunk) or not isinstance(found, Iterable):
            raise SourceError(f"{self.name} returned {_short(found)}, not a list of {WANTED}")
        return list(found)

    def _chunk(self, passage: Any, counts: dict[str, int]) -> Chunk:
        match passage:
            case Chunk():
                return passage
            case str():
                chunk = Chunk(passage, self.name)
            case (str(text), str(source)):
                chunk = Chunk(text, source)
            case object(page_content=str(text)):
                metadata = getattr(passage, "metadata", None) or {}
                source = metadata.get("source") or metadata.get("url") or self.name
                chunk = Chunk(text, str(source), str(metadata.get("title") or ""))
            case _:
                raise SourceError(f"{self.name} returned {_short(passage)} among its {WANTED}")
        number = counts.get(chunk.uri, 0)
        counts[chunk.uri] = number + 1
        return replace(chunk, passage=number)


def _name_of(retrieve: Callable[..., Any]) -> str:
    if isinstance(retrieve, partial):
        return _name_of(retrieve.func)
    return str(getattr(retrieve, "__qualname__", type(retrieve).__qualname__))


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r:.80}" if value is not None else "None"
