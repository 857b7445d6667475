"""LangChain, both ways: what its users call, with its own classes and its own suites of tests."""

import asyncio
import gc
import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel

from streamrag import Append, Chunk, ConfigurationError, CutShort, Pipeline, Skipped, SourceError, Update
from streamrag.adapters.langchain import StreamragChatModel, StreamragRetriever, from_langchain, staged_retriever
from streamrag.core import SamplingParams, SourceEvent
from streamrag.errors import PipelineClosedError
from streamrag.testing import ScriptedBackend, ScriptedSource
from tests.backends.tools.tool_model import ToolBackend, call, make_tool_llama

A, B, C, D = (Chunk(f"text {name}", f"{name}.md", f"Title {name}", 3, 0.5) for name in "abcd")


def document(chunk: Chunk) -> Document:
    return Document(chunk.text, metadata={"source": chunk.uri, "title": chunk.title, "passage": chunk.passage})


def plain(*chunks: Chunk) -> Update:
    return Update(tuple(Chunk(chunk.text, chunk.uri, chunk.title, chunk.passage) for chunk in chunks))


async def events(found_by: Any, query: str = "Why?") -> list[SourceEvent]:
    with anyio.fail_after(120):
        return [event async for event in from_langchain(found_by).stream(query)]


class Finder(BaseRetriever):
    """Finds its documents once `may_answer` is set."""

    documents: list[Document]
    may_answer: Any = None
    asked: list[str] = []  # noqa: RUF012 - a field, copied for each
    error: Any = None
    stopped: Any = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        raise NotImplementedError

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.asked.append(query)
        try:
            if self.may_answer is not None:
                await self.may_answer.wait()
        except asyncio.CancelledError:
            if self.stopped is not None:
                self.stopped.set()
            raise
        if self.error:
            raise self.error
        return self.documents


