"""LangChain's retrievers, vector stores and document loaders as sources."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import getattr_static, isawaitable, signature
from types import SimpleNamespace
from typing import Any

from streamrag.adapters.langchain.retriever import StreamragRetriever
from streamrag.core import Append, Chunk, Source, SourceEvent, Update
from streamrag.core.retrieval import closing
from streamrag.core.text import is_blank
from streamrag.errors import ConfigurationError, SourceError
from streamrag.modes.context import Context, UpdateMode
from streamrag.sources.fusion import RRF_K
from streamrag.sources.merged import MergedSource, skip_failed
from streamrag.sources.passage_reader import PassageReader
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import call_for_list, name_of
from streamrag.support.messages import is_number, message_of, short_repr, type_name
from streamrag.support.tasks import cancel_and_wait

log = logging.getLogger("streamrag.sources")
MAX_CALLS = 32  # concurrent calls of one stage or source
NOT_ASYNC = AssertionError, NotImplementedError
"""Errors of `ainvoke` where only `invoke` works, as around the store `PGVector` of langchain_postgres by default."""


def from_langchain(found_by: Any, *, name: str = "") -> Source:
    """Return a source that retrieves with a LangChain component. Stages overlap with prefill where possible:

    - A document loader appends each document that its `alazy_load` yields.
    - A function of the query is what it returns, such as a loader that depends on the query, or a list of documents.
    - An ensemble of retrievers (`EnsembleRetriever`) runs its members concurrently, and yields an update after each
      member's answer, fused with the ensemble's weights and constant. A failing member is skipped, and reported.
    - A retriever that compresses or reranks (`ContextualCompressionRetriever`) yields the events of its base retriever,
      and then an update with the compressor's documents.
    - A `StreamragRetriever` without `k`, such as that of `staged_retriever`, is its own source.
    - Any other retriever, vector store, or Runnable from a query to documents yields one update.

    These can be nested. A document's metadata `source` or `url` becomes the chunk's `uri`, and `relevance_score` its
    `score` if it has no other. The `uri` of other documents is `name`, by default the component's class. LangChain's
    traces of the retrievers' runs are children of the run around the query.

    :raises ConfigurationError: `found_by` is none of these.
    """
    if isinstance(found_by, StreamragRetriever) and found_by.k is None and found_by.owns_source:
        return found_by.source  # type: ignore[no-any-return]
    return LangchainSource(found_by, name)


def staged_retriever(*stages: Any, name: str = "staged retriever") -> StreamragRetriever:
    """Return a retriever whose stages answer one after another, each with a better list of documents.

    `staged_retriever(keyword_search, vector_search, rerank)` is a LangChain retriever, whose documents are those of the
    last stage. With `from_langchain`, it is a source that yields an update after each stage, so that the model reads
    the documents of one stage while the next is at work.

    stages: functions of the query that return documents, the fastest first, or LangChain retrievers. Async ones are
        awaited, others run in threads. They start together. A function of two parameters, the query and the documents
        of the stages before it, starts when these have ended. A stage that fails is skipped and reported, unless all
        fail.
    name: the source's name.

    :raises ConfigurationError: a stage is neither, or the first one needs documents.
    """
    return StreamragRetriever(source=StagedSource(stages, name))


class StagedSource:
    """The source of a `staged_retriever`."""

    def __init__(self, stages: Sequence[Any], name: str) -> None:
        self.name = name
        self._retrievers = _Retrievers(name)
        self._stages = [_Stage(stage, self._retrievers) for stage in stages]
        if not stages or self._stages[0].documents:
            raise ConfigurationError(
                f"stages={short_repr(stages)} must begin with a function of the query, whose documents others can rank"
            )

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an update after each stage in order, or a `Skipped` if the stage failed.

        Stages that take only the query start together. A stage that takes documents starts when all stages before it
        have ended, with the list of the last that returned one.

        :raises SourceError: all stages failed.
        """
        found = _Query(query, self.name, self._retrievers)
        documents: list[Any] = []
        errors: list[Exception] = []
        searches = {
            stage: asyncio.create_task(stage.call(query, None)) for stage in self._stages if not stage.documents
        }
        try:
            for stage in self._stages:
                search = searches.get(stage) or asyncio.create_task(stage.call(query, documents))
                searches[stage] = search
                try:
                    documents = await search
                    update = found.update(documents)
                except Exception as error:
                    errors.append(error)
                    yield skip_failed(stage, error)
                else:
                    for event in found.skip_blank(update):
                        yield event
        finally:
            await cancel_and_wait(list(searches.values()))
        if len(errors) == len(self._stages):
            raise SourceError(f"{self.name} failed: {'; '.join(map(message_of, errors))}") from errors[0]


