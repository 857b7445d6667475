"""Haystack itself, with retrievers that answer when a test lets them, and scripted ends."""

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import haystack
import pytest
from haystack import Document, component
from haystack.components.builders import AnswerBuilder
from haystack.components.joiners import DocumentJoiner
from haystack.components.rankers import LostInTheMiddleRanker
from haystack.components.retrievers import MultiRetriever
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever, InMemoryEmbeddingRetriever
from haystack.core.errors import SerializationError
from haystack.dataclasses import ChatMessage, StreamingChunk, select_streaming_callback
from haystack.document_stores.in_memory import InMemoryDocumentStore

from streamrag import (
    Append,
    Chunk,
    ConfigurationError,
    MergedSource,
    MissingDependencyError,
    Pipeline,
    SamplingParams,
    Skipped,
    Source,
    SourceError,
    Update,
)
from streamrag.adapters.haystack import HaystackSource, StreamragGenerator
from streamrag.testing import ScriptedBackend, ScriptedSource, Step

pytestmark = pytest.mark.filterwarnings("ignore:'MultiRetriever' is an experimental component")

PARIS = Chunk("Paris is in France.", "geo.md", "Geography", 0, 0.5)


@component
class Plain:
    """One that is not async."""

    def __init__(self, *texts: str) -> None:
        self.documents = [Document(content=text) for text in texts]
        self.threads: list[threading.Thread] = []
        self.calls: list[str] = []

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def close(self) -> None:
        self.calls.append("close")

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, Any]:
        self.threads.append(threading.current_thread())
        return {"documents": self.documents[:top_k]}


@component
class Held:
    """One that is, and answers once it may."""

    def __init__(self, *texts: str) -> None:
        self.documents = [Document(content=text) for text in texts]
        self.may_answer = anyio.Event()
        self.is_asked = anyio.Event()
        self.is_cancelled = False

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, Any]:
        return {"documents": self.documents[:top_k]}

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, top_k: int | None = None) -> dict[str, Any]:
        self.is_asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return self.run(query, top_k)


@component
class Reversed:
    """A ranker: the last is the best."""

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document]) -> dict[str, Any]:
        assert query == "Where?"
        return {"documents": documents[::-1]}


def store(*documents: Document) -> InMemoryDocumentStore:
    found = InMemoryDocumentStore()
    found.write_documents(list(documents))
    return found


def answering(source: Source, backend: ScriptedBackend | None = None, **options: Any) -> haystack.Pipeline:
    pipeline = haystack.Pipeline()
    pipeline.add_component("rag", StreamragGenerator(Pipeline(source, backend or ScriptedBackend()), **options))
    return pipeline


async def updates(source: Source) -> list[list[str]]:
    found = []
    async for event in source.stream("Where?"):
        assert isinstance(event, Update)
        found.append([chunk.text for chunk in event.chunks])
    return found


# ----------------------------------------------------------------------------------------- our pipeline, as a component


def test_a_component_streams_the_answer_and_returns_it_with_its_documents() -> None:
    pipeline = answering(ScriptedSource([Append(PARIS)]))
    chunks: list[StreamingChunk] = []
    outputs = pipeline.run({"rag": {"query": "Where is Paris?", "streaming_callback": chunks.append}})["rag"]
    assert [chunk.content for chunk in chunks] == list("An answer.")
    assert [chunk.start for chunk in chunks] == [True] + 9 * [False]
    assert (chunks[0].finish_reason, chunks[-1].finish_reason) == (None, "stop")
    assert chunks[0].component_info is not None
    assert chunks[0].component_info.name == "rag"
    [reply] = outputs["replies"]
    assert reply.text == "An answer."
    assert reply.meta["finish_reason"] == "stop"
    assert reply.meta["usage"]["completion_tokens"] == 10
    [document] = outputs["documents"]
    assert (document.content, document.id, document.score) == ("Paris is in France.", "geo.md#0", 0.5)
    assert document.meta == {"uri": "geo.md", "title": "Geography", "passage": 0}
    pipeline.close()


def test_the_callback_of_the_component_is_used_unless_a_run_has_its_own() -> None:
    own: list[StreamingChunk] = []
    its: list[StreamingChunk] = []
    pipeline = answering(ScriptedSource([]), streaming_callback=own.append)
    pipeline.run({"rag": {"query": "Where?"}})
    pipeline.run({"rag": {"query": "Where?", "streaming_callback": its.append}})
    assert len(own) == len(its) == 10
    pipeline.close()


def test_each_of_several_answers_is_a_reply() -> None:
    pipeline = Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())
    generator = StreamragGenerator(pipeline, params=SamplingParams(n=3))
    replies = generator.run("Where is Paris?")["replies"]
    generator.close()
    assert [(reply.text, reply.meta["index"]) for reply in replies] == [("An answer.", index) for index in range(3)]
    assert {reply.meta["finish_reason"] for reply in replies} == {"stop"}


