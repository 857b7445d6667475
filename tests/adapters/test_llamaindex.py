"""LlamaIndex itself, with retrievers that answer when a test lets them, and scripted ends."""

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import ImageNode, NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.tools import QueryEngineTool

from streamrag import (
    Append,
    Chunk,
    ConfigurationError,
    MergedSource,
    MissingDependencyError,
    Pipeline,
    PipelineClosedError,
    Skipped,
    Source,
    SourceError,
    Update,
)
from streamrag.adapters.llamaindex import LlamaIndexSource, StreamragNodeRetriever, StreamragQueryEngine
from streamrag.testing import ScriptedBackend, ScriptedSource, Step

PARIS = Chunk("Paris is in France.", "geo.md", "Geography", 0, 0.5)
ROME = Chunk("Rome is in Italy.", "geo.md", "Geography", 1)


def node(text: str, score: float | None = None, **metadata: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=f"id of {text}", text=text, metadata=metadata), score=score)


class Plain(BaseRetriever):
    """One that is not async, as most are."""

    def __init__(self, *nodes: NodeWithScore) -> None:
        self.nodes = nodes
        self.threads: list[threading.Thread] = []
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.threads.append(threading.current_thread())
        return [NodeWithScore(node=each.node, score=each.score) for each in self.nodes]


class Held(Plain):
    """One that is, and answers once it may."""

    def __init__(self, *nodes: NodeWithScore) -> None:
        super().__init__(*nodes)
        self.may_answer = anyio.Event()
        self.is_asked = anyio.Event()
        self.is_cancelled = False

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.is_asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return self._retrieve(query_bundle)