async def stop_once(has_begun: Callable[[], Any], work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.create_task(work)
    while not has_begun():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def finder(*chunks: Chunk, **options: Any) -> Finder:
    return Finder(documents=list(map(document, chunks)), **options)


class Reversing(BaseDocumentCompressor):
    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> list[Document]:
        scored = [
            Document(each.page_content, metadata={**each.metadata, "relevance_score": number / 10})
            for number, each in enumerate(documents)
        ]
        return scored[:0:-1]


# ------------------------------------------------------------------------------------------- LangChain's own suites


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return StreamragRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        # The suite makes two retrievers of these at once, and a source has one owner.
        return {"source": ScriptedSource([Update((A, B)), Update((A, B, C, D))]), "owns_source": False}

    @property
    def retriever_query_example(self) -> str:
        return "Why?"


@pytest.fixture
def benchmark() -> Callable[[Callable[[], None]], None]:
    """For LangChain's suite, which times making a model; that it can be made is enough here."""
    return lambda call: call()


@pytest.fixture
def vcr() -> None:
    """For LangChain's suite, which can record what goes over a network. Here nothing does."""


@pytest.fixture
def snapshot() -> None:
    """For LangChain's suite, of models that can be written to a file. A pipeline cannot."""


class ConstrainedBackend(ScriptedBackend):
    """Answers as an engine does that constrains answers to a schema."""

    async def generate(self, prompts: Any, params: SamplingParams) -> Any:
        if params.json_schema is not None:
            properties = params.json_schema["properties"]
            self._answer = json.dumps({name: f"a {name}" for name in params.json_schema.get("required", properties)})
        async for event in super().generate(prompts, params):
            yield event


def answer_of_a_model(prompt: str, params: SamplingParams) -> str:
    """Call the first tool with what stands in the question, or answer from a tool's result, or from the schema."""
    question = prompt.rpartition("Question: ")[2]
    if params.json_schema is not None:
        properties = params.json_schema["properties"]
        return json.dumps({name: f"a {name}" for name in params.json_schema.get("required", properties)})
    if "<tool_response>" in question or "<tools>" not in prompt:
        return "An answer."
    function = json.loads(prompt.partition("<tools>\n")[2].partition("\n")[0])["function"]
    quoted = re.search("'(.+?)'", question)
    by_type = {"integer": 3, "string": quoted[1] if quoted else "a text"}
    properties = function["parameters"]["properties"]
    return call(function["name"], **{name: by_type[schema["type"]] for name, schema in properties.items()})


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_llama(tmp_path_factory.mktemp("models") / "model")


class OurModel:
    """The model has tools. Pictures are the model's own business, and a pipeline has none of them."""

    folder: Path

    @pytest.fixture(autouse=True)
    def _has_a_folder(self, tool_folder: Path) -> None:
        type(self).folder = tool_folder

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return StreamragChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        backend = ToolBackend(self.folder, answer_of_a_model)
        return {"pipeline": Pipeline(ScriptedSource([Append(A)]), backend), "tool_parser": "hermes"}


class TestChatModel(OurModel, ChatModelUnitTests):
    pass


class TestChatModelAtWork(OurModel, ChatModelIntegrationTests):
    pass


def test_the_interfaces_are_those_that_this_was_written_for() -> None:
    """When one of these fails, LangChain has moved, and so must the adapter."""

    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(BaseRetriever._aget_relevant_documents) == ["self", "query", "run_manager"]
    assert parameters(BaseRetriever._get_relevant_documents) == ["self", "query", "run_manager"]
    for name in ("_generate", "_agenerate", "_stream", "_astream"):
        assert parameters(getattr(BaseChatModel, name)) == ["self", "messages", "stop", "run_manager", "kwargs"]
    assert parameters(BaseChatModel._get_ls_params) == ["self", "stop", "kwargs"]
    assert parameters(BaseLoader.alazy_load) == ["self"]
    assert parameters(BaseDocumentCompressor.acompress_documents) == ["self", "documents", "query", "callbacks"]
    from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever

    assert {"retrievers", "weights", "c"} <= EnsembleRetriever.model_fields.keys()
    assert {"base_retriever", "base_compressor"} <= ContextualCompressionRetriever.model_fields.keys()


# ----------------------------------------------------------------------------------------------------- the retriever


async def test_documents_have_where_they_come_from_and_a_stable_id() -> None:
    retriever = StreamragRetriever(source=ScriptedSource([Append(A), Append(Chunk("other", "a.md"))]))
    first, other = await retriever.ainvoke("Why?")
    assert first.page_content == "text a"
    assert first.metadata == {"source": "a.md", "title": "Title a", "passage": 3, "score": 0.5}
    assert other.metadata == {"source": "a.md", "title": "", "passage": 0}
    again = await StreamragRetriever(source=ScriptedSource([Update((A,))])).ainvoke("How?")
    assert [each.id for each in again] == [first.id]
    assert first.id != other.id


async def test_k_is_the_calls_or_the_retrievers_and_may_be_configured() -> None:
    retriever = StreamragRetriever(source=ScriptedSource([Update((A, B, C))]), k=2)
    assert len(await retriever.ainvoke("Why?")) == 2
    assert len(await retriever.ainvoke("Why?", k=1)) == 1
    configurable = retriever.configurable_fields(k=ConfigurableField(id="k"))
    assert len(await configurable.ainvoke("Why?", config={"configurable": {"k": 3}})) == 3
    with pytest.raises(ConfigurationError, match="at least 1"):
        await retriever.ainvoke("Why?", k=0)


async def test_custom_events_carry_what_the_source_brings() -> None:
    source = ScriptedSource([Append(A), Skipped("x.md", "gone"), Update((B, A)), CutShort("no time")])
    retriever = StreamragRetriever(source=source, k=1)
    told = [
        (event["name"], event["data"])
        async for event in retriever.astream_events("Why?", version="v2")
        if event["event"] == "on_custom_event"
    ]
    names = [name for name, _ in told]
    assert names == ["streamrag_append", "streamrag_skipped", "streamrag_update", "streamrag_cut_short"]
    assert told[0][1]["document"].page_content == "text a"
    assert told[1][1] == {"source": "x.md", "reason": "gone"}
    assert [each.page_content for each in told[2][1]["documents"]] == ["text b"]
    assert told[3][1] == {"reason": "no time"}


def test_custom_events_of_a_call_that_is_not_async_come_in_the_callers_thread() -> None:
    threads = []

    class Handler(BaseCallbackHandler):
        def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
            threads.append((name, threading.current_thread()))

    with StreamragRetriever(source=ScriptedSource([Append(A)])) as retriever:
        retriever.invoke("Why?", config={"callbacks": [Handler()]})
    assert threads == [("streamrag_append", threading.current_thread())]


async def test_a_langchain_retriever_refuses_an_object_without_a_stream_method() -> None:
    with pytest.raises(ValueError, match="no method 'stream'"):
        StreamragRetriever(source=object())


async def test_cancelling_a_call_stops_its_retrieval() -> None:
    source = ScriptedSource([Append(A), 3600.0])
    for retriever in (StreamragRetriever(source=source), StreamragRetriever(source=source)):
        if source.queries:  # once in a thread of its own, once in this loop
            await retriever.__aenter__()
        await stop_once(lambda: source.num_streams, retriever.ainvoke("Why?"))
        assert source.num_streams == 0
        await retriever.aclose()
    assert len(source.queries) == 2


# ------------------------------------------------------------------------------------------- who lives where, and ends


def test_a_retriever_answers_with_and_without_a_loop_and_closes_with_its_block() -> None:
    source = ScriptedSource([Append(A)])
    with StreamragRetriever(source=source) as retriever:
        assert len(retriever.invoke("Why?")) == 1
        assert source.is_started
        for _ in range(2):
            assert len(asyncio.run(retriever.ainvoke("Why?"))) == 1
        assert [len(found) for found in retriever.batch(["a", "b", "c"])] == [1, 1, 1]
    assert not source.is_started
    with pytest.raises(PipelineClosedError, match="closed"):
        retriever.invoke("Why?")
    with pytest.raises(PipelineClosedError, match="closed"):
        asyncio.run(retriever.ainvoke("Why?"))


async def test_an_async_block_runs_the_source_in_its_loop_and_threads_may_ask_too() -> None:
    loops = []

    class Source(ScriptedSource):
        def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            loops.append(asyncio.get_running_loop())
            return super().stream(query)

    source = Source([Append(A)])
    async with StreamragRetriever(source=source) as retriever:
        assert source.is_started
        await retriever.ainvoke("Why?")
        assert len(await asyncio.to_thread(retriever.invoke, "Why?")) == 1
        with pytest.raises(ConfigurationError, match="use ainvoke"):
            retriever.invoke("Why?")
    assert not source.is_started
    assert loops == [asyncio.get_running_loop()] * 2


async def test_a_call_that_is_not_async_works_beside_a_running_loop() -> None:
    """As in a notebook."""
    retriever = StreamragRetriever(source=ScriptedSource([Append(A)]))
    assert len(retriever.invoke("Why?")) == 1
    await retriever.aclose()


def test_a_dropped_retriever_closes_its_source_and_ends_its_thread() -> None:
    source = ScriptedSource([Append(A)])
    retriever = StreamragRetriever(source=source)
    threads = {*threading.enumerate()}
    retriever.invoke("Why?")
    (thread,) = {*threading.enumerate()} - threads
    assert source.is_started
    del retriever
    gc.collect()
    assert not source.is_started
    thread.join(20)
    assert not thread.is_alive()


def test_a_program_that_closes_nothing_ends_and_closes_it() -> None:
    code = """
from streamrag import Append, Chunk, Pipeline
from streamrag.adapters.langchain import StreamragChatModel
from streamrag.testing import ScriptedBackend, ScriptedSource

class Backend(ScriptedBackend):
    async def aclose(self):
        print("closed")

model = StreamragChatModel(pipeline=Pipeline(ScriptedSource([Append(Chunk("a", "a.md"))]), Backend()))
print(model.invoke("Why?").text)
"""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("An answer.\nclosed\n", "")


def test_closing_ends_the_calls_that_are_under_way() -> None:
    class Source(ScriptedSource):
        def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            is_asked.set()
            return super().stream(query)

    is_asked = threading.Event()
    source = Source([3600.0])
    retriever = StreamragRetriever(source=source)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            retriever.invoke("Why?")
        except PipelineClosedError as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert is_asked.wait(20)
    retriever.close()
    asking.join(20)
    assert len(raised) == 1
    assert (source.num_streams, source.is_started) == (0, False)


def test_a_source_that_does_not_start_is_tried_again() -> None:
    class Source(ScriptedSource):
        num_starts = 0

        async def start(self, progress: Any) -> None:
            self.num_starts += 1
            if self.num_starts == 1:
                raise SourceError("no route")
            await super().start(progress)

    with StreamragRetriever(source=Source([Append(A)])) as retriever:
        with pytest.raises(SourceError, match="no route"):
            retriever.invoke("Why?")
        assert len(retriever.invoke("Why?")) == 1


async def test_a_source_that_a_retriever_does_not_own_is_not_started() -> None:
    source = ScriptedSource([Append(A)])
    async with StreamragRetriever(source=source, owns_source=False) as retriever:
        assert len(await retriever.ainvoke("Why?")) == 1
        assert not source.is_started


async def test_a_pipeline_that_runs_already_is_asked_in_its_own_loop() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend()) as pipeline:
        model = StreamragChatModel(pipeline=pipeline)
        assert (await model.ainvoke("Why?")).content == "An answer."
        assert (await asyncio.to_thread(model.invoke, "Why?")).content == "An answer."
        with pytest.raises(ConfigurationError, match="use ainvoke"):
            model.invoke("Why?")


