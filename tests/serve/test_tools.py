"""Tools in chat completions, with OpenAI's client; the model is scripted, tokenizer and parser are real."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrag import SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.serve.protocols.chat.requests import MAX_CHARS, MAX_TOOLS
from streamrag.testing import make_tiny_llama
from tests.backends.tools.tool_model import ToolBackend, call, make_tool_llama
from tests.serve.serving import PARIS, Serving, serving
from tests.serve.test_chat import client_of

pytest.importorskip("vllm")

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.backends.tools.parser import ToolCallParser

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
CALLS = "I look it up [1].\n" + call("get_weather", city="Paris") + "\n" + call("get_weather", city="Rome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_llama(tmp_path_factory.mktemp("models") / "model")


def script(prompt: str, params: SamplingParams) -> str:
    if "<tools>" not in prompt:
        return "There is " + call("get_weather", city="no tool")
    return "It is blue [1]." if "<tool_response>" in prompt else CALLS


ServingTools = Callable[[], Any]


@pytest.fixture
def serving_tools(folder: Path) -> ServingTools:
    @asynccontextmanager
    async def make(**options: Any) -> AsyncIterator[Serving]:
        backend = ToolBackend(folder, script)
        async with serving(backend=backend, tool_parser=ToolCallParser("hermes"), **options) as served:
            yield served

    return make


def arguments(calls: Any) -> list[Any]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in calls]


async def test_calls_are_the_same_in_a_stream_and_in_one_piece(serving_tools: ServingTools) -> None:
    async with serving_tools() as served, client_of(served) as client:
        whole = await client.chat.completions.create(model="scripted", messages=[QUESTION], tools=[WEATHER])
        async with client.chat.completions.stream(model="scripted", messages=[QUESTION], tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
    choice = whole.choices[0]
    assert choice.finish_reason == streamed.finish_reason == "tool_calls"
    assert choice.message.content == streamed.message.content
    assert choice.message.content.strip() == "I look it up [1]."
    expected = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    assert arguments(choice.message.tool_calls) == arguments(streamed.message.tool_calls) == expected
    assert [each.type for each in choice.message.tool_calls] == ["function"] * 2
    assert len({each.id for each in choice.message.tool_calls}) == 2
    assert choice.message.annotations[0].url_citation.url == PARIS.uri
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 4
    assert whole.usage.completion_tokens > 20
    assert [params.extra for params in served.backend.params] == [{"skip_special_tokens": False}] * 2
    assert all("get_weather" in text and PARIS.text in text for text in served.backend.texts)


async def test_an_agent_gets_its_answer_from_a_result_and_retrieval_has_the_users_question(
    serving_tools: ServingTools,
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Speak like a pirate."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Ahoy!"},
        QUESTION,
    ]
    async with serving_tools() as served, client_of(served) as client:
        step = await client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
        message = step.choices[0].message
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": f'{{"sky": {i}}}'}
            for i, each in enumerate(message.tool_calls)
        ]
        last = await client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert last.choices[0].message.content == "It is blue [1]."
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].finish_reason == "stop"
    assert served.source.queries == [QUESTION["content"]] * 2
    first, second = served.backend.texts
    assert second.startswith(first.removesuffix("<|end|>\n<|start|>assistant\n"))
    order = ["cite them", "pirate", "Ahoy!", PARIS.text, "weather in Paris?", '"city": "Rome"', '{"sky": 1}']
    places = [second.index(each) for each in order]
    assert places == sorted(places)


async def test_without_tools_or_with_none_an_answer_is_text(serving_tools: ServingTools) -> None:
    async with serving_tools() as served, client_of(served) as client:
        for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await client.chat.completions.create(model="scripted", messages=[QUESTION], **options)
            (choice,) = answer.choices
            assert choice.message.content.startswith("There is <tool_call>")
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert all("get_weather" not in text for text in served.backend.texts)


async def test_parallel_calls_may_be_switched_off_and_a_long_call_is_cut_off(serving_tools: ServingTools) -> None:
    options: dict[str, Any] = {"model": "scripted", "messages": [QUESTION], "tools": [WEATHER]}
    async with serving_tools() as served, client_of(served) as client:
        one = await client.chat.completions.create(**options, parallel_tool_calls=False)
        assert arguments(one.choices[0].message.tool_calls) == [("get_weather", {"city": "Paris"})]
        cut = await client.chat.completions.create(**options, max_tokens=80)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls[0].function.arguments.startswith('{"city"')


def changed(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**WEATHER["function"], **function}}


def deep(depth: int) -> Any:
    return {"a": deep(depth - 1)} if depth else 1


def assistant(**changes: Any) -> dict[str, Any]:
    made = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [{**made, **changes}]}


def called(arguments: str) -> list[Any]:
    return [QUESTION, assistant(function={"name": "f", "arguments": arguments}), RESULT]


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}

INVALID: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [{}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tools": [changed(name="a b")]}, "tools.0.function.name"),
    ({"tools": [changed(name="x" * 65)]}, "tools.0.function.name"),
    ({"tools": [changed(description=7)]}, "tools.0.function.description"),
    ({"tools": [changed(strict=True)]}, "tools.0.function.strict"),
    ({"tools": [changed(parameters=[])]}, "tools.0.function.parameters"),
    ({"tools": [changed(parameters={"type": "array"})]}, "tools.0.function.parameters.type"),
    ({"tools": [changed(parameters={"properties": {"a": 1}})]}, "tools.0.function.parameters.properties.a"),
    ({"tools": [changed(name=f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
    ({"tools": [changed(description="x" * MAX_CHARS)]}, "tools"),
    ({"tools": "all"}, "tools"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
    ({"messages": [assistant(), RESULT]}, "messages"),
    ({"messages": [QUESTION, assistant(id=""), RESULT]}, "messages.1.tool_calls.0.id"),
    ({"messages": [QUESTION, assistant(type="custom"), RESULT]}, "messages.1.tool_calls.0.type"),
    ({"messages": [QUESTION, {**assistant(), "tool_calls": [1]}, RESULT]}, "messages.1.tool_calls.0"),
    (
        {"messages": [QUESTION, {**assistant(), "tool_calls": assistant()["tool_calls"] * (MAX_TOOLS + 1)}, RESULT]},
        "messages.1.tool_calls",
    ),
    ({"messages": called("{")}, "messages.1.tool_calls.0.function.arguments"),
    ({"messages": called("[]")}, "messages.1.tool_calls.0.function.arguments"),
    ({"messages": called("[" * 10_000)}, "messages.1.tool_calls.0.function.arguments"),
    ({"messages": called(json.dumps({"a": "x" * MAX_CHARS}))}, "messages"),
    ({"messages": [QUESTION, assistant(), {**RESULT, "content": [{"type": "image_url"}]}]}, "messages.2.content"),
]


@pytest.mark.parametrize(("body", "param"), INVALID, ids=[f"{i}" for i in range(len(INVALID))])
@pytest.mark.parametrize("stream", [False, True])
async def test_invalid_tools_calls_and_results_are_refused(
    serving_tools: ServingTools, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    async with serving_tools() as served:
        given = {"messages": [QUESTION], "stream": stream, **body}
        answer = await served.http.post("/v1/chat/completions", json=given)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert (await served.http.post("/v1/chat/completions", json={"messages": [QUESTION]})).status_code == 200


async def test_many_texts_are_refused_when_the_prompt_is_made(serving_tools: ServingTools) -> None:
    many = changed(parameters={"enum": [f"! {i}" for i in range(5000)]})
    async with serving_tools() as served:
        body = {"messages": [QUESTION], "tools": [many]}
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, "4,096 texts" in answer.text) == (400, True)
        streamed = await served.http.post("/v1/chat/completions", json={**body, "stream": True})
        assert "4,096 texts" in streamed.text


async def test_a_schema_of_any_depth_does_no_harm(serving_tools: ServingTools) -> None:
    async with serving_tools() as served:
        for schema in (deep(150), {"$ref": "#"}, {"properties": {"city": {"$ref": "#/properties/city"}}}):
            body = {"messages": [QUESTION], "tools": [changed(parameters=schema)]}
            answer = await served.http.post("/v1/chat/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
        assert all("structured_outputs" not in params.extra for params in served.backend.params)


async def test_unknown_fields_of_tools_and_calls_without_results_at_the_end_are_left_out(
    serving_tools: ServingTools,
) -> None:
    async with serving_tools() as served:
        for body in ({"tools": [{**WEATHER, "cache": 1}]}, {"messages": [QUESTION, assistant()]}):
            answer = await served.http.post("/v1/chat/completions", json={"messages": [QUESTION], **body})
            assert answer.status_code == 200, answer.text
        assert all("cache" not in text and "call_1" not in text for text in served.backend.texts)


async def test_tools_without_retrieval_are_shown_with_the_conversation_alone(serving_tools: ServingTools) -> None:
    async with serving_tools() as served, client_of(served) as client:
        step = await client.chat.completions.create(model="scripted-chat", messages=[QUESTION], tools=[WEATHER])
        assert len(step.choices[0].message.tool_calls) == 2
        messages = [QUESTION, assistant(), RESULT]
        last = await client.chat.completions.create(model="scripted", messages=messages, tool_choice="none")
        assert last.choices[0].message.content
    assert served.source.queries == []
    assert all(PARIS.text not in text and QUESTION["content"] in text for text in served.backend.texts)
    assert "blue" in served.backend.texts[-1]


def test_a_parser_needs_a_chat_template_with_tools(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(make_tiny_llama(tmp_path / "model"))
    with pytest.raises(ConfigurationError, match="leaves out tools"):
        ToolCallParser("hermes").load(tokenizer)


async def test_without_a_parser_the_error_says_what_the_operator_can_set() -> None:
    async with serving() as served:
        for body in ({"tools": [WEATHER]}, {"messages": [QUESTION, assistant(), RESULT]}):
            answer = await served.http.post("/v1/chat/completions", json={"messages": [QUESTION], **body})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "tools"
            assert "--tool-call-parser NAME" in error["message"]