class Reversed(BaseNodePostprocessor):
    """A reranker: the last is the best."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert query_bundle
        assert query_bundle.query_str == "Where?"
        return nodes[::-1]


class Unchanged(BaseNodePostprocessor):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return nodes


def fusion(*members: BaseRetriever, **options: Any) -> QueryFusionRetriever:
    return QueryFusionRetriever(list(members), llm=MockLLM(), **{"num_queries": 1, "similarity_top_k": 5, **options})


async def updates(source: Source) -> list[list[str]]:
    found = []
    async for event in source.stream("Where?"):
        assert isinstance(event, Update)
        found.append([chunk.text for chunk in event.chunks])
    return found


async def lets_go_in_order(source: LlamaIndexSource, *members: Held) -> list[list[str]]:
    """The updates, while each member answers once the update of the one before is there."""
    found = []
    events = source.stream("Where?")
    for member in members:
        member.may_answer.set()
        event = await anext(events)
        assert isinstance(event, Update)
        found.append([chunk.text for chunk in event.chunks])
    assert [event async for event in events] == []
    return found


def held_source() -> tuple[ScriptedSource, asyncio.Event]:
    """A source that never ends, and what is set in this loop, whichever it runs in, when it is asked."""
    loop, is_asked = asyncio.get_running_loop(), asyncio.Event()

    def steps(query: str) -> Iterator[Step]:
        loop.call_soon_threadsafe(is_asked.set)
        yield Append(PARIS)
        yield anyio.Event()

    return ScriptedSource(steps), is_asked


# ------------------------------------------------------------------------------------------ our source, as a retriever


async def test_a_source_is_a_retriever_with_the_passages_as_nodes() -> None:
    with StreamragNodeRetriever(ScriptedSource([Append(PARIS), Append(ROME)])) as retriever:
        nodes = await retriever.aretrieve("Where is Paris?")
    assert [(found.text, found.score, found.node_id) for found in nodes] == [
        ("Paris is in France.", 0.5, "geo.md#0"),
        ("Rome is in Italy.", None, "geo.md#1"),
    ]
    assert nodes[0].metadata == {"uri": "geo.md", "title": "Geography", "passage": 0}


def test_a_synchronous_call_of_a_node_retriever_finds_the_same() -> None:
    source = ScriptedSource([Append(PARIS), Update((ROME, PARIS))])
    with StreamragNodeRetriever(source, top_k=1) as retriever:
        assert [found.text for found in retriever.retrieve("Where is Rome?")] == ["Rome is in Italy."]
        assert source.is_started
        assert [found.text for found in asyncio.run(retriever.aretrieve("And now?"))] == ["Rome is in Italy."]
        assert source.queries == ["Where is Rome?", "And now?"]
    assert not source.is_started


async def test_awaiting_a_retriever_leaves_the_event_loop_free_to_others() -> None:
    class Waiting:
        async def stream(self, query: str) -> Any:
            await may_answer.wait()
            yield Append(PARIS)

    may_answer = anyio.Event()
    retrieving = asyncio.create_task(StreamragNodeRetriever(Waiting()).aretrieve("Where?"))
    asyncio.get_running_loop().call_soon(may_answer.set)
    assert len(await retrieving) == 1


async def test_cancelling_a_retrieval_stops_the_source() -> None:
    source, is_asked = held_source()
    with StreamragNodeRetriever(source) as retriever:
        retrieving = asyncio.create_task(retriever.aretrieve("Where?"))
        await is_asked.wait()
        retrieving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await retrieving
    assert source.num_streams == 0


def test_a_failing_source_is_a_failing_retriever() -> None:
    with StreamragNodeRetriever(ScriptedSource([SourceError("no disk")])) as retriever:
        with pytest.raises(SourceError, match="no disk"):
            retriever.retrieve("Where?")


@pytest.mark.parametrize("use_async", [True, False])
def test_a_retriever_of_ours_is_a_member_of_a_fusion(use_async: bool) -> None:
    with StreamragNodeRetriever(ScriptedSource([Append(PARIS)])) as ours:
        found = fusion(ours, Plain(node("Oslo is in Norway.")), use_async=use_async).retrieve("Where?")
    assert sorted(each.text for each in found) == ["Oslo is in Norway.", "Paris is in France."]


def test_a_query_engine_of_llamaindex_puts_our_passages_into_its_prompt() -> None:
    with StreamragNodeRetriever(ScriptedSource([Append(PARIS), Append(Chunk("It rains.", "a"))])) as ours:
        prompt = str(RetrieverQueryEngine.from_args(ours, llm=MockLLM()).query("Where is Paris?"))
    assert "title: Geography\n\nParis is in France.\n\nIt rains." in prompt


def test_a_node_retriever_refuses_a_wrong_source_or_top_k() -> None:
    with pytest.raises(ConfigurationError, match="is not a source"):
        StreamragNodeRetriever(ScriptedSource)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="top_k=0"):
        StreamragNodeRetriever(ScriptedSource([]), top_k=0)


# ------------------------------------------------------------------------------------- our pipeline, as a query engine


def test_a_query_streams_its_answer_behind_its_source_nodes() -> None:
    with StreamragQueryEngine(Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend()), streaming=True) as engine:
        response = engine.query("Where is Paris?")
        assert isinstance(response, StreamingResponse)
        assert [found.text for found in response.source_nodes] == ["Paris is in France."]
        assert list(response.response_gen) == list("An answer.")
        assert response.metadata is not None
        assert response.metadata["geo.md#0"] == {"uri": "geo.md", "title": "Geography", "passage": 0}
        assert response.metadata["streamrag"]["finish_reason"] == "stop"
        assert response.metadata["streamrag"]["num_tokens"] == len("An answer.")
        assert response.metadata["streamrag"]["alternatives"] == []


def test_a_query_engine_is_a_tool_of_llamaindex() -> None:
    with StreamragQueryEngine(Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())) as engine:
        tool = QueryEngineTool.from_defaults(engine, name="geography", description="Where towns are.")
        assert tool.call("Where is Paris?").content == "An answer."


def test_a_query_that_does_not_stream_returns_the_whole() -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    pipeline = Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())
    with StreamragQueryEngine(pipeline, callback_manager=CallbackManager([debug])) as engine:
        for question in ("Where is Paris?", "And Rome?"):
            response = engine.query(question)
            assert isinstance(response, Response)
            assert str(response) == "An answer."
    assert len(debug.get_event_pairs(CBEventType.QUERY)) == 2


async def test_queries_that_are_awaited_run_in_the_callers_event_loop() -> None:
    async with Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend()) as pipeline:
        whole = await StreamragQueryEngine(pipeline).aquery("Where is Paris?")
        assert str(whole) == "An answer."
        response = await StreamragQueryEngine(pipeline, streaming=True).aquery("Where is Paris?")
        assert isinstance(response, AsyncStreamingResponse)
        assert [found.text for found in response.source_nodes] == ["Paris is in France."]
        assert [text async for text in response.async_response_gen()] == list("An answer.")
        assert pipeline.loop is asyncio.get_running_loop()


async def test_a_thread_uses_the_event_loop_that_the_pipeline_runs_in() -> None:
    async with Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend()) as pipeline:
        engine = StreamragQueryEngine(pipeline)
        assert str(await asyncio.to_thread(engine.query, "Where?")) == "An answer."
        with pytest.raises(ConfigurationError, match="use the framework's async method"):
            engine.query("Where?")


async def test_a_pipeline_that_a_query_started_in_a_thread_can_be_awaited() -> None:
    with StreamragQueryEngine(Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())) as engine:
        assert str(engine.query("Where?")) == str(await engine.aquery("Where?")) == "An answer."


def test_an_engine_whose_event_loop_has_ended_says_so() -> None:
    async def ask() -> None:
        async with pipeline:
            await StreamragQueryEngine(pipeline).aquery("Where?")

    pipeline = Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())
    asyncio.run(ask())
    with pytest.raises(PipelineClosedError, match="the event loop that it was started in has ended"):
        StreamragQueryEngine(pipeline).query("Where?")


def test_a_response_that_is_left_early_stops_its_query() -> None:
    backend = ScriptedBackend(is_endless=True)
    with StreamragQueryEngine(Pipeline(ScriptedSource([Append(PARIS)]), backend), streaming=True) as engine:
        response = engine.query("Where?")
        assert isinstance(response, StreamingResponse)
        assert next(response.response_gen) == "A"
        assert backend.num_requests == 1
        response.response_gen.close()
        assert backend.num_requests == 0


async def test_cancelling_a_query_stops_all_of_it() -> None:
    source, is_asked = held_source()
    backend = ScriptedBackend()
    async with Pipeline(source, backend) as pipeline:
        asked = asyncio.create_task(StreamragQueryEngine(pipeline).aquery("Where?"))
        await is_asked.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)


def test_errors_and_options_are_the_pipelines() -> None:
    with StreamragQueryEngine(Pipeline(ScriptedSource([SourceError("no disk")]), ScriptedBackend())) as engine:
        with pytest.raises(SourceError, match="no disk"):
            engine.query("Where?")
    backend = ScriptedBackend()
    with StreamragQueryEngine(Pipeline(ScriptedSource([]), backend), system="Be brief, please.") as engine:
        engine.query("Where?")
    assert "Be brief, please." in backend.model.tokenizer.decode(backend.prompts[0][-1].token_ids)
    with pytest.raises(ConfigurationError, match="no option 'sytem'"):
        StreamragQueryEngine(Pipeline(ScriptedSource([]), backend), sytem="Be brief.")  # type: ignore[call-arg]


@pytest.mark.parametrize("wrap", [lambda source: source, lambda source: MergedSource(source, ScriptedSource([]))])
def test_nodes_of_llamaindex_come_back_as_they_were(wrap: Callable[[Source], Source]) -> None:
    original = node("Oslo is in Norway.", 0.7, file_name="norway.txt", page_label="3")
    source = wrap(LlamaIndexSource(Plain(original)))
    with StreamragQueryEngine(Pipeline(source, ScriptedBackend())) as engine:
        [found] = engine.query("Where?").source_nodes
    assert found.node is original.node


# ----------------------------------------------------------------------------------------- their retriever, as a source


async def test_a_retriever_is_one_update_and_does_not_block_the_event_loop() -> None:
    plain = Plain(node("Oslo", 0.7, file_path="a/norway.txt", file_name="norway.txt"), node("Rome"))
    [event] = [event async for event in LlamaIndexSource(plain).stream("Where?")]
    assert isinstance(event, Update)
    assert [(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score) for chunk in event.chunks] == [
        ("Oslo", "a/norway.txt", "norway.txt", 0, 0.7),
        ("Rome", "id of Rome", "", 0, None),
    ]
    assert threading.main_thread() not in plain.threads
    held = Held(node("Rome"))
    held.may_answer.set()
    assert await updates(LlamaIndexSource(held)) == [["Rome"]]
    assert held.threads == [threading.current_thread()]


async def test_a_node_without_an_address_is_called_by_its_document() -> None:
    first, second = (node(text) for text in ("Oslo", "Bergen"))
    for each in (first, second):
        each.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="norway")
    [event] = [event async for event in LlamaIndexSource(Plain(first, second)).stream("Where?")]
    assert isinstance(event, Update)
    assert [(chunk.uri, chunk.passage) for chunk in event.chunks] == [("norway", 0), ("norway", 1)]


@pytest.mark.parametrize("metadata_mode", ["none", "llm"])
async def test_a_node_without_text_is_skipped(metadata_mode: Any) -> None:
    picture = NodeWithScore(node=ImageNode(image_path="a.png", metadata={"file_name": "a.png"}))
    nodes = Plain(picture, node("Oslo"), node(" ", file_path="blank.txt"))
    source = LlamaIndexSource(nodes, metadata_mode=metadata_mode)
    *skipped, update = [event async for event in source.stream("Where?")]
    assert skipped == [Skipped("a.png", "it has no text"), Skipped("blank.txt", "it has no text")]
    assert isinstance(update, Update)
    assert [chunk.text for chunk in update.chunks] == ["Oslo"]


async def test_metadata_stand_before_the_text_when_that_is_wanted() -> None:
    source = LlamaIndexSource(Plain(node("Oslo", country="Norway")), metadata_mode="llm")
    assert await updates(source) == [["country: Norway\n\nOslo"]]


async def test_an_index_of_llamaindex_is_a_source() -> None:
    nodes = [TextNode(text=text) for text in ("Oslo", "Rome")]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    [found] = await updates(LlamaIndexSource(index.as_retriever(similarity_top_k=2)))
    assert sorted(found) == ["Oslo", "Rome"]


@pytest.mark.parametrize("mode", list(FUSION_MODES))
async def test_members_of_a_fusion_are_updates_as_they_answer_and_its_own_result_is_the_last(
    mode: FUSION_MODES,
) -> None:
    slow, quick = Held(node("Oslo", 0.9), node("Rome", 0.1)), Held(node("Rome", 0.8), node("Bern", 0.3))
    fused = fusion(slow, quick, mode=mode)
    found = await lets_go_in_order(LlamaIndexSource(fused), quick, slow)
    assert found == [["Rome", "Bern"], [each.text for each in await fused.aretrieve("Where?")]]


async def test_members_are_fused_by_reciprocal_rank_while_one_is_missing() -> None:
    members = [Held(node("Oslo"), node("Rome")), Held(node("Bern"), node("Rome")), Held(node("Rome"))]
    source = LlamaIndexSource(fusion(*members, similarity_top_k=2, mode=FUSION_MODES.RECIPROCAL_RANK))
    found = await lets_go_in_order(source, *members)
    assert found[:2] == [["Oslo", "Rome"], ["Rome", "Oslo"]]
    assert found[2][0] == "Rome"


async def test_members_that_are_not_async_run_in_threads() -> None:
    members = [Plain(node("Oslo", 0.2)), Plain(node("Rome", 0.1))]
    assert (await updates(LlamaIndexSource(fusion(*members))))[-1] == ["Oslo", "Rome"]
    assert threading.main_thread() not in members[0].threads + members[1].threads


async def test_the_queries_that_a_fusion_makes_up_are_asked_too() -> None:
    members = [Plain(node("Oslo", 0.2)), Plain(node("Rome", 0.1))]
    assert (await updates(LlamaIndexSource(fusion(*members, num_queries=3))))[-1] == ["Oslo", "Rome"]
    assert [len(member.threads) for member in members] == [3, 3]


async def test_a_member_that_fails_fails_the_source_as_it_fails_the_fusion() -> None:
    class Failing(Plain):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await updates(LlamaIndexSource(fusion(Plain(node("Oslo")), Failing())))


async def test_a_reranker_makes_an_update_and_one_that_changes_nothing_does_not() -> None:
    source = LlamaIndexSource(Plain(node("Oslo"), node("Rome")), node_postprocessors=[Unchanged(), Reversed()])
    assert await updates(source) == [["Oslo", "Rome"], ["Rome", "Oslo"]]


async def test_cancelling_reaches_every_member() -> None:
    members = Held(node("Oslo")), Held(node("Rome"))
    source = LlamaIndexSource(fusion(*members))
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        async with pipeline.stream("Where?"):
            for member in members:
                await member.is_asked.wait()
    assert [member.is_cancelled for member in members] == [True, True]


def test_an_object_that_is_no_llamaindex_retriever_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is not a LlamaIndex retriever"):
        LlamaIndexSource("index")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- the framework


def test_the_parts_of_llamaindex_that_the_adapter_uses_have_not_changed() -> None:
    """If this fails, LlamaIndex has changed: look through the adapter before this list."""

    def parameters(function: Callable[..., Any]) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert BaseRetriever.__abstractmethods__ == {"_retrieve"}
    assert parameters(BaseRetriever._aretrieve) == ["self", "query_bundle"]
    assert parameters(BaseRetriever.aretrieve) == ["self", "str_or_query_bundle"]
    assert Plain._aretrieve is BaseRetriever._aretrieve
    assert Held._aretrieve is not BaseRetriever._aretrieve
    assert BaseQueryEngine.__abstractmethods__ == {"_query", "_aquery", "_get_prompt_modules"}
    assert parameters(BaseNodePostprocessor._apostprocess_nodes) == ["self", "nodes", "query_bundle"]
    assert Reversed._apostprocess_nodes is BaseNodePostprocessor._apostprocess_nodes
    fields = ["response_gen", "source_nodes", "metadata", "response_txt"]
    assert parameters(StreamingResponse) == parameters(AsyncStreamingResponse) == fields
    plain = Plain()
    assert vars(fusion(plain)).items() >= {"num_queries": 1, "similarity_top_k": 5}.items()
    assert fusion(plain)._retrievers == [plain]
    assert fusion(plain)._retriever_weights == [1.0]


def test_without_llamaindex_the_error_has_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "streamrag.adapters.llamaindex")
    monkeypatch.setitem(sys.modules, "llama_index.core.base.base_query_engine", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[llamaindex\]'"):
        importlib.import_module("streamrag.adapters.llamaindex")
