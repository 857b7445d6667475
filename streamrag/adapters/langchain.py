"""LangChain, both ways: streamrag's sources and pipelines as LangChain's parts, and LangChain's retrievers as sources.

Needs `pip install 'streamrag[langchain]'`.
"""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from functools import partial
from inspect import getattr_static, isawaitable
from typing import Any, Self

from streamrag.core import (
    AnswerChunk,
    Append,
    Chunk,
    CutShort,
    SamplingParams,
    Skipped,
    SourceEvent,
    Startable,
    Turn,
    Update,
    part_name,
)
from streamrag.errors import ConfigurationError, MissingDependencyError, SourceError
from streamrag.kinds import is_number, kind_of, short
from streamrag.modes import UpdateMode
from streamrag.pipeline import Pipeline
from streamrag.retrieving import Retrieval, closing
from streamrag.sources.fusion import RRF_K
from streamrag.sources.merged import Merged
from streamrag.sources.passage_like import PassageReader
from streamrag.telemetry import Answer

try:
    from langchain_core.caches import BaseCache
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForLLMRun,
        CallbackManagerForRetrieverRun,
        adispatch_custom_event,
        dispatch_custom_event,
    )
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel, LangSmithParams
    from langchain_core.language_models.chat_models import agenerate_from_stream, generate_from_stream
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.retrievers import BaseRetriever
    from pydantic import Field, PositiveInt, field_validator
except ImportError as error:
    raise MissingDependencyError("langchain-core", "pip install 'streamrag[langchain]'") from error

from streamrag.adapters.home import Home

__all__ = ["StreamragChatModel", "StreamragRetriever", "from_langchain"]

SAMPLING = {field.name for field in fields(SamplingParams)}


# ----------------------------------------------------------------------------------------- a source as a retriever


class _Housed:
    """What starts with its first call, or with a block, sync or async, and is stopped at the block's end."""

    home: Any

    async def __aenter__(self) -> Self:
        await self.home.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.home.aclose()

    def __enter__(self) -> Self:
        self.home.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.home.close()

    def close(self) -> None:
        """Stop what the first call has started."""
        self.home.close()

    async def aclose(self) -> None:
        """The same, for callers in an event loop."""
        await self.home.aclose()


