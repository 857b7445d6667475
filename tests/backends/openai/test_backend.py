"""Against a server that does what each test says. `test_openai_vllm.py` has the real one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from openai_server import (
    PARAMS,
    REFUSE,
    Handler,
    Request,
    Server,
    chunk,
    collect,
    echo,
    prompt,
    prompts,
    reply,
    stream,
)

from streamrag.backends.openai import OpenAIBackend
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError, ServerError


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend(server.url, "tiny", retry_delay_s=0.001, block_size=4)
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()
    await server.until_no_connection()


# ------------------------------------------------------------------------------------------------------- what is asked


async def test_an_answer_arrives_in_chunks(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(chunk("4"), chunk("2", "stop"), {"choices": [], "usage": {}}, "[DONE]")]
    assert await collect(backend, prompt("Why?")) == [AnswerChunk("4", ()), AnswerChunk("2", (), "stop")]
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {
        "model": "tiny", "stream": True, "prompt": "Why?", "max_tokens": 5, "temperature": 0.0, "top_p": 1.0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize("reason", [None, "length"])
async def test_a_chunk_that_follows_a_final_one_is_part_of_the_answer(
    server: Server, backend: OpenAIBackend, reason: str | None
) -> None:
    server.handlers = [stream(chunk("4", "stop"), chunk("2", reason), "[DONE]")]
    assert await collect(backend, prompt("Why?")) == [AnswerChunk("4", ()), AnswerChunk("2", (), reason or "stop")]


async def test_partial_prompts_are_warmed_with_one_token(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [reply(chunk("x", "length")), stream(chunk("42", "stop"), "[DONE]")]
    may_complete = asyncio.Event()

    async def paced() -> AsyncIterator[Prompt]:
        yield prompt("abcdefghij", is_complete=False)
        await may_complete.wait()
        yield prompt("abcdefghij?", num_shared=10)

    async with aclosing(backend.generate(paced(), PARAMS)) as events:
        assert await anext(events) == Prefilled(8)
        may_complete.set()
        assert [event async for event in events] == [AnswerChunk("42", (), "stop")]
    assert server.requests[0].body == {"model": "tiny", "max_tokens": 1, "temperature": 0.0, "prompt": "abcdefgh"}


async def test_only_parameters_that_are_asked_for_are_sent(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(chunk("", "length"), "[DONE]")]
    params = SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=1, stop=("x",), ignore_eos=True, extra={"min_p": 0.1}
    )
    await collect(backend, prompt("Why?"), params=params)
    assert server.requests[0].body == {
        "model": "tiny", "stream": True, "prompt": "Why?", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "top_k": 7, "seed": 1, "stop": ["x"], "ignore_eos": True, "min_p": 0.1,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def test_a_schema_is_sent_as_openais_response_format(server: Server, backend: OpenAIBackend) -> None:
    schema = {"title": "Is it Zürich?", "type": "object", "properties": {"is_it": {"type": "boolean"}}}
    server.handlers = [stream(chunk("", "length"), "[DONE]")]
    await collect(backend, prompt("Why?"), params=SamplingParams(json_schema=schema))
    json_schema = {"name": "Is_it_Z_rich_", "schema": schema, "strict": True}
    assert server.requests[0].body["response_format"] == {"type": "json_schema", "json_schema": json_schema}
    with pytest.raises(ConfigurationError, match="extra: response_format cannot be given there"):
        await collect(backend, prompt("Why?"), params=SamplingParams(json_schema=schema, extra={"response_format": {}}))


@pytest.mark.parametrize("name", ["prompt", "n", "temperature", "seed"])
async def test_a_parameter_that_is_taken_is_refused(server: Server, backend: OpenAIBackend, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"extra: {name} cannot be given there"):
        await collect(backend, prompt("Why?"), params=SamplingParams(extra={name: 1}))
    assert server.requests == []


async def test_the_key_is_sent_and_never_shown(server: Server) -> None:
    backend = OpenAIBackend(server.url, "tiny", api_key="secret-key")
    await backend.start(lambda line: None)
    server.handlers = [reply({"error": {"message": "no credit"}}, status=401)]
    with pytest.raises(ServerError, match="status 401: no credit") as refused:
        await collect(backend, prompt("Why?"))
    assert server.requests[0].headers["authorization"] == "Bearer secret-key"
    assert "secret-key" not in repr(refused.value) + repr(vars(refused.value))
    await backend.aclose()


async def test_a_prompt_that_is_too_long_is_never_sent(server: Server, backend: OpenAIBackend) -> None:
    with pytest.raises(PromptTooLongError, match="1000 characters leaves no room for an answer: max_model_len is 1000"):
        await collect(backend, prompt("x" * 1000))
    assert server.requests == []


# --------------------------------------------------------------------------------------- token ids, where it takes them


@pytest.mark.parametrize(
    ("probes", "takes_ids", "asks_for_ids"),
    [
        ([echo()], True, True),
        ([reply({**chunk("x"), "usage": {"prompt_tokens": 5}})], False, False),
        ([reply({**chunk("x", prompt_token_ids=[1, 2]), "usage": {}})], False, True),
        ([REFUSE, echo()], True, False),
        ([REFUSE, REFUSE], False, False),
        ([reply({"choices": None})], False, False),
    ],
    ids=["echoes them", "counts others", "echoes others", "takes them, echoes none", "takes none", "says nothing"],
)
async def test_ids_are_sent_only_to_a_server_that_has_shown_to_take_them(
    server: Server, tiny_model: Path, probes: list[Handler], takes_ids: bool, asks_for_ids: bool
) -> None:
    server.handlers = [*probes, stream(chunk("x", "stop", token_ids=[7, 8]), "[DONE]")]
    backend = OpenAIBackend(server.url, "tiny", tokenizer=tiny_model)
    await backend.start(lambda line: None)
    assert backend.model.is_exact == takes_ids
    head = backend.model.tokenizer.encode("<|begin_of_text|>", allow_special=True)
    ids = (*head, *backend.model.tokenizer.encode("Why?"))
    assert await collect(backend, Prompt(ids, 0, True)) == [AnswerChunk("x", (7, 8), "stop")]
    assert server.requests[-1].body["prompt"] == (list(ids) if takes_ids else "Why?")
    assert server.requests[-1].body.get("return_token_ids", False) == asks_for_ids
    await backend.aclose()


# ------------------------------------------------------------------------------------------------------------ starting


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    backend = OpenAIBackend(f"http://127.0.0.1:{port}", "tiny", retry_delay_s=0.001)
    with pytest.raises(ServerError, match=rf"http://127\.0\.0\.1:{port}/v1 cannot be reached.*Is the server running"):
        await backend.start(lambda line: None)


async def test_a_model_that_is_not_served_is_refused_with_those_that_are(server: Server) -> None:
    with pytest.raises(ConfigurationError, match=r"does not serve 'huge'\. It serves: tiny, other"):
        await OpenAIBackend(server.url, "huge").start(lambda line: None)


async def test_a_length_that_the_server_does_not_tell_must_be_given(server: Server) -> None:
    with pytest.raises(ConfigurationError, match="give max_model_len"):
        await OpenAIBackend(server.url, "other").start(lambda line: None)
    backend = OpenAIBackend(server.url, "other", max_model_len=77)
    await backend.start(lambda line: None)
    assert backend.model.max_model_len == 77
    await backend.aclose()


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": [1, {"id": 5}]}, "text"])
async def test_a_list_of_models_in_another_form_is_an_error(server: Server, models: Any) -> None:
    server.models = models
    with pytest.raises((ServerError, ConfigurationError), match=r"did not send a JSON object|does not serve"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an http or https address"):
        OpenAIBackend(url, "tiny")


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://h:1", "http://h:1/v1"), ("http://h:1/", "http://h:1/v1"), ("https://h/api/v3/", "https://h/api/v3")],
)
async def test_the_path_is_v1_unless_there_is_one(url: str, expected: str) -> None:
    with pytest.raises(ServerError, match=f"^{expected} cannot be reached"):
        await OpenAIBackend(url, "tiny", timeout_s=0.001, max_retries=0).start(lambda line: None)


async def test_a_backend_that_is_not_running_says_so(server: Server) -> None:
    backend = OpenAIBackend(server.url, "tiny")
    with pytest.raises(BackendError, match="not been started"):
        _ = backend.model
    await backend.start(lambda line: None)
    await backend.aclose()
    await backend.aclose()
    with pytest.raises(BackendError, match="not running"):
        await collect(backend, prompt("Why?"))


# -------------------------------------------------------------------------------------------------------------- faults


async def drop(request: Request) -> None:
    await request.end()


async def test_a_connection_that_breaks_before_the_first_byte_is_tried_again(
    server: Server, backend: OpenAIBackend
) -> None:
    server.handlers = [drop, drop, stream(chunk("42", "stop"), "[DONE]")]
    assert await collect(backend, prompt("Why?")) == [AnswerChunk("42", (), "stop")]


async def test_a_connection_that_keeps_breaking_is_given_up(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [drop] * 10
    with pytest.raises(ServerError, match=r"disconnected|ended the stream"):
        await collect(backend, prompt("Why?"))
    assert len(server.requests) == 3


async def test_a_stream_that_breaks_is_an_error_and_is_not_tried_again(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(chunk("4")), stream(chunk("42", "stop"))]
    events = backend.generate(prompts(prompt("Why?")), PARAMS)
    assert await anext(events) == AnswerChunk("4", ())
    with pytest.raises(ServerError, match="ended the stream in the middle of an answer"):
        await anext(events)
    assert len(server.requests) == 1


async def test_a_body_that_breaks_is_an_error(server: Server, backend: OpenAIBackend) -> None:
    async def break_off(request: Request) -> None:
        request.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:"
        )
        await request.end()

    server.handlers = [break_off]
    with pytest.raises(ServerError, match=r"disconnected|ended the stream"):
        await collect(backend, prompt("Why?"))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, {"error": {"message": "out of memory"}}, "status 500: out of memory"),
        (404, {"message": "no such model"}, "status 404: no such model"),
        (400, {"detail": "bad prompt"}, "status 400: bad prompt"),
        (429, {"error": "slow down"}, "status 429: slow down"),
        (503, [], r"status 503: \[\]"),
    ],
)
async def test_a_status_that_is_an_error_is_raised_with_the_servers_message(
    server: Server, backend: OpenAIBackend, status: int, body: Any, message: str
) -> None:
    server.handlers = [reply(body, status)] * 2
    with pytest.raises(ServerError, match=message):
        await collect(backend, prompt("Why?"))
    assert len(server.requests) == (2 if status in (400, 404) else 1), "once more without asking for the usage"


async def test_the_error_of_an_address_without_an_api_says_how_most_addresses_end(server: Server) -> None:
    server.handlers = [reply({"detail": "Not Found"}, 404)]
    with pytest.raises(ServerError, match=r"status 404: .*Not Found.*\. Most servers have addresses that end in /v1"):
        await OpenAIBackend(f"{server.url}/v2", "tiny").start(lambda line: None)


async def test_a_long_error_page_is_cut(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [lambda request: request.send(b"<html>" + b"x" * 200_000, status=502, content_type="text/html")]
    with pytest.raises(ServerError, match="status 502: <html>x") as refused:
        await collect(backend, prompt("Why?"))
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([chunk("4"), {"error": {"message": "engine died"}}], "failed during an answer: engine died"),
        ([chunk("4"), "not json"], "did not send a JSON object: 'not json'"),
        (["[1, 2]"], r"did not send a JSON object: '\[1, 2\]'"),
        ([{}, {"choices": 5}, {"choices": [None]}, "[DONE]"], "ended the stream in the middle"),
        (["[DONE]"], "ended the stream in the middle"),
    ],
)
async def test_garbage_in_the_stream_is_an_error(
    server: Server, backend: OpenAIBackend, events: list[Any], message: str
) -> None:
    server.handlers = [stream(*events)]
    with pytest.raises(ServerError, match=message):
        await collect(backend, prompt("Why?"))


async def test_an_answer_that_is_no_stream_is_an_error(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [reply(chunk("42", "stop"))]
    with pytest.raises(ServerError, match="did not answer with a stream of events"):
        await collect(backend, prompt("Why?"))


@pytest.mark.parametrize("begins", [True, False])
async def test_a_server_that_falls_silent_is_given_up(server: Server, begins: bool) -> None:
    gone = asyncio.Event()

    async def hang(request: Request) -> None:
        if begins:
            await request.begin_stream()
            await request.send_event(chunk("4"))
        await request.disconnected()
        gone.set()

    server.handlers = [hang]
    backend = OpenAIBackend(server.url, "tiny", timeout_s=0.1)
    await backend.start(lambda line: None)
    with pytest.raises(ServerError, match=r"has sent nothing, or nothing complete, for 0\.1 s"):
        await collect(backend, prompt("Why?"))
    await gone.wait()
    assert len(server.requests) == 1
    await backend.aclose()


# ------------------------------------------------------------------------------------------------------- leaving early


@pytest.mark.parametrize("phase", ["warming", "waiting for the first token", "answering"])
@pytest.mark.parametrize("how", ["cancelling", "closing the backend"])
async def test_leaving_closes_the_connection(server: Server, backend: OpenAIBackend, phase: str, how: str) -> None:
    reached, gone = asyncio.Event(), asyncio.Event()

    async def hang(request: Request) -> None:
        if phase == "answering":
            await request.begin_stream()
            await request.send_event(chunk("4"))
        reached.set()
        await request.disconnected()
        gone.set()

    async def endless() -> AsyncIterator[Prompt]:
        yield prompt("abcdefgh", is_complete=phase != "warming")
        await asyncio.Event().wait()

    async def consume() -> None:
        async with aclosing(backend.generate(endless(), PARAMS)) as events:
            async for _ in events:
                pass

    server.handlers = [hang]
    task = asyncio.create_task(consume())
    await reached.wait()
    if how == "cancelling":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        await backend.aclose()
        with pytest.raises(ServerError):
            await task
    await gone.wait()


async def test_a_superseded_warming_request_is_closed(server: Server, backend: OpenAIBackend) -> None:
    reached, gone = asyncio.Event(), asyncio.Event()

    async def hang(request: Request) -> None:
        reached.set()
        await request.disconnected()
        gone.set()

    async def paced() -> AsyncIterator[Prompt]:
        yield prompt("abcdefgh", is_complete=False)
        await reached.wait()
        yield prompt("ijklmnop")
        await asyncio.Event().wait()

    server.handlers = [hang, stream(chunk("42", "stop"), "[DONE]")]
    assert [event async for event in backend.generate(paced(), PARAMS)] == [AnswerChunk("42", (), "stop")]
    await gone.wait()


@pytest.mark.parametrize("extra", [{"x": float("nan")}, {"x": object()}, {"seed_of_mine": 10**5000}])
async def test_options_that_cannot_be_written_as_json_are_the_callers_mistake(
    server: Server, extra: dict[str, Any]
) -> None:
    backend = OpenAIBackend(server.url, "tiny")
    await backend.start(lambda line: None)
    with pytest.raises(ConfigurationError, match="cannot be written as JSON"):
        await collect(backend, prompt("Why?"), params=SamplingParams(extra=extra))
    await backend.aclose()