class _Stage:
    """A stage of a `staged_retriever`: a function or a retriever that returns a list of documents."""

    def __init__(self, stage: Any, retrievers: "_Retrievers") -> None:
        self._call = partial(retrievers.ask, stage) if _has(stage, "as_retriever") or _has(stage, "ainvoke") else stage
        if isinstance(stage, type) or not callable(self._call):
            raise ConfigurationError(f"{short_repr(stage)} is no stage: give a function of the query, or a retriever")
        self.name = name_of(stage)
        self.documents = _second_parameter(self._call)
        """Name of the parameter for the documents of earlier stages; None for a stage that needs none."""
        self._threads = Threads(MAX_CALLS, f"retrieve {self.name}")

    async def call(self, query: str, documents: list[Any] | None) -> list[Any]:
        """Return the documents of this stage."""
        call = partial(self._call, **{self.documents: documents}) if self.documents else self._call
        return await call_for_list(call, query, self._check, self._threads)

    def _check(self, result: Any) -> Any:
        if not isinstance(result, list | tuple):
            raise SourceError(f"{self.name} returned {type_name(result)} instead of a list of documents")
        return result


def _second_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the second parameter without a default; None if there is none, or no signature."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return None
    required = [
        each.name for each in parameters if each.default is each.empty and each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    return required[1] if len(required) > 1 else None


class LangchainSource:
    """The source that `from_langchain` makes."""

    def __init__(self, found_by: Any, name: str) -> None:
        if isinstance(found_by, type) or _kind(found_by) is None:
            raise ConfigurationError(
                f"{short_repr(found_by)} is neither a retriever, vector store, document loader or Runnable of "
                "LangChain, nor a function of the query that returns one, or documents"
            )
        self.name = name or type(found_by).__name__
        self._found_by = found_by
        self._retrievers = _Retrievers(self.name)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield chunk events as documents are retrieved.

        :raises SourceError: the component did not return documents. Errors of LangChain are raised unchanged.
        """
        found = _Query(query, self.name, self._retrievers)
        async with aclosing(found.events(self._found_by)) as events:
            async for event in events:
                for each in found.skip_blank(event):
                    yield each


class _Retrievers:
    """A caller of retrievers, vector stores and functions, which remembers those whose `ainvoke` does not work."""

    def __init__(self, name: str) -> None:
        self._threads = Threads(MAX_CALLS, f"retrieve {name}")
        self._only_sync: deque[Any] = deque(maxlen=MAX_CALLS)  # bounded: a function may make a retriever per query

    async def ask(self, found_by: Any, query: str) -> Any:
        """Return the documents of `ainvoke`, or of `invoke` in a thread once `ainvoke` has raised one of `NOT_ASYNC`.

        Raises the first error if `invoke` does not work either. Another error of `ainvoke` is not tried again.
        """
        retriever = found_by.as_retriever() if _has(found_by, "as_retriever") else found_by
        is_sync = getattr(getattr(retriever, "vectorstore", None), "async_mode", True) is False  # PGVector's
        if is_sync or any(each is found_by for each in self._only_sync):
            return await self._threads.run(partial(retriever.invoke, query))
        try:
            return await retriever.ainvoke(query)
        except NOT_ASYNC as error:
            try:
                documents = await self._threads.run(partial(retriever.invoke, query))
            except (*NOT_ASYNC, AttributeError, TypeError):  # TypeError: a RunnableLambda of an async function
                raise error from None
            log.info("%s is called in threads, because its ainvoke raises %r", type_name(found_by), error)
            self._only_sync.append(found_by)
            return documents

    async def call(self, function: Callable[[str], Any], query: str) -> Any:
        """Call a function of the query in a thread, because it may search; await its result if needed."""
        made = await self._threads.run(partial(function, query))
        return await made if isawaitable(made) else made


class _Query:
    """The retrieval of a query, with the documents of its chunks."""

    def __init__(self, text: str, name: str, retrievers: _Retrievers) -> None:
        self._text = text
        self._retrievers = retrievers
        self._reader = PassageReader(name)
        self._documents: dict[Chunk, Any] = {}
        self.skip_blank = self._reader.skip_blank

    async def events(self, found_by: Any) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of a component by the method for its kind (`_kind`); raise SourceError if there is none."""
        kind = _kind(found_by)
        if kind is None:
            raise SourceError(f"{self._reader.name} returned {short_repr(found_by)}, which is no loader or retriever")
        async with aclosing(kind(self, found_by)) as events:
            async for event in events:
                yield event

    async def load(self, loader: Any) -> AsyncGenerator[SourceEvent, None]:
        async with closing(aiter(loader.alazy_load())) as documents:
            async for document in documents:
                yield Append(self._chunk(document))

    async def ask_members(self, ensemble: Any) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of an ensemble's members, run concurrently, fused by a `MergedSource` with its weights.

        The same text is there once. The last list is the ensemble's own, computed from the members' last lists.
        """
        found = [Context() for _ in ensemble.retrievers]
        members: list[Any] = [
            SimpleNamespace(
                name=type(each).__name__, stream=lambda _, number=number: self._member(ensemble, number, found)
            )
            for number, each in enumerate(ensemble.retrievers)
        ]
        merged = MergedSource(
            *members, weights=ensemble.weights, k=getattr(ensemble, "c", RRF_K), name=self._reader.name
        )
        last: list[str] = []
        async with aclosing(merged.stream(self._text)) as events:
            async for event in events:
                if isinstance(event, Update):
                    by_text: dict[str, Chunk] = {}
                    for chunk in event.chunks:
                        by_text.setdefault(chunk.text, chunk)
                    event, last = replace(event, chunks=tuple(by_text.values())), list(by_text)
                yield event
        fuse = getattr(ensemble, "weighted_reciprocal_rank", None)
        if fuse and last:
            update = self.update(fuse([list(map(self._document, chunks)) for chunks in found]))
            shown = tuple(chunk for chunk in update.chunks if not is_blank(chunk.text))
            if [chunk.text for chunk in shown] != last:
                yield Update(shown)

    async def _member(self, ensemble: Any, number: int, found: list[Context]) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of a member, and keep its context in `found`."""
        async with aclosing(self.events(ensemble.retrievers[number])) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    found[number] = found[number].with_chunks(UpdateMode().fold(found[number], event))
                yield event

    async def compress(self, retriever: Any) -> AsyncGenerator[SourceEvent, None]:
        """Yield the base retriever's events; then, if it has found documents, an update with the compressor's."""
        chunks = Context()
        async with aclosing(self.events(retriever.base_retriever)) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = chunks.with_chunks(UpdateMode().fold(chunks, event))
                yield event
        if chunks:
            documents = list(map(self._document, chunks))
            yield self.update(await retriever.base_compressor.acompress_documents(documents, self._text))

    async def ask(self, retriever: Any) -> AsyncGenerator[SourceEvent, None]:
        yield self.update(await self._retrievers.ask(retriever, self._text))

    async def make(self, function: Callable[[str], Any]) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of the component that a function of the query returns, or an update with its documents."""
        made = await self._retrievers.call(function, self._text)
        if isinstance(made, list | tuple):
            yield self.update(made)
            return
        async with aclosing(self.events(made)) as events:
            async for event in events:
                yield event

    def update(self, documents: Any) -> Update:
        """Return an update of a list of documents; raise SourceError for anything else."""
        if not isinstance(documents, list | tuple):
            raise SourceError(f"{self._reader.name} returned {type_name(documents)} instead of a list of documents")
        return Update(tuple(map(self._chunk, documents)))

    def _document(self, chunk: Chunk) -> Any:
        return self._documents[replace(chunk, score=None)]

    def _chunk(self, document: Any) -> Chunk:
        """Return a document's chunk, with `relevance_score` if it has no score; keep the document for a compressor."""
        chunk = self._reader.chunk(document)
        relevance: Any = (getattr(document, "metadata", None) or {}).get("relevance_score")
        if chunk.score is None and is_number(relevance):
            chunk = replace(chunk, score=float(relevance))
        self._documents.setdefault(replace(chunk, score=None), document)
        return chunk


def _kind(found_by: Any) -> Callable[[_Query, Any], AsyncGenerator[SourceEvent, None]] | None:
    """Return the method of `_Query` that yields the events of the component `found_by`; `make` for any other callable.

    Returns None for anything else. Components are recognised by attributes, because not all classes are in
    langchain-core.
    """
    if _has(found_by, "alazy_load"):
        return _Query.load
    if _has(found_by, "retrievers", "weights"):
        return _Query.ask_members
    if _has(found_by, "base_retriever", "base_compressor"):
        return _Query.compress
    if _has(found_by, "as_retriever") or _has(found_by, "ainvoke"):
        return _Query.ask
    return _Query.make if callable(found_by) else None


def _has(found_by: Any, *names: str) -> bool:
    """Whether `found_by` itself has all of the attributes.

    A retriever with fallbacks or bound options delegates unknown attributes to the inner retriever.
    """
    return all(getattr_static(found_by, name, None) is not None for name in names)
