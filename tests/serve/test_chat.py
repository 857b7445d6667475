"""Chat completions, asked with OpenAI's own client library over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import openai
import pytest

from streamrag import Append, BackendError, SourceError
from streamrag.core import AnswerChunk, BackendEvent, Prompt, SamplingParams
from streamrag.query.options import MAX_DRAFT
from streamrag.records import RequestRecord
from streamrag.serve import Limits
from streamrag.serve.connections import sse
from streamrag.testing import ScriptedBackend
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, serving

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def client_of(served: Serving, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


async def test_an_answer_has_text_citations_and_usage() -> None:
    async with serving() as served, client_of(served) as client:
        answer = await client.chat.completions.create(model="scripted", messages=QUESTION)
    (choice,) = answer.choices
    assert choice.message.content == "It is Paris [1]."
    assert choice.message.role == "assistant"
    cited, other = (annotation.url_citation for annotation in choice.message.annotations)
    assert choice.message.content[cited.start_index : cited.end_index] == "[1]"
    assert (cited.url, cited.title) == (PARIS.uri, PARIS.title)
    assert (other.url, other.start_index) == (ROME.uri, other.end_index)
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0
    assert served.watcher.ended == [("chat", "answered")]


async def test_a_stream_says_the_same_as_the_whole() -> None:
    async with serving() as served, client_of(served) as client:
        whole = await client.chat.completions.create(model="scripted", messages=QUESTION)
        stream = await client.chat.completions.create(
            model="scripted", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.annotations[0]["url_citation"]["url"] == PARIS.uri
    assert usage.choices == []
    assert usage.usage == whole.usage


async def test_the_raw_stream_ends_with_done() -> None:
    async with serving() as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b"\r" not in answer.content  # vLLM's benchmark splits events at "\n\n"
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


async def test_a_stream_begins_when_the_query_is_admitted_and_its_chunks_with_the_first_text() -> None:
    """vLLM's benchmark takes the first chunk for the first token."""
    goes_on = anyio.Event()
    async with (
        serving([goes_on, *CHUNKS]) as served,
        served.http.stream("POST", "/v1/chat/completions", json={"messages": QUESTION, "stream": True}) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == ""
        goes_on.set()
        first, second, *_ = [line async for line in lines if line.startswith("data: ")]
    assert json.loads(first[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert json.loads(second[6:])["choices"][0]["delta"] == {"content": "I"}


async def test_a_stream_is_kept_open_by_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's benchmark splits at empty lines and strips what it receives: it reads no comments, nor events behind a
    single line end."""
    monkeypatch.setattr(sse, "PING_S", 0.01)
    goes_on = anyio.Event()
    async with (
        serving([goes_on, *CHUNKS]) as served,
        served.http.stream("POST", "/v1/chat/completions", json={"messages": QUESTION, "stream": True}) as answer,
    ):
        texts = answer.aiter_text()
        body = ""
        while len(body) < 4:  # it is admitted, and still waits
            body += await anext(texts)
        assert body.strip("\n") == ""
        goes_on.set()
        body += "".join([text async for text in texts])
    parts = [part for part in body.split("\n\n") if part]
    assert parts[-1] == "data: [DONE]"
    assert all(part.startswith("data: ") for part in parts)


async def test_the_last_message_is_asked_and_the_others_are_history() -> None:
    messages = [
        {"role": "system", "content": "Speak like a pirate."},
        {"role": "user", "content": [{"type": "text", "text": "And Italy?"}]},
        {"role": "assistant", "content": "Rome."},
        *QUESTION,
    ]
    async with serving() as served, client_of(served) as client:
        await client.chat.completions.create(model="scripted", messages=messages)
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
    assert served.source.queries == [QUESTION[0]["content"]]
    assert prompt.index("cite them") < prompt.index("pirate") < prompt.index("And Italy?") < prompt.index(PARIS.text)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 30_000, 400, None),
        (b"[" * 100_000, 413, None),
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, None),
        ({"messages": [{"role": "bard", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"messages": QUESTION, "n": 2}, 400, "n"),
        ({"messages": QUESTION, "temperature": -1}, 400, None),
        ({"messages": QUESTION, "max_completion_tokens": 0, "max_tokens": 7}, 400, None),
        ({"messages": QUESTION, "temperature": "hot"}, 400, "temperature"),
        ({"messages": QUESTION, "max_tokens": 0, "stream": True}, 400, None),
        ({"messages": QUESTION, "model": "gpt-9"}, 404, "model"),
        ({"messages": QUESTION, "tools": [{}]}, 400, "tools.0.type"),
        ({"messages": QUESTION, "max_completion_tokens": 0}, 400, None),
        ({"messages": QUESTION, "stop": ["x"] * 30_000}, 400, None),
        ({"messages": QUESTION, "stop": ["x"] * 100_000}, 413, None),
        ({"messages": QUESTION, "top_k": 10**30}, 400, None),
        ({"messages": QUESTION, "logit_bias": {"Paris": 1}}, 400, "logit_bias.Paris.[key]"),
        ({"messages": QUESTION, "logit_bias": {"5": 101}}, 400, "logit_bias.5"),
        ({"messages": QUESTION, "logit_bias": {str(i): 1 for i in range(301)}}, 400, "logit_bias"),
        ({"messages": QUESTION, "logprobs": True}, 400, "logprobs"),
        ({"messages": QUESTION, "top_logprobs": 3}, 400, "top_logprobs"),
        ({"messages": QUESTION, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": QUESTION, "functions": [{}]}, 400, "functions"),
        ({"messages": QUESTION, "web_search_options": {}}, 400, "web_search_options"),
        ({"messages": QUESTION, "bad_words": ["Paris"]}, 400, "bad_words"),
        ({"messages": QUESTION, "modalities": ["text", "audio"]}, 400, "modalities"),
        ({"messages": QUESTION, "instructions": "Be brief."}, 400, "instructions"),
        ({"messages": QUESTION, "verbosity": "low"}, 400, "verbosity"),
        ({"messages": QUESTION, "prediction": "Paris"}, 400, "prediction"),
        ({"messages": QUESTION, "prediction": {"type": "context", "content": "Paris"}}, 400, "prediction.type"),
        ({"messages": QUESTION, "prediction": {"type": "content"}}, 400, "prediction.content"),
        ({"messages": QUESTION, "prediction": {"type": "content", "content": 5}}, 400, "prediction.content"),
        (
            {"messages": QUESTION, "prediction": {"type": "content", "content": [{"type": "x"}]}},
            400,
            "prediction.content",
        ),
    ],
)
async def test_a_chat_request_that_cannot_be_answered_is_refused(body: object, status: int, param: str | None) -> None:
    async with serving() as served:
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = await served.http.post("/v1/chat/completions", content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert error["param"] == param
        good = await served.http.post("/v1/chat/completions", json={"messages": QUESTION})
        assert good.status_code == 200


async def test_fields_that_change_no_answer_are_taken() -> None:
    body = {
        "messages": QUESTION,
        **dict.fromkeys(("functions", "logit_bias", "logprobs", "modalities", "tools", "web_search_options")),
        "logprobs": False,
        "tools": [],
        "n": 1,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": True,
        "user": "me",
    }
    async with serving() as served:
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


class RecordingBackend(ScriptedBackend):
    """Records the sampling parameters of each query."""

    def __init__(self) -> None:
        super().__init__()
        self.params: list[SamplingParams] = []

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        self.params.append(params)
        async for event in super().generate(prompts, params):
            yield event


async def test_biases_of_tokens_reach_the_engine() -> None:
    async with serving(backend=RecordingBackend()) as served, client_of(served) as client:
        for bias in ({"5": -100, "7": 1.5}, {}):
            await client.chat.completions.create(model="scripted", messages=QUESTION, logit_bias=bias)
    assert [params.extra for params in served.backend.params] == [
        {"logit_bias": {5: -100.0, 7: 1.5}},
        {"logit_bias": {}},
    ]


async def test_benchmarks_may_ask_for_answers_of_one_length() -> None:
    async with serving(backend=RecordingBackend()) as served:
        for more in ({"ignore_eos": True, "stop": None}, {"ignore_eos": False}, {}):
            answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, **more})
            assert answer.status_code == 200
    assert [params.ignore_eos for params in served.backend.params] == [True, False, False]


async def test_an_error_is_a_status_or_stands_in_the_stream() -> None:
    async with serving([*CHUNKS, SourceError("the site is gone")]) as served, client_of(served) as client:
        with pytest.raises(openai.InternalServerError, match="retrieval failed"):
            await client.chat.completions.create(model="scripted", messages=QUESTION)
        stream = await client.chat.completions.create(model="scripted", messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="retrieval failed"):
            _ = [chunk async for chunk in stream]
    assert served.watcher.ended == [("chat", "source_error")] * 2


async def test_an_engine_that_fails_in_mid_answer_is_told_of_behind_its_text() -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, client_of(served) as client:
        stream = await client.chat.completions.create(model="scripted", messages=QUESTION, stream=True)
        texts = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content)  # noqa: PERF401 - what came before the error is kept

        with pytest.raises(openai.APIError, match="the engine failed"):
            await read()
    assert texts == ["", "I"]
    assert served.watcher.ended == [("chat", "backend_error")]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(stream: bool) -> None:
    waits = anyio.Event()
    async with serving([Append(PARIS), waits]) as served:
        asking = asyncio.create_task(
            served.http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
        )
        await served.watcher.has_begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await served.watcher.has_ended.wait()
        assert served.watcher.ended == [("chat", "left")]
        assert served.source.num_streams == 0


async def test_queries_beyond_the_limit_are_told_when_to_come_again() -> None:
    waits = anyio.Event()
    async with serving([waits, *CHUNKS], limits=Limits(max_queries=1)) as served:
        first = asyncio.create_task(served.http.post("/v1/chat/completions", json={"messages": QUESTION}))
        await served.watcher.has_begun.wait()
        second = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, "stream": True})
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) >= 1
        waits.set()
        assert (await first).status_code == 200
    assert served.watcher.refused == [("anonymous", "chat", "queries")]


async def test_the_answer_is_bounded_by_the_limits() -> None:
    backend = ScriptedBackend(answer="one two three four five six seven")
    async with serving(backend=backend, limits=Limits(max_tokens=5)) as served:
        answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 100_000})
    assert answer.json()["usage"]["completion_tokens"] == 5


async def test_keys_are_asked_for_and_name_the_client() -> None:
    async with serving(keys={"s3cret": "alice"}) as served:
        assert (await served.http.post("/v1/chat/completions", json={"messages": QUESTION})).status_code == 200
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            bare = served.http.build_request("POST", "/v1/chat/completions", json={"messages": QUESTION})
            bare.headers.pop("authorization")
            bare.headers.update(given)
            answer = await served.http.send(bare)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert [query.client for query in served.watcher.started] == ["alice"]


async def test_foreign_host_names_and_origins_are_refused() -> None:
    async with serving() as served:
        for headers, status in (
            ({"host": "evil.example"}, 421),
            ({"origin": "https://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": served.url}, 200),
        ):
            answer = await served.http.post("/v1/chat/completions", json={"messages": QUESTION}, headers=headers)
            assert answer.status_code == status


async def test_a_body_that_is_too_long_is_refused() -> None:
    async with serving(limits=Limits(max_body_bytes=1024)) as served:
        declared = await served.http.post("/v1/chat/completions", content=b"x" * 2000)

        async def pieces():
            for _ in range(20):
                yield b"x" * 100

        chunked = await served.http.post("/v1/chat/completions", content=pieces())
    assert declared.status_code == chunked.status_code == 413


RECORD = RequestRecord("1", "finished", True, 0, 0, 0, 0, 0, 0, 10, 2, 10, 0, 0, 0, num_verified=5, num_accepted=3)


class VerifyingBackend(ScriptedBackend):
    """Verifies drafts: five tokens of one, of which three were right."""

    def __init__(self) -> None:
        super().__init__(answer="It is Paris [1].")
        self.model = replace(self.model, verifies_drafts=True)

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            if isinstance(event, AnswerChunk) and event.finish_reason:
                yield replace(event, record=RECORD)
            else:
                yield event


TEXT = "It is Lyon."


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": "It is "}, {"type": "text", "text": "Lyon."}]])
async def test_a_prediction_is_the_draft_of_the_answer(content: object) -> None:
    prediction = {"type": "content", "content": content}
    async with serving(backend=VerifyingBackend()) as served, client_of(served) as client:
        answer = await client.chat.completions.create(model="scripted", messages=QUESTION, prediction=prediction)
        complete = served.backend.prompts[-1][-1]
    assert complete.draft == tuple(map(ord, TEXT))
    assert answer.choices[0].message.content == "It is Paris [1]."
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 2)
    assert answer.usage.completion_tokens == len("It is Paris [1].")


async def test_a_prediction_is_bounded_and_without_an_engine_that_verifies_drafts_it_is_not_used() -> None:
    prediction = {"type": "content", "content": "x" * (MAX_DRAFT + 5)}
    for backend, num_drafted in ((VerifyingBackend(), MAX_DRAFT), (ScriptedBackend(), 0)):
        async with serving(backend=backend) as served, client_of(served) as client:
            answer = await client.chat.completions.create(model="scripted", messages=QUESTION, prediction=prediction)
        assert len(backend.prompts[-1][-1].draft) == num_drafted
    details = answer.usage.completion_tokens_details  # of the second, which verifies none
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
