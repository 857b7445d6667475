"""Tools of a pipeline as a LangChain chat model. The model is scripted; its tokenizer and vLLM's parser are real."""

from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.tools import tool

from streamrag import Append, Chunk, ConfigurationError, Pipeline
from streamrag.adapters.langchain import StreamragChatModel, staged_retriever
from streamrag.core import SamplingParams
from streamrag.testing import ScriptedBackend, ScriptedSource
from tests.backends.tools.tool_model import ToolBackend, call, make_tool_llama

pytest.importorskip("vllm")

TICKET = Chunk("The printer jams on thick paper.", "T-101")
QUESTION = "Is the printer's ticket open?"


@tool
def ticket_state(number: Literal["T-101", "T-103"]) -> str:
    """Return the state of a ticket."""
    return f"{number} is open."


def script(prompt: str, params: SamplingParams) -> str:
    question = prompt.rpartition("Question: ")[2]
    if "<tools>" in prompt and "<tool_response>" not in question:
        return "I look. " + call("ticket_state", number="T-101") + call("ticket_state", number="T-103")
    return "It is open [1]."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_llama(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def backend(folder: Path) -> ToolBackend:
    return ToolBackend(folder, script)


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource([Append(TICKET)])


@pytest.fixture
def model(backend: ToolBackend, source: ScriptedSource) -> StreamragChatModel:
    return StreamragChatModel(pipeline=Pipeline(source, backend), tool_parser="hermes")


async def test_calls_stream_as_chunks_and_are_the_message_s(model: StreamragChatModel) -> None:
    async with model:
        bound = model.bind_tools([ticket_state])
        chunks = [chunk async for chunk in bound.astream(QUESTION)]
        whole = await bound.ainvoke(QUESTION)
    assert isinstance(chunks[0], AIMessageChunk)
    streamed = sum(chunks[1:], chunks[0])
    for message in (streamed, whole):
        assert [(each["name"], each["args"]) for each in message.tool_calls] == [
            ("ticket_state", {"number": "T-101"}),
            ("ticket_state", {"number": "T-103"}),
        ]
        assert message.text == "I look. "
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.response_metadata["citations"][0]["uri"] == "T-101"
        assert message.usage_metadata
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 4


async def test_results_in_the_history_are_read_and_the_query_is_the_last_human_message(
    model: StreamragChatModel, backend: ToolBackend, source: ScriptedSource
) -> None:
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("Hello!"), AIMessage("Hi!"), HumanMessage(QUESTION)]
    async with model:
        bound = model.bind_tools([ticket_state])
        messages.append(await bound.ainvoke(messages))
        messages += [ticket_state.invoke(each) for each in messages[-1].tool_calls]
        assert (await bound.ainvoke(messages)).text == "It is open [1]."
        messages += [AIMessage("It is open [1]."), HumanMessage("And the other?")]
        assert (await model.ainvoke(messages)).text == "It is open [1]."
    assert source.queries == [QUESTION, QUESTION, "And the other?"]
    first, second, third = backend.texts
    assert second.startswith(first.removesuffix("<|end|>\n<|start|>assistant\n"))
    order = ["Be brief.", "Hello!", TICKET.text, QUESTION, '"number": "T-103"', "T-103 is open."]
    places = [second.index(each) for each in order]
    assert places == sorted(places)
    assert third.index("T-103 is open.") < third.index(TICKET.text) < third.index("And the other?")
    assert "<tools>" not in third


async def test_a_forced_call_is_a_grammar_of_the_engine_and_none_shows_no_tools(
    model: StreamragChatModel, backend: ToolBackend
) -> None:
    async with model:
        for choice in ("any", "required", True, "ticket_state"):
            await model.bind_tools([ticket_state], tool_choice=choice).ainvoke(QUESTION)
            (constraint,) = backend.params[-1].extra["structured_outputs"].values()
            assert "ticket_state" in constraint
            assert "T-103" not in constraint
        await model.bind_tools([ticket_state], tool_choice="any", strict=True).ainvoke(QUESTION)
        assert "T-103" in str(backend.params[-1].extra["structured_outputs"])
        message = await model.bind_tools([ticket_state], tool_choice="none").ainvoke(QUESTION)
        assert (message.text, message.tool_calls) == ("It is open [1].", [])
        one = await model.bind_tools([ticket_state], parallel_tool_calls=False).ainvoke(QUESTION)
        assert len(one.tool_calls) == 1
        with pytest.raises(ConfigurationError, match="'other': the tools are ticket_state"):
            model.bind_tools([ticket_state], tool_choice="other")


async def test_an_application_s_own_prompt_has_tools_and_results_too(backend: ToolBackend) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use the tickets."), MessagesPlaceholder("past"), ("human", "{context}\nQuestion: {question}")]
    )
    retriever = staged_retriever(lambda query: [Document(TICKET.text, metadata={"source": TICKET.uri})])
    options: dict[str, Any] = {"tool_parser": "hermes"}
    async with StreamragChatModel.from_retriever(retriever, backend, prompt, **options) as model:
        messages: list[Any] = [HumanMessage("Hello!"), AIMessage("Hi!"), HumanMessage(QUESTION)]
        bound = model.bind_tools([ticket_state])
        messages.append(await bound.ainvoke(messages))
        messages += [ToolMessage("open", tool_call_id=each["id"]) for each in messages[-1].tool_calls]
        assert (await bound.ainvoke(messages)).text == "It is open [1]."
    text = backend.texts[-1]
    order = ["Use the tickets.", "Hello!", "Hi!", TICKET.text, f"Question: {QUESTION}", '"number": "T-101"', "\nopen"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


async def test_tools_that_cannot_be_used_are_an_error_that_says_why(folder: Path, source: ScriptedSource) -> None:
    plain = StreamragChatModel(pipeline=Pipeline(source, ScriptedBackend()))
    with pytest.raises(ConfigurationError, match=r"tool_parser='hermes'.*create_retriever_tool"):
        plain.bind_tools([ticket_state])
    with pytest.raises(ConfigurationError, match="tool_parser='hermes'"):
        await plain.ainvoke(QUESTION, tools=[{}])
    with pytest.raises(ValueError, match="no tool parser 'hermse'"):
        StreamragChatModel(pipeline=Pipeline(source, ScriptedBackend()), tool_parser="hermse")
    without = StreamragChatModel(pipeline=Pipeline(source, ScriptedBackend()), tool_parser="hermes")
    async with without:
        with pytest.raises(ConfigurationError, match=r"OpenAIBackend\(url, tokenizer=\.\.\.\)"):
            await without.bind_tools([ticket_state]).ainvoke(QUESTION)
    picture = [{"type": "image", "url": "https://example.org/a.png"}]
    called = AIMessage("", tool_calls=[{"name": "ticket_state", "args": {}, "id": "1"}])
    async with StreamragChatModel(pipeline=Pipeline(source, ToolBackend(folder, script))) as model:
        for messages, why in (
            ([HumanMessage("a"), called, ToolMessage(picture, tool_call_id="1")], "other than text"),
            ([HumanMessage("a"), called], "the last message must be"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                await model.ainvoke(messages)
