"""Adapters for Haystack, both ways. Needs the extra `haystack`.

source = HaystackSource(InMemoryBM25Retriever(store), rankers=[ranker])
pipeline = haystack.Pipeline()
pipeline.add_component("rag", StreamragGenerator(streamrag.Pipeline(source, OpenAIBackend(url))))
pipeline.run({"rag": {"query": "How do I cancel a task group?", "streaming_callback": print_streaming_chunk}})

Haystack's `pipeline.close()` stops what the components have started.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from functools import partial
from inspect import isawaitable
from typing import Any, Unpack

from streamrag.adapters.portal import LoopPortal
from streamrag.adapters.retrieved_chunks import FoundChunk
from streamrag.core import Chunk, Progress, Skipped, SourceEvent, Turn, Update
from streamrag.core.lifecycle import started_once
from streamrag.core.text import is_blank
from streamrag.errors import ConfigurationError, MissingDependencyError, SourceError, install_line
from streamrag.pipeline import Pipeline
from streamrag.query.options import QueryOptions, check_options
from streamrag.sources.passage_reader import PassageReader
from streamrag.sources.retriever import MAX_CALLS
from streamrag.sources.threads import Threads
from streamrag.support.messages import type_name
from streamrag.telemetry import Alternative, Answer, ContextComplete, TokensGenerated

try:
    from haystack import Document, component
    from haystack.dataclasses import (
        ChatMessage,
        ComponentInfo,
        StreamingCallbackT,
        StreamingChunk,
        select_streaming_callback,
    )
except ImportError:
    raise MissingDependencyError("haystack-ai", install_line("haystack")) from None

__all__ = ["HaystackSource", "StreamragGenerator"]

URIS = ("uri", "url", "source", "file_path", "source_id")
"""Keys of a document's meta for its address, in order of precedence."""