def test_replies_and_documents_connect_to_an_answer_builder() -> None:
    pipeline = answering(ScriptedSource([Append(PARIS)]))
    pipeline.add_component("builder", AnswerBuilder())
    pipeline.connect("rag.replies", "builder.replies")
    pipeline.connect("rag.documents", "builder.documents")
    outputs = pipeline.run({"rag": {"query": "Where is Paris?"}, "builder": {"query": "Where is Paris?"}})
    [answer] = outputs["builder"]["answers"]
    assert (answer.data, [document.content for document in answer.documents]) == (
        "An answer.",
        ["Paris is in France."],
    )
    pipeline.close()


async def test_haystacks_own_stream_gets_the_pieces_in_the_callers_event_loop() -> None:
    rag = Pipeline(ScriptedSource([Append(PARIS)]), ScriptedBackend())
    pipeline = haystack.Pipeline()
    pipeline.add_component("rag", StreamragGenerator(rag))
    handle = pipeline.stream({"rag": {"query": "Where is Paris?"}})
    assert [chunk.content async for chunk in handle] == list("An answer.")
    assert handle.result["rag"]["replies"][0].text == "An answer."
    assert rag.loop is asyncio.get_running_loop()
    await pipeline.close_async()


async def test_a_callback_may_be_async() -> None:
    async def callback(chunk: StreamingChunk) -> None:
        await asyncio.sleep(0)
        contents.append(chunk.content)

    contents: list[str] = []
    pipeline = answering(ScriptedSource([]))
    await pipeline.run_async({"rag": {"query": "Where?", "streaming_callback": callback}})
    assert "".join(contents) == "An answer."
    await pipeline.close_async()


def test_a_callback_that_raises_stops_the_query() -> None:
    def callback(chunk: StreamingChunk) -> None:
        raise OSError("the reader has left")

    backend = ScriptedBackend(is_endless=True)
    generator = StreamragGenerator(Pipeline(ScriptedSource([]), backend))
    with pytest.raises(OSError, match="the reader has left"):
        generator.run("Where?", streaming_callback=callback)
    assert backend.num_requests == 0
    generator.close()


async def test_cancelling_a_run_stops_all_of_it() -> None:
    is_asked = asyncio.Event()

    def steps(query: str) -> Iterator[Step]:
        is_asked.set()
        yield Append(PARIS)
        yield anyio.Event()

    source, backend = ScriptedSource(steps), ScriptedBackend()
    generator = StreamragGenerator(Pipeline(source, backend))
    running = asyncio.create_task(generator.run_async("Where?"))
    await is_asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (source.num_streams, backend.num_requests) == (0, 0)
    await generator.close_async()


def test_warming_up_starts_the_pipeline_and_closing_closes_it() -> None:
    source, backend = ScriptedSource([]), ScriptedBackend()
    pipeline = answering(source, backend)
    pipeline.warm_up()
    assert (source.is_started, backend.is_started) == (True, True)
    pipeline.close()
    assert (source.is_started, backend.is_started) == (False, False)


def test_history_and_options_are_the_pipelines() -> None:
    backend = ScriptedBackend()
    pipeline = answering(ScriptedSource([]), backend, system="Be brief, please.")
    history = [ChatMessage.from_user("Where is Oslo?"), ChatMessage.from_assistant("In Norway.")]
    pipeline.run({"rag": {"query": "And Rome?", "history": history}})
    prompt = backend.model.tokenizer.decode(backend.prompts[0][-1].token_ids)
    assert "Be brief, please." in prompt
    assert prompt.index("Where is Oslo?") < prompt.index("In Norway.") < prompt.index("And Rome?")
    pipeline.close()
    with pytest.raises(ConfigurationError, match="no option 'sytem'"):
        answering(ScriptedSource([]), sytem="Be brief.")


def test_a_haystack_pipeline_with_our_generator_cannot_be_written_to_a_file() -> None:
    with pytest.raises(SerializationError):
        answering(ScriptedSource([])).dumps()


# ---------------------------------------------------------------------------------------- their retriever, as a source


def test_documents_of_haystack_come_back_as_they_were() -> None:
    original = Document(content="Oslo is in Norway.", meta={"file_path": "a/norway.txt", "title": "Norway", "page": 3})
    pipeline = answering(HaystackSource(InMemoryBM25Retriever(store(original))))
    [found] = pipeline.run({"rag": {"query": "Where is Oslo?"}})["rag"]["documents"]
    assert (found.id, found.meta) == (original.id, original.meta)
    pipeline.close()


async def test_a_retriever_is_one_update_and_does_not_block_the_event_loop() -> None:
    plain = Plain("Oslo", "Rome", "Bern")
    plain.documents[0] = Document(content="Oslo", meta={"url": "a/norway", "title": "Norway"}, score=0.7)
    [event] = [event async for event in HaystackSource(plain, inputs={"top_k": 2}).stream("Where?")]
    assert isinstance(event, Update)
    assert [(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score) for chunk in event.chunks] == [
        ("Oslo", "a/norway", "Norway", 0, 0.7),
        ("Rome", plain.documents[1].id, "", 0, None),
    ]
    assert threading.main_thread() not in plain.threads