def test_a_model_starts_and_closes_its_pipeline() -> None:
    backend = ScriptedBackend()
    with StreamragChatModel(pipeline=Pipeline(ScriptedSource([Append(A)]), backend)) as model:
        assert model.invoke("Why?").content == "An answer."
        assert asyncio.run(model.ainvoke("Why?")).content == "An answer."
        assert backend.is_started
    assert not backend.is_started


def test_a_pipeline_whose_loop_has_ended_says_so() -> None:
    async def started() -> StreamragChatModel:
        async with Pipeline(ScriptedSource([]), ScriptedBackend()) as pipeline:
            return StreamragChatModel(pipeline=pipeline)

    with pytest.raises(PipelineClosedError, match="has ended"):
        asyncio.run(started()).invoke("Why?")


# ---------------------------------------------------------------------------------------------------- the chat model


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend(answer="It jams [1].")


@pytest.fixture
def model(backend: ScriptedBackend) -> Iterator[StreamragChatModel]:
    with StreamragChatModel(pipeline=Pipeline(ScriptedSource([Append(A), Append(B)]), backend)) as model:
        yield model


def prompt(backend: ScriptedBackend) -> str:
    return "".join(map(chr, backend.prompts[-1][-1].token_ids))


async def test_chunks_come_one_by_one_and_the_last_has_usage_and_citations(
    model: StreamragChatModel, backend: ScriptedBackend
) -> None:
    chunks = [chunk async for chunk in model.astream("Why does it jam?")]
    assert [chunk.content for chunk in chunks] == [*"It jams [1].", ""]
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    num_prompt = len(backend.prompts[0][-1].token_ids)
    assert whole.usage_metadata == {"input_tokens": num_prompt, "output_tokens": 12, "total_tokens": num_prompt + 12}
    first, second = whole.response_metadata["citations"]
    assert first == {
        "number": 1, "uri": "a.md", "title": "Title a", "passage": 3, "text": "text a", "score": 0.5, "rank": None,
    }  # fmt: skip
    assert second["number"] == 2
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.response_metadata["model_name"] == "scripted"
    assert whole.response_metadata["timings"]["ttft_s"] > 0
    assert whole.response_metadata["overlap"] == {"way": "immediate", "reason": "until others were tried"}
    assert "left_out" not in whole.response_metadata
    assert len(backend.prompts[0]) == 4  # the head, and two while retrieval ran