@component
class StreamragGenerator:
    """A pipeline as a Haystack component that takes a query, and returns replies and the documents in the prompt.

    It replaces retriever, ranker, prompt builder and generator. Its `replies` and `documents` connect to an
    `AnswerBuilder`. Documents of a `HaystackSource` keep their ids and meta.

    Unless the pipeline has been started, `run_async` starts it in the caller's event loop, and `run` in a thread;
    Haystack's `Pipeline.close` then closes it for good.

    pipeline: the pipeline that answers.
    streaming_callback: called with each piece of text; `run` may override it.
    options: `QueryOptions` for every query.

    :raises ConfigurationError: an option is unknown.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        streaming_callback: StreamingCallbackT | None = None,
        **options: Unpack[QueryOptions],
    ) -> None:
        check_options(options)
        self._pipeline = pipeline
        self._streaming_callback = streaming_callback
        self._options = options
        self._portal = LoopPortal.to_pipeline(pipeline)

    def warm_up(self) -> None:
        """Start the pipeline, unless it has been started."""
        self._portal.start()

    async def warm_up_async(self) -> None:
        """Start the pipeline in this event loop, unless it has been started."""
        await self._portal.settle()

    def close(self) -> None:
        """Close the pipeline, if it was started here."""
        self._portal.close()

    async def close_async(self) -> None:
        """Close the pipeline, if it was started here."""
        await self._portal.aclose()

    @component.output_types(replies=list[ChatMessage], documents=list[Document])
    def run(
        self,
        query: str,
        history: list[ChatMessage] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answer `query`, and return `replies`, the answer and its alternatives, and `documents`, those in the prompt.

        query: the question.
        history: earlier messages of the conversation.
        streaming_callback: called with each piece of text, in this thread; by default the component's.
        """
        callback = select_streaming_callback(self._streaming_callback, streaming_callback, requires_async=False)
        outputs: dict[str, Any] = {}
        with closing(self._portal.iterate(lambda: self._answer_parts(query, history))) as parts:
            for part in parts:
                if not isinstance(part, StreamingChunk):
                    outputs = part
                elif callback is not None:
                    callback(part)
        return outputs

    @component.output_types(replies=list[ChatMessage], documents=list[Document])
    async def run_async(
        self,
        query: str,
        history: list[ChatMessage] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answer `query` as `run` does, without blocking. Starts the pipeline if needed; the callback may be async."""
        callback = select_streaming_callback(self._streaming_callback, streaming_callback, requires_async=True)
        outputs: dict[str, Any] = {}
        await self._portal.settle()
        async with aclosing(self._portal.aiterate(lambda: self._answer_parts(query, history))) as parts:
            async for part in parts:
                if not isinstance(part, StreamingChunk):
                    outputs = part
                elif callback is not None and isawaitable(done := callback(part)):
                    await done
        return outputs

    async def _answer_parts(
        self, query: str, history: Sequence[ChatMessage] | None
    ) -> AsyncGenerator[StreamingChunk | dict[str, Any], None]:
        """Run the query, with `history` if any; yield a `StreamingChunk` for each piece, and at last the outputs."""
        options = self._options
        if history:
            turns = [Turn(message.role.value, message.text or "") for message in history]  # type: ignore[arg-type]
            options = {**options, "history": turns}
        documents: list[Document] = []
        number = 0
        async with self._pipeline.events(query, **options) as events:
            async for event in events:
                match event:
                    case ContextComplete(chunks=chunks):
                        documents = list(map(_document, chunks))
                    case TokensGenerated():
                        yield self._streamed(event, number)
                        number += 1
        yield self._outputs(events.result, documents)

    def _streamed(self, event: TokensGenerated, number: int) -> StreamingChunk:
        """Return a piece of the answer for callbacks, with the model's name and, for the last piece, the finish reason.
        Piece `number` 0 is marked as the start."""
        return StreamingChunk(
            event.text,
            meta={"model": self._pipeline.backend.model.name},
            component_info=ComponentInfo.from_component(self),
            index=0,
            start=number == 0,
            finish_reason=event.finish_reason,  # type: ignore[arg-type]
        )

    def _outputs(self, answer: Answer, documents: list[Document]) -> dict[str, Any]:
        """Return `documents`, and as `replies` a message for the answer and each alternative.

        The meta of each has an index, its finish reason, and the model, usage and times of the whole answer.
        """
        usage = answer.usage
        meta = {
            "model": self._pipeline.backend.model.name,
            "usage": {
                "prompt_tokens": usage.num_prompt_tokens,
                "completion_tokens": usage.num_output_tokens,
                "total_tokens": usage.num_tokens,
            },
            "retrieval_s": answer.timings.retrieval_s,
            "ttft_s": answer.timings.ttft_s,
            "total_s": answer.timings.total_s,
        }
        answers: list[Answer | Alternative] = [answer, *answer.alternatives]
        replies = [
            ChatMessage.from_assistant(each.text, meta=meta | {"index": index, "finish_reason": each.finish_reason})
            for index, each in enumerate(answers)
        ]
        return {"replies": replies, "documents": documents}


class HaystackSource:
    """A Haystack retriever component as a source.

    The retriever's result is an `Update`, and so is that of each of the `rankers` that changes it. The last update is
    the context that Haystack would have put into the prompt; meanwhile the model prefills the earlier ones. For an
    update as each member of a `MultiRetriever` answers, put a source for each member into a `MergedSource`, which fuses
    them by the same formula.

    Components without async methods run in threads, which cancelling the query cannot stop. They are warmed up when the
    source starts, and closed with it.

    retriever: a component that takes a `query` and returns `documents`. Wrap one that takes an embedding in Haystack's
        `TextEmbeddingRetriever`.
    rankers: components that process the documents in this order; they take `documents`, and optionally the `query`.
    inputs: other inputs of the retriever, such as `{"top_k": 5}`.
    name: name of the source; by default the retriever's class.

    :raises ConfigurationError: `retriever` or a ranker is not such a component.
    """

    def __init__(
        self, retriever: Any, *, rankers: Sequence[Any] = (), inputs: Mapping[str, Any] | None = None, name: str = ""
    ) -> None:
        _check(retriever, "query", "a retriever; put one that takes an embedding into a TextEmbeddingRetriever")
        for ranker in rankers:
            _check(ranker, "documents", "a ranker")
        self.name = name or type(retriever).__name__
        self._retriever = retriever
        self._rankers = tuple(rankers)
        self._inputs = dict(inputs or {})
        self._calls = Threads(MAX_CALLS, f"retrieve {self.name}")

    @started_once
    async def start(self, progress: Progress) -> None:
        """Warm up the retriever, then the rankers, where they can be. If one fails, `aclose` all, and raise its error.

        :raises AlreadyStartedError: the source is started.
        """
        try:
            for part in (self._retriever, *self._rankers):
                await self._call(part, "warm_up")
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the retriever, then the rankers, if they have a `close`; the last error is raised after all of them."""
        self.is_started = False
        async with AsyncExitStack() as closers:
            for part in (*reversed(self._rankers), self._retriever):
                closers.push_async_callback(self._call, part, "close")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for the first stage, even if empty, and for each later one that changes the chunks.

        Documents without text are left out; for each, yield one `Skipped`. Errors of components are raised as they are.
        """
        reader = PassageReader(self.name)
        before: tuple[Chunk, ...] | None = None
        skipped: set[str] = set()
        async with aclosing(self._rankings(query)) as found:
            async for documents in found:
                for document in documents:
                    if is_blank(document.content or "") and document.id not in skipped:
                        skipped.add(document.id)
                        yield Skipped(document.id, "it has no text")
                chunks = tuple(
                    _chunk(document, reader) for document in documents if not is_blank(document.content or "")
                )
                if chunks != before:
                    before = chunks
                    yield Update(chunks)

    async def _rankings(self, query: str) -> AsyncGenerator[list[Document], None]:
        """Yield the retriever's documents. Then, for each ranker in turn, yield the documents that it returns for those
        of the component before."""
        documents = await self._documents(self._retriever, query=query, **self._inputs)
        yield documents
        for ranker in self._rankers:
            inputs = {"query": query} if "query" in ranker.__haystack_input__ else {}
            documents = await self._documents(ranker, documents=documents, **inputs)
            yield documents

    async def _documents(self, part: Any, **inputs: Any) -> list[Document]:
        """Run a component with these inputs, and return its `documents`; raise SourceError if they are no list."""
        documents = (await self._call(part, "run", **inputs) or {}).get("documents")
        if not isinstance(documents, list):
            raise SourceError(f"{type(part).__name__} returned {type_name(documents)} as documents instead of a list")
        return documents

    async def _call(self, part: Any, method: str, **inputs: Any) -> Any:
        """Call the component's async method, or its sync method in a thread; return None if it has neither."""
        if run_async := getattr(part, f"{method}_async", None):
            return await run_async(**inputs)
        if run := getattr(part, method, None):
            return await self._calls.run(partial(run, **inputs))
        return None


def _check(part: Any, wanted: str, what: str) -> None:
    """Raise ConfigurationError unless `part` is a component with an input of this name."""
    if isinstance(part, type) or wanted not in getattr(part, "__haystack_input__", ()):
        raise ConfigurationError(f"HaystackSource: {type_name(part)} does not take {wanted!r}, as needed for {what}")


def _chunk(document: Document, reader: PassageReader) -> Chunk:
    """Return a chunk with the document as its `origin`. The chunk's uri is the value of the first key in `URIS`
    for which the document's meta has a value, else the document's id."""
    meta = document.meta
    uri = next((meta[key] for key in URIS if meta.get(key)), document.id)
    chunk = reader.chunk(
        {"text": document.content, "uri": uri, "title": meta.get("title") or "", "score": document.score}
    )
    return FoundChunk(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score, origin=document)


def _document(chunk: Chunk) -> Document:
    """Return the chunk's own document; for another source, a new `uri#passage` with uri, title and passage as meta."""
    if isinstance(chunk, FoundChunk):
        return chunk.origin  # type: ignore[no-any-return]
    meta = {"uri": chunk.uri, "title": chunk.title, "passage": chunk.passage}
    return Document(id=f"{chunk.uri}#{chunk.passage}", content=chunk.text, meta=meta, score=chunk.score)