async def test_documents_without_text_are_skipped_and_reported_once() -> None:
    plain = Plain("Oslo")
    plain.documents += [Document(id="a picture"), Document(id="a blank", content=" \n")]
    source = HaystackSource(plain, rankers=[Reversed()])
    events = [event async for event in source.stream("Where?")]
    assert [type(event) for event in events] == [Skipped, Skipped, Update]
    assert events[:2] == [Skipped("a picture", "it has no text"), Skipped("a blank", "it has no text")]


async def test_members_of_a_multi_retriever_are_updates_of_a_merged_source_which_ends_as_haystack_does() -> None:
    slow, quick, last = Held("Oslo", "Rome"), Held("Rome", "Bern"), Held("Bern")
    members = {"slow": slow, "quick": quick, "last": last}
    found = []
    events = MergedSource(*map(HaystackSource, members.values())).stream("Where?")
    for member in (quick, slow, last):
        member.may_answer.set()
        event = await anext(events)
        assert isinstance(event, Update)
        found.append([chunk.text for chunk in event.chunks])
    assert [event async for event in events] == []
    whole = await MultiRetriever(retrievers=members).run_async("Where?")
    assert found[0] == ["Rome", "Bern"]
    assert found[-1] == [document.content for document in whole["documents"]]


async def test_a_multi_retriever_is_one_update_as_haystack_fuses_it_and_its_members_run_in_threads() -> None:
    members = {"one": Plain("Oslo"), "two": Plain("Rome")}
    [found] = await updates(HaystackSource(MultiRetriever(retrievers=members)))
    assert sorted(found) == ["Oslo", "Rome"]
    assert threading.main_thread() not in members["one"].threads + members["two"].threads


async def test_a_ranker_makes_an_update_and_one_that_changes_nothing_does_not() -> None:
    source = HaystackSource(Plain("Oslo", "Rome"), rankers=[LostInTheMiddleRanker(), Reversed()])
    assert await updates(source) == [["Oslo", "Rome"], ["Rome", "Oslo"]]


async def test_components_are_warmed_up_and_closed_with_the_source() -> None:
    plain = Plain("Oslo")
    async with Pipeline(HaystackSource(plain), ScriptedBackend()):
        assert plain.calls == ["warm_up"]
    assert plain.calls == ["warm_up", "close"]


async def test_a_component_that_cannot_be_closed_keeps_no_other_open() -> None:
    class Broken(Plain):
        def close(self) -> None:
            super().close()
            raise OSError("it does not close")

    class Lasting(Reversed):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def close(self) -> None:
            self.calls.append("close")

    parts = Broken("Oslo"), Lasting(), Lasting()
    source = HaystackSource(parts[0], rankers=parts[1:])
    with pytest.raises(OSError, match="it does not close"):
        await source.aclose()
    assert [part.calls for part in parts] == [["close"]] * 3


async def test_cancelling_reaches_every_member() -> None:
    members = {"one": Held("Oslo"), "two": Held("Rome")}
    async with Pipeline(HaystackSource(MultiRetriever(retrievers=members)), ScriptedBackend()) as pipeline:
        async with pipeline.stream("Where?"):
            for member in members.values():
                await member.is_asked.wait()
    assert [member.is_cancelled for member in members.values()] == [True, True]


async def test_a_retriever_that_returns_no_list_of_documents_is_a_failed_retrieval() -> None:
    plain = Plain()
    plain.run = lambda query: {"documents": None}
    with pytest.raises(SourceError, match=r"Plain returned .* as documents instead of a list"):
        await updates(HaystackSource(plain))


def test_a_component_that_lacks_a_needed_input_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="put one that takes an embedding into a TextEmbeddingRetriever"):
        HaystackSource(InMemoryEmbeddingRetriever(store()))
    with pytest.raises(ConfigurationError, match="does not take 'query'"):
        HaystackSource(DocumentJoiner())
    with pytest.raises(ConfigurationError, match="does not take 'documents'"):
        HaystackSource(Plain(), rankers=[Plain()])


# --------------------------------------------------------------------------------------------------- the framework


def test_the_parts_of_haystack_that_the_adapter_uses_have_not_changed() -> None:
    """If this fails, Haystack has changed: look through the adapter before this list."""
    assert list(inspect.signature(select_streaming_callback).parameters) == [
        "init_callback",
        "runtime_callback",
        "requires_async",
    ]
    fields = {"content", "meta", "component_info", "index", "start", "finish_reason"}
    assert fields <= {*inspect.signature(StreamingChunk).parameters}
    multi = MultiRetriever(retrievers={"one": Plain()}, top_k=3)
    assert multi.__haystack_supports_async__
    assert "query" in multi.__haystack_input__
    assert StreamragGenerator(Pipeline(ScriptedSource([]), ScriptedBackend())).__haystack_supports_async__
    assert {"warm_up", "warm_up_async", "close", "close_async", "stream"} <= {*dir(haystack.Pipeline)}


def test_without_haystack_the_error_has_the_line_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "streamrag.adapters.haystack")
    monkeypatch.setitem(sys.modules, "haystack", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[haystack\]'"):
        importlib.import_module("streamrag.adapters.haystack")
