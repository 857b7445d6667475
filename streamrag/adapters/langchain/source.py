"""LangChain's retrievers, vector stores and document loaders as sources."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from inspect import getattr_static, isawaitable
from typing import Any

from streamrag.core import Append, Chunk, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError
from streamrag.modes.context import Context, UpdateMode
from streamrag.query.retrieval import closing
from streamrag.sources.fusion import RRF_K
from streamrag.sources.merged import Merged
from streamrag.sources.passage_reader import PassageReader
from streamrag.support.messages import is_number, kind_of, short


def from_langchain(found_by: Any, *, name: str = "") -> "LangchainSource":
    """A source of what LangChain's parts find. What may overlap does:

    - a document loader appends each document as its `alazy_load` yields it. It knows no query; a function of the query
      that returns a loader is taken too;
    - an ensemble of retrievers (`EnsembleRetriever`) asks all its members at once, and is an update as each of them
      answers, by its own weights and constant of reciprocal rank fusion. A member that fails is skipped, and reported;
    - a retriever that compresses or reranks (`ContextualCompressionRetriever`) is what its base retriever is, and then
      an update with what the compressor has made of that;
    - any other retriever, vector store, or Runnable from a query to documents is one update.

    So do ensembles of reranked retrievers, and other nestings. `source` or `url` in a document's metadata becomes the
    chunk's `uri`, `relevance_score` its `score` if it has no other. Documents that tell no source are those of `name`,
    which is the class's unless given. Traces of the retrievers' runs belong to the run around the query.

    :raises ConfigurationError: it is none of these.
    """
    return LangchainSource(found_by, name)


class LangchainSource:
    """The source that `from_langchain` makes."""

    def __init__(self, found_by: Any, name: str) -> None:
        if isinstance(found_by, type) or _kind(found_by) is None:
            raise ConfigurationError(
                f"{short(found_by)} is no retriever, vector store, document loader or Runnable of LangChain, and no "
                "function of the query that returns one"
            )
        self._found_by = found_by
        self.name = name or type(found_by).__name__

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Chunk events as documents are found.

        :raises SourceError: what was found are no documents. What LangChain's parts raise is raised.
        """
        async with aclosing(_Query(query, self.name).events(self._found_by)) as events:
            async for event in events:
                yield event


class _Query:
    """A query, and the documents that its chunks were."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._reader = PassageReader(name)
        self._documents: dict[Chunk, Any] = {}

    async def events(self, found_by: Any) -> AsyncGenerator[SourceEvent, None]:
        kind = _kind(found_by)
        if kind is None:
            raise SourceError(f"{self._reader.name} made {short(found_by)}, and must make a loader or a retriever")
        async with aclosing(kind(self, found_by)) as events:
            async for event in events:
                yield event

    async def load(self, loader: Any) -> AsyncGenerator[SourceEvent, None]:
        async with closing(aiter(loader.alazy_load())) as documents:
            async for document in documents:
                yield Append(self._chunk(document))

    async def ask_members(self, ensemble: Any) -> AsyncGenerator[SourceEvent, None]:
        members = [_Member(self, member) for member in ensemble.retrievers]
        merged = Merged(*members, weights=ensemble.weights, k=getattr(ensemble, "c", RRF_K), name=self._reader.name)
        async with aclosing(merged.stream(self._text)) as events:
            async for event in events:
                yield event

    async def compress(self, retriever: Any) -> AsyncGenerator[SourceEvent, None]:
        chunks = Context()
        async with aclosing(self.events(retriever.base_retriever)) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = chunks.become(UpdateMode().fold(chunks, event))
                yield event
        if chunks:
            documents = [self._documents[replace(chunk, score=None)] for chunk in chunks]
            yield self._update(await retriever.base_compressor.acompress_documents(documents, self._text))

    async def search(self, store: Any) -> AsyncGenerator[SourceEvent, None]:
        async with aclosing(self.ask(store.as_retriever())) as events:
            async for event in events:
                yield event

    async def ask(self, retriever: Any) -> AsyncGenerator[SourceEvent, None]:
        yield self._update(await retriever.ainvoke(self._text))

    async def make(self, function: Callable[[str], Any]) -> AsyncGenerator[SourceEvent, None]:
        made = function(self._text)
        async with aclosing(self.events(await made if isawaitable(made) else made)) as events:
            async for event in events:
                yield event

    def _update(self, documents: Any) -> Update:
        if not isinstance(documents, list | tuple):
            raise SourceError(f"{self._reader.name} found {kind_of(documents)}, and must find a list of documents")
        return Update(tuple(map(self._chunk, documents)))

    def _chunk(self, document: Any) -> Chunk:
        chunk = self._reader.chunk(document)
        relevance: Any = (getattr(document, "metadata", None) or {}).get("relevance_score")
        if chunk.score is None and is_number(relevance):
            chunk = replace(chunk, score=float(relevance))
        self._documents.setdefault(replace(chunk, score=None), document)
        return chunk


class _Member:
    """A retriever of an ensemble as a source of its query."""

    def __init__(self, query: _Query, found_by: Any) -> None:
        self._query = query
        self._found_by = found_by
        self.name = type(found_by).__name__

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        return self._query.events(self._found_by)


def _kind(found_by: Any) -> Callable[[_Query, Any], AsyncGenerator[SourceEvent, None]] | None:
    """Return the function that asks it, or None. It is found by attributes: not all classes are in langchain-core."""
    if _has(found_by, "alazy_load"):
        return _Query.load
    if _has(found_by, "retrievers", "weights"):
        return _Query.ask_members
    if _has(found_by, "base_retriever", "base_compressor"):
        return _Query.compress
    if _has(found_by, "as_retriever"):
        return _Query.search
    if _has(found_by, "ainvoke"):
        return _Query.ask
    return _Query.make if callable(found_by) else None


def _has(found_by: Any, *names: str) -> bool:
    """Whether `found_by` itself has all of `names`.

    A retriever with fallbacks, or one that is bound to options, passes any other attribute on to the one inside.
    """
    return all(getattr_static(found_by, name, None) is not None for name in names)