class StreamragRetriever(_Housed, BaseRetriever):
    """Any source of streamrag as a LangChain retriever: the documents are the context as it is when the source ends.

    Each document has `source`, `title`, `passage` and, if the source has one, `score` as its metadata, and an `id` that
    the same text of the same document always has. While the source is at work, custom events tell what it brings:
    `streamrag_append` with a `document`, `streamrag_update` with the `documents` of the whole context,
    `streamrag_skipped` and `streamrag_cut_short` with a `reason`; `astream_events` shows them.

    The source lives in the event loop that enters the retriever with `async with`. Otherwise the first call, sync or
    async, starts it in a thread with a loop of its own, until `close()`, the end of a `with` block, or until nobody
    refers to the retriever. Cancelling a call stops its retrieval.
    """

    source: Any
    """Where chunks come from."""
    k: PositiveInt | None = None
    """The most documents, the first of the context; by default all. A call may have its own: `invoke(query, k=3)`."""
    owns_source: bool = True
    """False if somebody else starts and closes the source."""
    home: Any = Field(default=None, exclude=True, repr=False)
    """Where the source lives; copies of this share it."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: Any) -> Any:
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"source={short(source)} is no source: it has no method 'stream'")
        return source

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.home is None:
            owned = self.source if self.owns_source and isinstance(self.source, Startable) else None
            self.home = Home(partial(_start, owned), partial(_aclose, owned))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = _Found(self._num_wanted(k))
        config = {"callbacks": run_manager.get_child()}
        for event in self.home.iterate(lambda: _retrieve(self.source, query)):
            dispatch_custom_event(*found.told(event), config=config)  # type: ignore[arg-type]
        return found.documents()

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        found = _Found(self._num_wanted(k))
        config = {"callbacks": run_manager.get_child()}
        async with aclosing(self.home.aiterate(lambda: _retrieve(self.source, query))) as events:
            async for event in events:
                await adispatch_custom_event(*found.told(event), config=config)  # type: ignore[arg-type]
        return found.documents()

    def _num_wanted(self, k: int | None) -> int | None:
        if k is not None and k < 1:
            raise ConfigurationError(f"k={k!r} must be at least 1")
        return k or self.k


async def _start(part: Startable | None) -> None:
    if part is not None:
        await part.start(lambda line: None)


async def _aclose(part: Startable | None) -> None:
    if part is not None:
        await part.aclose()


async def _retrieve(source: Any, query: str) -> AsyncGenerator[SourceEvent, None]:
    retrieval = Retrieval(source, query)
    try:
        async with aclosing(retrieval.events()) as events:
            async for event in events:
                yield event
    finally:
        await retrieval.aclose()


class _Found:
    """The context as a source builds it."""

    def __init__(self, num_wanted: int | None) -> None:
        self._chunks: tuple[Chunk, ...] = ()
        self._num_wanted = num_wanted

    def told(self, event: SourceEvent) -> tuple[str, dict[str, Any]]:
        """The name and the data of the custom event."""
        if isinstance(event, Append | Update):
            self._chunks = UpdateMode().fold(self._chunks, event)
        match event:
            case Append(chunk):
                return "streamrag_append", {"document": document_of(chunk)}
            case Update():
                return "streamrag_update", {"documents": self.documents()}
            case Skipped(uri, reason):
                return "streamrag_skipped", {"source": uri, "reason": reason}
            case CutShort(reason):
                return "streamrag_cut_short", {"reason": reason}

    def documents(self) -> list[Document]:
        return [document_of(chunk) for chunk in self._chunks[: self._num_wanted]]


def document_of(chunk: Chunk) -> Document:
    metadata = {"source": chunk.uri, "title": chunk.title, "passage": chunk.passage}
    if chunk.score is not None:
        metadata["score"] = chunk.score
    place = hashlib.sha256(f"{chunk.uri}\0{chunk.text}".encode(errors="surrogatepass"))
    return Document(chunk.text, id=place.hexdigest()[:32], metadata=metadata)


# -------------------------------------------------------------------------------------- a pipeline as a chat model


class StreamragChatModel(_Housed, BaseChatModel):
    """A pipeline as a LangChain chat model: the last human message is the query, and its documents are retrieved while
    the model reads them.

    Leading system messages take the place of the template's system text; the messages between are the conversation. A
    call may have options of its own: all of these, and those of `SamplingParams` and `QueryOptions`.

    The answer comes in chunks as it is generated. The last one has `usage_metadata`, and in `response_metadata` the
    `citations` (number, uri, title, passage, text and score of each passage that the model saw), `finish_reason`,
    `model_name`, `timings`, and `cut_short` and `source_error` if retrieval ended early.

    A pipeline that runs already is asked in its own event loop, from wherever the call comes. One that does not is
    started by `async with` in that loop, and otherwise by the first call, in a thread with a loop of its own, until
    `close()`, the end of a `with` block, or until nobody refers to the model. Cancelling a call stops its query.
    """

    pipeline: Pipeline
    """What retrieves and answers."""
    temperature: float | None = None
    """Of sampling, which is greedy by default."""
    top_p: float | None = None
    max_tokens: int | None = None
    """The most tokens of the answer; 256 by default."""
    seed: int | None = None
    stop: list[str] | None = None
    """Texts that end the answer."""
    timeout: float | None = None
    """The most seconds for an answer, retrieval included."""
    cache: BaseCache | bool | None = Field(default=False, exclude=True)
    """LangChain's, off by default: the same question has another answer when other documents are found."""
    home: Any = Field(default=None, exclude=True, repr=False)
    """Where the pipeline runs; copies of this share it."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.home is None:
            pipeline = self.pipeline
            self.home = Home(pipeline.start, pipeline.aclose, running_in=lambda: pipeline.loop)

    @property
    def _llm_type(self) -> str:
        return "streamrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
        parts = {"source": part_name(self.pipeline.source), "backend": part_name(self.pipeline.backend)}
        return {**parts, **{name: value for name, value in given.items() if value is not None}}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "streamrag"
        params.setdefault("ls_model_name", part_name(self.pipeline.backend))
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._astream(messages, stop, run_manager, **kwargs)) as chunks:
            return await agenerate_from_stream(chunks)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        query, options = self._asked(messages, stop, kwargs)
        for part in self.home.iterate(lambda: _answer(self.pipeline, query, options)):
            yield self._chunk(part)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        query, options = self._asked(messages, stop, kwargs)
        async with aclosing(self.home.aiterate(lambda: _answer(self.pipeline, query, options))) as parts:
            async for part in parts:
                yield self._chunk(part)

    def _asked(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """The query and its options."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "max_tokens", "seed", "stop", "timeout")}
        given = {
            name: value for name, value in {**own, **call, "stop": stop or own["stop"]}.items() if value is not None
        }
        if "timeout" in given:
            given["deadline_s"] = given.pop("timeout")
        sampling = {name: given.pop(name) for name in SAMPLING & given.keys()}
        params = given.pop("params", SamplingParams())
        system, history, query = _conversation(messages)
        return query, {
            "params": replace(params, **sampling) if isinstance(params, SamplingParams) else params,
            **({"system": system} if system else {}),
            "history": history,
            **given,
        }

    def _chunk(self, part: AnswerChunk | Answer) -> ChatGenerationChunk:
        if isinstance(part, AnswerChunk):
            return ChatGenerationChunk(message=AIMessageChunk(content=part.text))
        num_prompt, num_answer = part.num_prompt_tokens, len(part.token_ids)
        about = {
            "citations": [asdict(citation) for citation in part.citations],
            "finish_reason": part.finish_reason,
            "model_name": self.pipeline.backend.model.name,
            "timings": asdict(part.timings),
            "cut_short": part.cut_short,
            "source_error": part.source_error and str(part.source_error),
        }
        usage = UsageMetadata(input_tokens=num_prompt, output_tokens=num_answer, total_tokens=num_prompt + num_answer)
        message = AIMessageChunk(
            content="",
            usage_metadata=usage,
            response_metadata={name: value for name, value in about.items() if value is not None},
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)