def test_sources_that_do_not_fit_are_told(model: StreamragChatModel) -> None:
    message = model.invoke("Why?", max_context_tokens=5, overlap=False)
    assert message.response_metadata["citations"] == []
    assert message.response_metadata["left_out"] == ["a.md", "b.md"]
    assert message.response_metadata["overlap"] == {"way": "none", "reason": "overlap=False"}


def test_alternatives_come_with_the_metadata(model: StreamragChatModel) -> None:
    message = model.invoke("Why?", n=3)
    assert message.text == "It jams [1]."
    assert message.response_metadata["alternatives"] == ["It jams [1]."] * 2
    assert message.usage_metadata
    assert message.usage_metadata["output_tokens"] == 36
    assert "alternatives" not in model.invoke("Why?").response_metadata


def test_the_chat_model_gives_one_message_or_a_stream_of_its_pieces(model: StreamragChatModel) -> None:
    message = model.invoke("Why?")
    assert isinstance(message, AIMessage)
    assert message.text == "It jams [1]."
    assert message.usage_metadata
    assert message.usage_metadata["output_tokens"] == 12
    assert len(message.response_metadata["citations"]) == 2
    assert [chunk.content for chunk in model.stream("Why?")] == [*"It jams [1].", ""]


async def test_the_chat_model_composes_with_a_prompt_template_and_a_parser(
    model: StreamragChatModel, backend: ScriptedBackend
) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "{q}")]) | model | StrOutputParser()
    assert [text async for text in chain.astream({"q": "Why?"}) if text] == [*"It jams [1]."]
    assert "Be brief." in prompt(backend)
    assert "Answer the question from the documents" not in prompt(backend)
    assert prompt(backend).rstrip().endswith("Question: Why?\n\nAssistant:")
    assert chain.batch([{"q": "a"}, {"q": "b"}]) == ["It jams [1]."] * 2


