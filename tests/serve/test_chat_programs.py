"""Chat programs: requests that Open WebUI 0.12.4 sent (with fewer tools and shorter texts), and others as the programs'
documentations describe them. And the fields that clients send."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat import completion_create_params

from streamrag import Append, Chunk, OpenAIBackend
from streamrag.serve.citation_marks import document_url
from streamrag.serve.config.checks import check, check_model
from streamrag.serve.config.layers import load
from streamrag.serve.protocols.chat.requests import HARMLESS, ChatRequest
from streamrag.serve.request_fields import UNSUPPORTED
from streamrag.testing import ScriptedBackend
from tests.backends.openai.openai_server import Request, Server, reply
from tests.serve.serving import PARIS, ROME, Serving, serving
from tests.serve.test_chat import QUESTION

REQUESTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "chat_programs.json").read_text())
ITALY = "What is the capital of Italy?"


def prompt_of(served: Serving) -> str:
    return str(served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids))


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_request_of_a_chat_program_is_answered_and_only_questions_are_retrieved_for(name: str) -> None:
    async with serving(ignores_tools=True) as served:
        answer = await served.http.post("/v1/chat/completions", json=REQUESTS[name])
        assert answer.status_code == 200, answer.text
        is_question = REQUESTS[name]["model"] == "scripted"
        assert served.source.queries == ([ITALY] if is_question else [])
        assert (PARIS.text in prompt_of(served)) is is_question
        if REQUESTS[name].get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["model"] == "scripted-chat"
            assert answer.json()["choices"][0]["message"]["annotations"] == []


async def test_tools_are_ignored_however_they_are_written_where_the_operator_says_so() -> None:
    call = {"id": "", "type": "custom", "function": {"name": "f g", "arguments": "{"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "I look it up.", "tool_calls": [call]},
    ]
    body = {
        "messages": messages,
        "tools": [{"type": "x"}] * 200,
        "tool_choice": "required",
        "function_call": {"name": "f"},
    }
    async with serving(ignores_tools=True) as served:
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert served.source.queries == [QUESTION[0]["content"]]


async def test_tools_are_ignored_in_responses_too() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"description": "x" * 20_000}}, {"type": "file_search"}]
    items = [
        *QUESTION,
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
        {"type": "function_call_output", "call_id": "1", "output": "blue"},
    ]
    async with serving(ignores_tools=True) as served:
        for choice, queries in (("required", [QUESTION[0]["content"]]), ("none", [])):
            served.source.queries.clear()
            body = {"input": items, "tools": tools, "tool_choice": choice}
            answer = await served.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["tools"] == [{"type": "file_search"}]
            assert (served.source.queries, "blue" in prompt_of(served)) == (queries, False)


@pytest.mark.parametrize("ignores_tools", [False, True])
@pytest.mark.parametrize("value", ["none", "auto"])
async def test_the_choice_of_a_function_asks_for_nothing_where_there_is_none(value: str, ignores_tools: bool) -> None:
    async with serving(ignores_tools=ignores_tools) as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, "function_call": value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body", [{"model": "scripted-chat"}, {"tool_choice": "none"}, {"model": "scripted-chat", "stream": True}]
)
async def test_without_retrieval_the_prompt_is_the_conversation_alone_as_in_responses(body: dict[str, Any]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello {question}"},
        {"role": "assistant", "content": "Hello!"},
        *QUESTION,
    ]
    async with serving() as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": messages, **body})
        assert answer.status_code == 200, answer.text
        prompts = [prompt_of(served)]
        response = {"input": messages, **{name: body[name] for name in ("model", "tool_choice") if name in body}}
        answer = await served.http.post("/v1/responses", json=response)
        assert answer.json()["model"] == body.get("model", "scripted")
        prompts.append(prompt_of(served))
    assert prompts[0] == prompts[1]
    assert served.source.queries == []


async def test_the_models_are_listed_and_found_by_name() -> None:
    async with serving() as served:
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["scripted", "scripted-chat"]
        for each in listed:
            found = await served.http.get(f"/v1/models/{each['id']}")
            assert (found.status_code, found.json()) == (200, each)
        assert (await served.http.get("/v1/models/")).json()["data"] == listed
        missing = await served.http.get("/v1/models/org/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


NOTHING = {
    "stream": None,
    "top_logprobs": 0,
    "options": {},
    "modalities": ["text"],
    "stop": "",
    "top_k": -1,
    "functions": [],
    "function_call": "",
    "previous_response_id": "",
    "tool_choice": "",
    "response_format": {},
    "logit_bias": {},
    "verbosity": "medium",
    "best_of": 1,
    "min_tokens": 0,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "bad_words": [],
    "stream_options": {"include_usage": None},
}
UNKNOWN = {
    "chat_id": "a",
    "session_id": "b",
    "features": {"web_search": False},
    "variables": {"{{USER_NAME}}": "me"},
    "background_tasks": {"title_generation": True},
    "model_item": {"id": "scripted"},
    "num_ctx": 4096,
    "keep_alive": "5m",
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "x" * 200: 1,
}


@pytest.mark.parametrize(
    "body", [NOTHING, *({name: value} for name, value in UNKNOWN.items())], ids=lambda body: next(iter(body))[:20]
)
async def test_fields_that_ask_for_nothing_or_are_not_openais_are_ignored(body: dict[str, Any]) -> None:
    async with serving() as served:
        for path, question in (("/v1/chat/completions", {"messages": QUESTION}), ("/v1/responses", {"input": "What?"})):
            if path == "/v1/responses" and "reasoning_effort" in body:
                continue  # is of another interface of OpenAI's
            answer = await served.http.post(path, json={**question, **body})
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"] == "application/json"


async def test_ignored_fields_are_logged_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "streamrag.serve")
    async with serving(keys={"one-key": "one"}) as served:
        for body in ({"chat_id": "secret", "num_ctx": 1}, {"chat_id": "b"}, {"store": True, "options": {}}):
            await served.http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    messages = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert messages == ["fields of one that are ignored: chat_id, num_ctx"]


@pytest.mark.parametrize("field", sorted(get_type_hints(completion_create_params.CompletionCreateParamsStreaming)))
def test_each_field_of_openais_is_supported_harmless_or_refused(field: str) -> None:
    assert field in ChatRequest.model_fields or field in HARMLESS or field in UNSUPPORTED


async def test_fields_that_a_chat_template_uses_are_refused() -> None:
    class Thinking(ScriptedBackend):
        chat_template = "{% if enable_thinking %}<think>{% endif %} {{ reasoning_effort }}"

    async with serving() as served:
        served.service.backend.model.tokenizer.whole = Thinking  # type: ignore[attr-defined]
        for body in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(body)))


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
@pytest.mark.parametrize("part", [{"type": "text", "text": "Ahoy"}, {"type": "input_text", "text": "Ahoy"}, "Ahoy"])
async def test_parts_of_text_are_read_in_every_role(role: str, part: Any) -> None:
    async with serving() as served:
        messages = [{"role": role, "content": [part]}, *QUESTION]
        answer = await served.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        assert "Ahoy" in prompt_of(served)


@pytest.mark.parametrize("role", ["assistant", "system", "developer"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_message_behind_the_question_leaves_it_the_question(role: str, path: str) -> None:
    messages = [*QUESTION, {"role": role, "content": "In Italian."}]
    async with serving() as served:
        name = "messages" if path.endswith("completions") else "input"
        answer = await served.http.post(path, json={name: messages})
        assert answer.status_code == 200, answer.text
        assert served.source.queries == [QUESTION[0]["content"]]
        assert ("In Italian." in prompt_of(served)) is (role != "assistant")


STEPS = (
    Append(Chunk("Paris is in France.", "guides/a b.md", "Guide")),
    Append(Chunk("It is big.", "guides/a b.md", "Guide", passage=1)),
    Append(Chunk("Rome is in Italy.", "other.md", "Guide")),
    Append(ROME),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_nth_source_is_the_one_that_the_answer_cites_as_n(stream: bool) -> None:
    text = "Done [3]. Rome [4], Rome [4]."
    async with serving(STEPS, backend=ScriptedBackend(answer=text), base_url="https://docs.example/base/") as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        annotations = chunks[-1]["choices"][0]["delta"]["annotations"]
    else:
        annotations = answer.json()["choices"][0]["message"]["annotations"]
    cited = [each["url_citation"] for each in annotations]
    assert [each["url"] for each in cited] == [
        "https://docs.example/base/guides/a%20b.md",
        "https://docs.example/base/guides/a%20b.md#passage=2",
        "https://docs.example/base/other.md",
        ROME.uri,
        ROME.uri,
    ]
    assert [each["title"] for each in cited] == ["Guide", "Guide (2)", "Guide (3)", ROME.title, ROME.title]
    assert [text[each["start_index"] : each["end_index"]] for each in cited] == ["", "", "[3]", "[4]", "[4]"]
    assert cited[3]["start_index"] < cited[4]["start_index"]


async def test_a_document_without_an_address_is_cited_as_a_file() -> None:
    async with serving(STEPS[:1], backend=ScriptedBackend(answer="Done [1].")) as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION})
    (annotation,) = answer.json()["choices"][0]["message"]["annotations"]
    assert annotation["type"] == "file_citation"
    assert annotation["file_citation"]["filename"] == "a b.md"
    assert annotation["file_citation"]["index"] == 5


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("HTTPS://a.example/x", "HTTPS://a.example/x"),
        ("http://", None),
        ("http://[", None),
        ("javascript:alert(1)", None),
        ("file:///etc/passwd", None),
        ("C:\\a.md", None),
        ("/srv/a#1?.md", "https://b.example/d/srv/a%231%3F.md"),
        ("//evil.example/a", "https://b.example/d/evil.example/a"),
        ("\ud800.md", "https://b.example/d/%3F.md"),
        ("", None),
    ],
)
def test_the_address_of_a_document_is_its_own_or_below_that_of_all(uri: str, url: str | None) -> None:
    assert document_url(uri, "https://b.example/d/") == url


async def test_a_service_whose_server_does_not_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.serve.engine_watch.CHECK_S", 0)
    monkeypatch.setattr("streamrag.serve.engine_watch.READY_S", 60.0)
    async with Server() as server, serving(backend=OpenAIBackend(server.url, "tiny", max_retries=0)) as served:

        async def status() -> int:
            answer = await served.http.get("/readyz")
            assert "127.0.0.1" not in answer.text
            return answer.status_code

        assert await status() == 200
        hold = asyncio.Event()

        async def hangs(request: Request) -> None:
            await hold.wait()

        for handler, expected in (
            (reply({}, 502), 503),
            (reply({}, 404), 200),
            (reply({}, 501), 200),
            (hangs, 503),
            (reply([]), 200),
        ):
            server.send_models = handler
            if handler is hangs:
                monkeypatch.setattr("streamrag.serve.engine_watch.READY_S", 0.5)
            assert await status() == expected
            monkeypatch.setattr("streamrag.serve.engine_watch.READY_S", 60.0)
        hold.set()
        await server.__aexit__(None, None, None)
        assert await status() == 503


async def test_a_check_names_a_model_that_the_server_or_the_machine_does_not_have(tmp_path: Path) -> None:
    async with Server() as server:
        for name, wrong in (("tiny", False), ("other-model", True)):
            problems = await check_model(load(None, {}, {"model.server": server.url, "model.name": name}), print)
            assert [problem.where for problem in problems] == ["option --model.name"] * wrong
        used_anyway = {"model.server": server.url, "model.name": "other-model", "model.max_model_len": 4096}
        lines: list[str] = []
        assert await check_model(load(None, {}, used_anyway), lines.append) == []
        assert "does not serve 'other-model'. It serves: tiny" in lines[1]
    await_later = {"model.server": "http://127.0.0.1:1", "model.name": "other-model"}
    assert await check_model(load(None, {}, await_later), lines.append) == []
    assert lines[-1].startswith("not checked: http://127.0.0.1:1/v1 cannot be reached")


def test_an_address_of_documents_is_one_and_ignored_tools_need_no_parser() -> None:
    for address in ("docs", "https:///docs", "https://docs.example/?page=", "https://docs.example/#"):
        assert any("--source.base_url" in str(each) for each in load(None, {}, {"source.base_url": address}).problems)
    options = {"source.base_url": "docs", "model.ignore_tools": True, "model.tool_call_parser": "hermes"}
    problems = [str(each) for each in check(load(None, {}, {**options, "model.name": "x", "server.port": 0}))]
    assert any("--source.base_url" in each for each in problems)
    assert any("--model.ignore_tools" in each for each in problems)