async def _answer(
    pipeline: Pipeline, query: str, options: Mapping[str, Any]
) -> AsyncGenerator[AnswerChunk | Answer, None]:
    """The answer's chunks that have text, and then all of it."""
    async with pipeline.stream(query, **options) as stream:
        async for chunk in stream:
            if chunk.text:
                yield chunk
    yield stream.result


def _conversation(messages: Sequence[BaseMessage]) -> tuple[str, list[Turn], str]:
    """System text, earlier turns, and the query."""
    turns: list[Turn] = []
    for message in messages:
        match message:
            case SystemMessage():
                role = "system"
            case HumanMessage():
                role = "user"
            case AIMessage() if not message.tool_calls:
                role = "assistant"
            case _:
                raise ConfigurationError(
                    f"a conversation with {kind_of(message)} of a tool cannot be asked: only system, human and AI texts"
                )
        if role != "assistant" and any(block["type"] != "text" for block in message.content_blocks):
            raise ConfigurationError(f"{kind_of(message)} has more than text, and a pipeline reads text only")
        turns.append(Turn(role, str(message.text)))  # type: ignore[arg-type]
    if not turns or turns[-1].role != "user":
        raise ConfigurationError("the last message must be the human's: it is the query")
    *earlier, query = turns
    num_system = next((i for i, turn in enumerate(earlier) if turn.role != "system"), len(earlier))
    return "\n\n".join(turn.text for turn in earlier[:num_system]), earlier[num_system:], query.text


# ----------------------------------------------------------------------------------- LangChain's parts as a source


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
    """What `from_langchain` makes."""

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
    """One query, and the documents that its chunks were."""

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
        chunks: tuple[Chunk, ...] = ()
        async with aclosing(self.events(retriever.base_retriever)) as events:
            async for event in events:
                if isinstance(event, Append | Update):
                    chunks = UpdateMode().fold(chunks, event)
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
    """How it is asked; None if it cannot be. By its attributes: not all of its classes are in langchain-core."""
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
    """Itself: a retriever with fallbacks, or one that is bound to options, has all that is asked of the one inside."""
    return all(getattr_static(found_by, name, None) is not None for name in names)