async def test_messages_are_system_text_history_and_query(model: StreamragChatModel, backend: ScriptedBackend) -> None:
    await model.ainvoke([HumanMessage("Hello"), AIMessage("Hi!"), HumanMessage([{"type": "text", "text": "Why?"}])])
    asked = prompt(backend)
    assert "Answer the question from the documents" in asked
    assert asked.index("User: Hello") < asked.index("Assistant: Hi!") < asked.index("Question: Why?")
    picture = {"type": "image", "url": "https://example.org/a.png"}
    for wrong, why in (
        ([HumanMessage("a"), AIMessage("b")], "last message must be a human message"),
        ([SystemMessage("a")], "last message must be a human message"),
        ([ToolMessage("a", tool_call_id="1"), HumanMessage("b")], "for tools"),
        ([HumanMessage([picture])], "content other than text"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            await model.ainvoke(wrong)


async def test_options_are_the_models_the_calls_and_those_of_a_query(
    model: StreamragChatModel, backend: ScriptedBackend
) -> None:
    short = StreamragChatModel(pipeline=model.pipeline, max_tokens=5, portal=model.portal)
    assert (await short.ainvoke("Why?")).text == "It ja"
    assert (await short.bind(max_tokens=2, temperature=0.5).ainvoke("Why?")).text == "It"
    message = await model.ainvoke("Why?", stop=["END"], max_context_tokens=0, system="Sing.")
    assert message.response_metadata["citations"] == []
    assert "Sing." in prompt(backend)
    with pytest.raises(ConfigurationError, match="did you mean"):
        await model.ainvoke("Why?", temprature=1.0)
    with pytest.raises(ConfigurationError, match="temperature=-1"):
        await model.ainvoke("Why?", temperature=-1)
    with pytest.raises(ConfigurationError, match="must be an instance of SamplingParams"):
        await model.ainvoke("Why?", params={}, max_tokens=3)


def test_without_langchain_the_error_has_the_install_line() -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import streamrag.adapters.langchain"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "langchain-core is not installed. Install it with:  pip install '.[langchain]'" in ended.stderr


async def test_a_cache_for_all_models_does_not_keep_answers_from_documents(
    model: StreamragChatModel, backend: ScriptedBackend
) -> None:
    set_llm_cache(InMemoryCache())
    try:
        for _ in range(2):
            await model.ainvoke("Why?")
    finally:
        set_llm_cache(None)
    assert len(backend.prompts) == 2


async def test_cancelling_stops_the_query() -> None:
    source, backend = ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)
    model = StreamragChatModel(pipeline=Pipeline(source, backend))
    await stop_once(lambda: backend.num_requests, model.ainvoke("Why?"))
    assert (source.num_streams, backend.num_requests) == (0, 0)
    await model.aclose()
    assert not backend.is_started


async def test_leaving_a_loop_early_stops_the_query() -> None:
    is_stopped = threading.Event()

    class Backend(ScriptedBackend):
        async def generate(self, prompts: Any, params: Any) -> AsyncIterator[Any]:
            try:
                async for event in super().generate(prompts, params):
                    yield event
            finally:
                is_stopped.set()

    model = StreamragChatModel(pipeline=Pipeline(ScriptedSource([Append(A)]), Backend(is_endless=True)))
    async for chunk in model.astream("Why?"):
        assert chunk.content == "A"
        break
    assert await asyncio.to_thread(is_stopped.wait, 20)
    is_stopped.clear()
    for chunk in model.stream("Why?"):
        assert chunk.content == "A"
        break
    assert is_stopped.wait(20)
    await model.aclose()


async def test_langgraph_streams_its_tokens(model: StreamragChatModel) -> None:
    from langgraph.graph import START, MessagesState, StateGraph

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def answer_in_thread(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    for node in (answer, answer_in_thread):
        graph = StateGraph(MessagesState).add_node("answer", node).add_edge(START, "answer").compile()
        question: Any = {"messages": [HumanMessage("Why?")]}
        texts = [message.text async for message, _ in graph.astream(question, stream_mode="messages")]
        assert [text for text in texts if text] == [*"It jams [1]."]


# --------------------------------------------------------------------------------------- LangChain's parts as sources


async def test_a_loader_appends_documents_as_they_are_loaded() -> None:
    class Loader(BaseLoader):
        async def alazy_load(self) -> AsyncIterator[Document]:
            yield document(A)
            yield document(B)

    expected = [Append(each) for each in plain(A, B).chunks]
    assert await events(Loader()) == expected

    class SearchLoader(Loader):
        def __init__(self, query: str) -> None:
            assert query == "Why?"

    assert await events(lambda query: SearchLoader(query)) == expected

    class Lazy(BaseLoader):
        """Is asked in a thread, by LangChain."""

        def lazy_load(self) -> Iterator[Document]:
            yield document(A)
            yield document(B)

    assert await events(Lazy()) == expected


async def test_a_retriever_a_vector_store_and_a_runnable_are_one_update() -> None:
    assert await events(finder(A, B)) == [plain(A, B)]
    assert await events(RunnableLambda(lambda query: f"{query}!") | finder(A)) == [plain(A)]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    await store.aadd_documents([document(A)])
    assert await events(store) == [plain(A)]


async def test_documents_without_metadata_are_of_the_sources_name() -> None:
    retriever = Finder(documents=[Document("one"), Document("two", metadata={"relevance_score": 0.3})])
    assert await events(retriever) == [Update((Chunk("one", "Finder"), Chunk("two", "Finder", "", 1, 0.3)))]


def classic() -> tuple[Any, Any]:
    from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever

    return EnsembleRetriever, ContextualCompressionRetriever


async def test_an_ensemble_is_an_update_as_each_member_answers_and_ends_as_its_own_answer() -> None:
    ensemble_retriever, _ = classic()
    gate = anyio.Event()
    slow = finder(C, B, may_answer=gate)
    ensemble = ensemble_retriever(retrievers=[slow, finder(A, B)], weights=[0.9, 0.1], c=10)
    found: list[SourceEvent] = []
    with anyio.fail_after(120):
        async for event in from_langchain(ensemble).stream("Why?"):
            found.append(event)
            gate.set()
    assert found == [plain(A, B), plain(B, C, A)]
    whole = await ensemble.ainvoke("Why?")
    last = found[-1]
    assert isinstance(last, Update)
    assert [chunk.text for chunk in last.chunks] == [each.page_content for each in whole]


async def test_the_same_text_under_two_sources_is_there_once_as_in_an_ensemble_of_langchain() -> None:
    ensemble_retriever, _ = classic()
    twin = Chunk(A.text, "https://mirror.example/a", "A copy")
    for weights in ([0.5, 0.5], [0.1, 0.9]):
        ensemble = ensemble_retriever(retrievers=[finder(A, B), finder(C, twin, B)], weights=weights)
        *_, last = await events(ensemble)
        assert isinstance(last, Update)
        whole = await ensemble.ainvoke("Why?")
        assert [(chunk.text, chunk.uri) for chunk in last.chunks] == [
            (each.page_content, each.metadata["source"]) for each in whole
        ]


async def test_a_document_without_text_is_skipped_from_every_component() -> None:
    ensemble_retriever, compression_retriever = classic()
    blank = Chunk(" ", "blank.md")
    skipped = Skipped("blank.md", "it has no text")
    ensemble = ensemble_retriever(retrievers=[finder(A, blank)], weights=[1.0])
    nested = compression_retriever(base_retriever=finder(A, blank), base_compressor=Reversing())
    for found in (finder(A, blank), lambda query: [document(A), document(blank)], ensemble, nested):
        seen = await events(found)
        assert seen[:2] == [skipped, plain(A)]
        assert seen[2:] == ([Update(())] if found is nested else [])
    stages = staged_retriever(lambda query: [document(blank)]).source
    assert [event async for event in stages.stream("Why?")] == [skipped, Update(())]


async def test_members_of_an_ensemble_agree_on_documents_that_have_no_source() -> None:
    ensemble_retriever, _ = classic()

    class Other(Finder):
        pass

    texts = [Document("one"), Document("two")]
    ensemble = ensemble_retriever(retrievers=[Finder(documents=texts), Other(documents=texts[::-1])], weights=[1, 1])
    last = (await events(ensemble))[-1]
    assert isinstance(last, Update)
    assert len(last.chunks) == 2


async def test_a_member_that_fails_is_skipped_unless_all_fail() -> None:
    ensemble_retriever, _ = classic()
    broken = finder(error=OSError("no route"))
    found = await events(ensemble_retriever(retrievers=[broken, finder(A)], weights=[0.5, 0.5]))
    assert plain(A) in found
    assert Skipped("Finder", "the source failed") in found
    with pytest.raises(SourceError, match="EnsembleRetriever failed: no route; no route"):
        await events(ensemble_retriever(retrievers=[broken, broken], weights=[0.5, 0.5]))


async def test_compressing_is_an_update_before_and_one_after() -> None:
    ensemble_retriever, compression_retriever = classic()
    reranked = compression_retriever(base_retriever=finder(A, B, C), base_compressor=Reversing())
    before, after = await events(reranked)
    assert before == plain(A, B, C)
    assert isinstance(after, Update)
    assert [(chunk.uri, chunk.score) for chunk in after.chunks] == [("c.md", 0.2), ("b.md", 0.1)]
    ensemble = ensemble_retriever(retrievers=[finder(A, B), finder(B, C)], weights=[0.5, 0.5])
    nested = compression_retriever(base_retriever=ensemble, base_compressor=Reversing())
    found = await events(nested)
    assert len(found) == 3
    last = found[-1]
    assert isinstance(last, Update)
    assert [chunk.text for chunk in last.chunks] == [each.page_content for each in await nested.ainvoke("Why?")]
    assert await events(compression_retriever(base_retriever=finder(), base_compressor=Reversing())) == [plain()]


async def test_a_retriever_with_fallbacks_or_bound_options_is_asked_as_a_whole() -> None:
    """A fallback, or options that are bound, would be lost if the parts inside were asked."""
    ensemble_retriever, _ = classic()
    broken = ensemble_retriever(retrievers=[finder(error=OSError("no route"))], weights=[1.0])
    assert await events(broken.with_fallbacks([finder(A)])) == [plain(A)]
    ensemble = ensemble_retriever(retrievers=[finder(A), finder(B)], weights=[0.5, 0.5])
    assert len(await events(ensemble.with_config(tags=["mine"]))) == 1


async def test_objects_and_results_of_other_kinds_are_refused_as_langchain_sources() -> None:
    for wrong in (42, Finder, "retriever"):
        with pytest.raises(ConfigurationError, match="neither a retriever"):
            from_langchain(wrong)
    with pytest.raises(SourceError, match="instead of a list"):
        await events(RunnableLambda(lambda query: "text"))
    with pytest.raises(SourceError, match="is no loader or retriever"):
        await events(lambda query: 42)


async def test_a_function_of_the_query_may_return_documents() -> None:
    async def find(query: str) -> list[Document]:
        return [document(A)]

    assert await events(find) == await events(lambda query: [document(A)]) == [plain(A)]


async def test_a_function_that_searches_does_not_hold_up_the_event_loop() -> None:
    has_time = threading.Event()

    def find(query: str) -> list[Document]:
        assert has_time.wait(20), "the event loop stands still"
        return [document(A)]

    asyncio.get_running_loop().call_later(0.01, has_time.set)
    assert await events(find) == [plain(A)]


async def test_stopping_a_query_stops_langchains_retrievers() -> None:
    ensemble_retriever, _ = classic()
    never, stopped = anyio.Event(), [anyio.Event(), anyio.Event()]
    members = [finder(A, may_answer=never, stopped=each) for each in stopped]
    source = from_langchain(ensemble_retriever(retrievers=members, weights=[0.5, 0.5]))
    async with Pipeline(source, ScriptedBackend()) as pipeline:

        async def ask() -> None:
            _ = [chunk async for chunk in pipeline.stream("Why?")]

        await stop_once(lambda: all(each.asked for each in members), ask())
    assert [each.is_set() for each in stopped] == [True, True]


async def test_a_pipeline_on_langchains_retriever_and_back_to_langchain() -> None:
    """The whole way round: LangChain's retriever, streamrag, LangChain's chain."""
    async with StreamragChatModel(pipeline=Pipeline(from_langchain(finder(A)), ScriptedBackend())) as model:
        assert await (model | StrOutputParser()).ainvoke("Why?") == "An answer."
    async with StreamragRetriever(source=from_langchain(finder(A))) as retriever:
        (found,) = await retriever.ainvoke("Why?")
    assert found.metadata["source"] == "a.md"
    assert await events(Finder(documents=[found])) == [plain(A)]


class Jam(BaseModel):
    cause: str
    place: str = "floor 2"


async def test_structured_output_is_parsed_and_its_raw_message_has_the_citations() -> None:
    pipeline = Pipeline(ScriptedSource([Append(A)]), ConstrainedBackend())
    async with StreamragChatModel(pipeline=pipeline) as model:
        assert await model.with_structured_output(Jam).ainvoke("Why?") == Jam(cause="a cause")
        schema = {"title": "Jam", "type": "object", "properties": {"cause": {"type": "string"}}}
        assert await model.with_structured_output(schema).ainvoke("Why?") == {"cause": "a cause"}
        whole = await model.with_structured_output(Jam, include_raw=True).ainvoke("Why?")
        assert whole["raw"].response_metadata["citations"][0]["uri"] == "a.md"
        assert (whole["parsed"], whole["parsing_error"]) == (Jam(cause="a cause"), None)


async def test_an_answer_that_does_not_follow_its_schema_is_an_error_of_the_parser() -> None:
    async with StreamragChatModel(pipeline=Pipeline(ScriptedSource([]), ScriptedBackend("no JSON"))) as model:
        with pytest.raises(OutputParserException):
            await model.with_structured_output(Jam).ainvoke("Why?")
        whole = await model.with_structured_output(Jam, include_raw=True).ainvoke("Why?")
        assert whole["parsed"] is None
        assert isinstance(whole["parsing_error"], OutputParserException)
