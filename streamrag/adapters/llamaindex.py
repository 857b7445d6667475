"""Adapters for LlamaIndex, both ways. Needs the extra `llamaindex`.

source = LlamaIndexSource(index.as_retriever(), node_postprocessors=[reranker])
with StreamragQueryEngine(Pipeline(source, OpenAIBackend(url)), streaming=True) as engine:
    engine.query("How do I cancel a task group?").print_response_stream()

A `StreamragNodeRetriever` is a source of streamrag as a retriever in LlamaIndex.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

from streamrag.adapters.portal import LoopPortal, PortalOwner
from streamrag.adapters.retrieved_chunks import FoundChunk, retrieve_all
from streamrag.core import Chunk, Source, SourceEvent, Startable, Update
from streamrag.core.text import is_blank
from streamrag.errors import ConfigurationError, MissingDependencyError, install_line
from streamrag.pipeline import Pipeline
from streamrag.query.options import QueryOptions, check_options
from streamrag.sources.fusion import reciprocal_rank_fusion
from streamrag.sources.passage_reader import PassageReader
from streamrag.sources.retriever import MAX_CALLS
from streamrag.sources.threads import Threads
from streamrag.support.messages import type_name
from streamrag.support.tasks import cancel_and_wait
from streamrag.telemetry import ContextComplete, TokensGenerated

try:
    from llama_index.core.base.base_query_engine import BaseQueryEngine
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
    from llama_index.core.callbacks.base import CallbackManager
    from llama_index.core.callbacks.schema import CBEventType, EventPayload
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts.mixin import PromptMixinType
    from llama_index.core.retrievers import QueryFusionRetriever
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
except ImportError:
    raise MissingDependencyError("llama-index-core", install_line("llamaindex")) from None

__all__ = ["LlamaIndexSource", "StreamragNodeRetriever", "StreamragQueryEngine"]

URIS = ("uri", "url", "source", "file_path", "file_name")
"""Keys of a node's metadata for its document's address, in order of precedence."""


class StreamragNodeRetriever(PortalOwner, BaseRetriever):
    """A source as a LlamaIndex retriever, which returns the source's final context.

    A source that must be started is started by the first query, in a thread with its own event loop, or by `async with`
    in the current loop; `close`, or the end of the block, closes it. Other sources run in the caller's loop.

    source: the source to retrieve from.
    top_k: maximum number of nodes.
    callback_manager: LlamaIndex's.

    :raises ConfigurationError: `source` is not a source, or `top_k` is less than 1.
    """

    def __init__(
        self, source: Source, *, top_k: int | None = None, callback_manager: CallbackManager | None = None
    ) -> None:
        if top_k is not None and top_k < 1:
            raise ConfigurationError(f"top_k={top_k} must be at least 1, or None for all")
        self.portal = LoopPortal.to_source(source)
        self._source = source
        self._top_k = top_k
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._nodes(self.portal.run(partial(retrieve_all, self._source, query_bundle.query_str)))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        retrieve = partial(retrieve_all, self._source, query_bundle.query_str)
        return self._nodes(await (self.portal.arun(retrieve) if isinstance(self._source, Startable) else retrieve()))

    def _nodes(self, chunks: Sequence[Chunk]) -> list[NodeWithScore]:
        return list(map(_node, chunks[: self._top_k]))


class StreamragQueryEngine(PortalOwner, BaseQueryEngine):
    """A pipeline as a LlamaIndex query engine.

    With `streaming`, `query` and `aquery` return when retrieval is complete, and the text streams as it is generated;
    otherwise they return the complete answer. In `source_nodes`, nodes of a `LlamaIndexSource` keep their ids and
    metadata. `response.metadata["streamrag"]` has the answer's figures, once it is complete.

    Unless the pipeline has been started, `aquery` starts it in the caller's event loop, and `query` in a thread; then
    `close`, or the end of a `with` block, closes it. In an event loop, use `aclose` and `async with`.

    pipeline: the pipeline that answers.
    streaming: whether to return LlamaIndex's streaming responses.
    callback_manager: LlamaIndex's.
    options: `QueryOptions` for every query.

    :raises ConfigurationError: an option is unknown.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        **options: Unpack[QueryOptions],
    ) -> None:
        check_options(options)
        self.portal = LoopPortal.to_pipeline(pipeline)
        self._pipeline = pipeline
        self._streaming = streaming
        self._options = options
        super().__init__(callback_manager=callback_manager)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def _query(self, query_bundle: QueryBundle) -> Response | StreamingResponse:
        """Return a response: with `streaming`, as soon as retrieval is complete; else with the whole text. Report a
        query event, which ends when the response is returned."""
        with self._event(query_bundle) as event:
            nodes: list[NodeWithScore] = []
            metadata: dict[str, Any] = {}
            texts = self.portal.iterate(lambda: self._texts(query_bundle.query_str, nodes, metadata))
            next(texts)
            response: Response | StreamingResponse
            if self._streaming:
                response = StreamingResponse(texts, nodes, metadata)
            else:
                response = Response("".join(texts), nodes, metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> Response | AsyncStreamingResponse:
        """Return a response as `_query` does, without blocking; start the pipeline first, in this loop, if needed."""
        with self._event(query_bundle) as event:
            await self.portal.settle()
            nodes: list[NodeWithScore] = []
            metadata: dict[str, Any] = {}
            texts = self.portal.aiterate(lambda: self._texts(query_bundle.query_str, nodes, metadata))
            await anext(texts)
            response: Response | AsyncStreamingResponse
            if self._streaming:
                response = AsyncStreamingResponse(texts, nodes, metadata)
            else:
                response = Response("".join([text async for text in texts]), nodes, metadata)
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _texts(
        self, query: str, nodes: list[NodeWithScore], metadata: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        """Fill `nodes`, and `metadata` by node id, and yield ""; yield the answer's pieces of text.

        At last, put its figures and the texts of alternatives into `metadata["streamrag"]`.
        """
        async with self._pipeline.events(query, **self._options) as events:
            async for event in events:
                match event:
                    case ContextComplete(chunks=chunks):
                        nodes += map(_node, chunks)
                        metadata |= {node.node.node_id: node.node.metadata for node in nodes}
                        yield ""
                    case TokensGenerated(text=text) if text:
                        yield text
        answer = events.result
        metadata["streamrag"] = {
            "finish_reason": answer.finish_reason,
            "alternatives": [each.text for each in answer.alternatives],
            "num_prompt_tokens": answer.usage.num_prompt_tokens,
            "num_tokens": answer.usage.num_output_tokens,
            "retrieval_s": answer.timings.retrieval_s,
            "ttft_s": answer.timings.ttft_s,
            "total_s": answer.timings.total_s,
        }

    def _event(self, query_bundle: QueryBundle) -> Any:
        return self.callback_manager.event(CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str})


class LlamaIndexSource:
    """A LlamaIndex retriever as a source.

    Each stage yields an `Update`: every answer of a `QueryFusionRetriever`'s member, fused by reciprocal rank; the
    retriever's own result; and each of the `node_postprocessors`, such as a reranker, that changes the result. The last
    update is the context that LlamaIndex would have put into the prompt; meanwhile the model prefills the earlier ones.

    Retrievers and postprocessors without async methods run in threads, which cancelling the query cannot stop.

    retriever: any LlamaIndex retriever.
    node_postprocessors: postprocessors of the nodes, in this order.
    metadata_mode: the metadata to put before a node's text: "none", or those for the "llm", as in LlamaIndex's own
        query engines.
    name: name of the source; by default the retriever's class.

    :raises ConfigurationError: `retriever` is not a LlamaIndex retriever.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        metadata_mode: Literal["none", "llm"] = "none",
        name: str = "",
    ) -> None:
        if not isinstance(retriever, BaseRetriever):
            raise ConfigurationError(f"LlamaIndexSource: {type_name(retriever)} is not a LlamaIndex retriever")
        self.name = name or type(retriever).__name__
        self._retriever = retriever
        self._postprocessors = tuple(node_postprocessors)
        self._metadata_mode = MetadataMode(metadata_mode)
        self._calls = Threads(MAX_CALLS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an `Update` for the first stage (fusion, retriever, postprocessor), and for each later one that changes
        the chunks, behind a `Skipped` for each node without text. The first may be empty. Errors of LlamaIndex are
        raised as they are.
        """
        reader = PassageReader(self.name)
        before: tuple[Chunk, ...] | None = None
        async with aclosing(self._rankings(query, reader)) as rankings:
            async for chunks in rankings:
                if chunks != before:
                    before = chunks
                    for event in reader.skip_blank(Update(chunks)):
                        yield event

    async def _rankings(self, query: str, reader: PassageReader) -> AsyncGenerator[tuple[Chunk, ...], None]:
        """Yield the chunks of each stage."""
        nodes: list[NodeWithScore] = []
        if isinstance(self._retriever, QueryFusionRetriever):
            async with aclosing(self._fused(query, reader)) as retrieved:
                async for found in retrieved:
                    if isinstance(found, list):
                        nodes = found
                    else:
                        yield found
        else:
            nodes = await self._ask(self._retriever, QueryBundle(query))
        yield self._chunks(nodes, reader)
        for postprocessor in self._postprocessors:
            nodes = await self._postprocess(postprocessor, nodes, QueryBundle(query))
            yield self._chunks(nodes, reader)

    async def _fused(
        self, query: str, reader: PassageReader
    ) -> AsyncGenerator[tuple[Chunk, ...] | list[NodeWithScore], None]:
        """Run a copy of the retriever; after each member's answer to a query but the last, yield the answers so far.

        The answers are fused to at most `similarity_top_k` chunks. Last, yield the list of the retriever's own nodes.
        """
        assert isinstance(self._retriever, QueryFusionRetriever)
        came: asyncio.Queue[tuple[int, list[NodeWithScore]] | None] = asyncio.Queue()
        watched = copy(self._retriever)
        members = watched._retrievers
        watched._retrievers = [
            _Watched(partial(self._ask, member), partial(_tell, came, number))  # type: ignore[misc]
            for number, member in enumerate(members)
        ]
        weights: list[float] = []
        rankings: list[tuple[Chunk, ...]] = []
        task = asyncio.create_task(watched.aretrieve(QueryBundle(query)), name="streamrag fusion")
        task.add_done_callback(lambda _: came.put_nowait(None))
        try:
            while (answer := await came.get()) is not None:
                number, nodes = answer
                weights.append(watched._retriever_weights[number])
                rankings.append(self._chunks(nodes, reader))
                if len(rankings) < len(members) * watched.num_queries:  # otherwise the retriever's own result is next
                    yield reciprocal_rank_fusion(rankings, weights)[: watched.similarity_top_k]
            yield task.result()
        finally:
            await cancel_and_wait([task])

    async def _ask(self, retriever: BaseRetriever, query: QueryBundle) -> list[NodeWithScore]:
        """Return a retriever's nodes, retrieved in the event loop, or in a thread if it has no async method."""
        if type(retriever)._aretrieve is BaseRetriever._aretrieve:  # which would block the event loop
            return await self._calls.run(partial(retriever.retrieve, query))
        return await retriever.aretrieve(query)

    async def _postprocess(
        self, postprocessor: BaseNodePostprocessor, nodes: list[NodeWithScore], query: QueryBundle
    ) -> list[NodeWithScore]:
        """Return a postprocessor's nodes, made in the event loop, or in a thread if it has no async method."""
        if type(postprocessor)._apostprocess_nodes is BaseNodePostprocessor._apostprocess_nodes:
            return await self._calls.run(partial(postprocessor.postprocess_nodes, nodes, query))
        return await postprocessor.apostprocess_nodes(nodes, query)

    def _chunks(self, nodes: Sequence[NodeWithScore], reader: PassageReader) -> tuple[Chunk, ...]:
        return tuple(self._chunk(node, reader) for node in nodes)

    def _chunk(self, found: NodeWithScore, reader: PassageReader) -> Chunk:
        """Return a node's chunk with the node as `origin`. Its uri is from `URIS`, else the document's or node's id."""
        node, metadata = found.node, found.node.metadata
        uri = next((metadata[key] for key in URIS if metadata.get(key)), node.ref_doc_id or node.node_id)
        title = metadata.get("title") or metadata.get("file_name") or ""
        text = "" if is_blank(node.get_content()) else node.get_content(metadata_mode=self._metadata_mode)
        chunk = reader.chunk({"text": text, "uri": uri, "title": title, "score": found.score})
        return FoundChunk(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score, origin=found.node)


@dataclass(frozen=True)
class _Watched:
    """A wrapper of a member that reports its answer immediately."""

    ask: Callable[[QueryBundle], Awaitable[list[NodeWithScore]]]
    tell: Callable[[list[NodeWithScore]], None]

    async def aretrieve(self, query: QueryBundle) -> list[NodeWithScore]:
        nodes = await self.ask(query)
        self.tell(nodes)
        return nodes


def _tell(came: "asyncio.Queue[Any]", number: int, nodes: list[NodeWithScore]) -> None:
    came.put_nowait((number, nodes))


def _node(chunk: Chunk) -> NodeWithScore:
    """Return the chunk's own node with the chunk's score; for another source, a new node with the id `uri#passage`.

    The new node's metadata are uri, title and passage, of which models see only a title.
    """
    if isinstance(chunk, FoundChunk):
        return NodeWithScore(node=chunk.origin, score=chunk.score)
    metadata = {"uri": chunk.uri, "title": chunk.title, "passage": chunk.passage}
    hidden = [key for key in metadata if key != "title" or not chunk.title]
    return NodeWithScore(
        node=TextNode(
            id_=f"{chunk.uri}#{chunk.passage}",
            text=chunk.text,
            metadata=metadata,
            excluded_embed_metadata_keys=hidden,
            excluded_llm_metadata_keys=hidden,
        ),
        score=chunk.score,
    )
