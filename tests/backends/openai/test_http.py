"""What a server may send, and how long it may take: against servers that do not care."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai_server import MODELS, PARAMS, Handler, Request, Server, chunk, collect, echo, prompt, reply, stream

from streamrag import Pipeline
from streamrag.backends.openai import OpenAIBackend
from streamrag.core import AnswerChunk, Append, Chunk, SamplingParams
from streamrag.errors import ConfigurationError, DeadlineExceededError, ServerError
from streamrag.testing import ScriptedSource

MEGABYTE = 1 << 20
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


async def started(server: Server, **options: Any) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend(server.url, "tiny", max_retries=0, **options)
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()
    await server.until_no_connection()


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[OpenAIBackend]:
    async for backend in started(server):
        yield backend


@pytest.fixture
async def hasty(server: Server) -> AsyncIterator[OpenAIBackend]:
    async for backend in started(server, timeout_s=2):
        yield backend


class Sender:
    """Answers with `head` and then `block` again and again, every `pace_s` seconds, until the client leaves."""

    def __init__(self, head: bytes, block: bytes, pace_s: float = 0.0) -> None:
        self.head, self.block, self.pace_s = head, block, pace_s
        self.num_bytes = 0
        self.client_left = asyncio.Event()

    async def __call__(self, request: Request) -> None:
        try:
            request.writer.write(self.head)
            while True:
                request.writer.write(self.block)
                await request.writer.drain()
                self.num_bytes += len(self.block)
                await asyncio.sleep(self.pace_s)
        except ConnectionError:
            self.client_left.set()

    async def until_client_left(self) -> None:
        await self.client_left.wait()


# ------------------------------------------------------------------------------------------------------------ how much


async def test_a_list_of_models_without_end_is_given_up(server: Server) -> None:
    sender = Sender(JSON_HEAD, b'{"data": [' + b" " * 65536)
    server.send_models = sender
    with pytest.raises(ServerError, match=rf"{server.url}/v1 sent more than the limit of 4,194,304 bytes"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)
    await sender.until_client_left()
    assert sender.num_bytes < 32 * MEGABYTE  # most of it in the system's buffers


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"x" * 65536, "bytes in one line for this response"),
        (b"data: " + b"x" * 65536, "bytes in one line for this response"),
        (b"data: " + b"x" * 6000 + b"\n", "bytes in one event|bytes for this response"),
        (b": still here\n\n" * 4000, "sent more than the limit of 8,080 lines"),
        (b"\r" * 1000, "sent more than the limit of 8,080 lines"),
        (b"data: {}\n\n" * 1000, "sent more than the limit of 1,010 events"),
        (b"data: " + json.dumps(chunk("x")).encode() + b"\n\n", "sent more than the limit of 1,010 events"),
        (b"data: " + json.dumps(chunk("x" * 60_000)).encode() + b"\n\n", "bytes for this response"),
    ],
    ids=["a line", "an event", "lines of an event", "comments", "lines", "empty events", "tokens", "long tokens"],
)
async def test_an_answer_without_end_is_given_up(
    server: Server, backend: OpenAIBackend, block: bytes, message: str
) -> None:
    sender = Sender(SSE_HEAD, block)
    server.handlers = [sender]
    with pytest.raises(ServerError, match=message):
        await collect(backend, prompt("Why?"))
    await sender.until_client_left()
    assert sender.num_bytes < 32 * MEGABYTE


async def test_headers_without_end_are_given_up(server: Server, backend: OpenAIBackend) -> None:
    sender = Sender(b"HTTP/1.1 200 OK\r\n", b"X-Padding: " + b"x" * 1000 + b"\r\n")
    server.handlers = [sender]
    with pytest.raises(ServerError, match="sends too much: the head"):
        await collect(backend, prompt("Why?"))
    await sender.until_client_left()
    assert sender.num_bytes < 32 * MEGABYTE


async def test_an_event_that_is_out_of_proportion_is_not_parsed(
    server: Server, backend: OpenAIBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read whole, it takes 1.7 GB and ten seconds in which nothing else runs.
    sender = Sender(SSE_HEAD + b'data: {"x":[', b"[]," * 20_000)
    server.handlers = [sender]
    with pytest.raises(ServerError, match="sent more than the limit of 97,792 bytes in one line"):
        await collect(backend, prompt("Why?"), params=SamplingParams(max_tokens=4096))
    assert sender.num_bytes < 16 * MEGABYTE
    server.handlers = [stream("[" * 40 + "]" * 40), stream(json.dumps({"x": [[]] * 8000}))]
    monkeypatch.setattr("streamrag.backends.openai.http.MAX_VALUES", 8000)
    for _ in range(2):
        with pytest.raises(ServerError, match="did not send a JSON object"):
            await collect(backend, prompt("Why?"))


async def test_an_answer_of_many_tokens_is_bounded_by_what_any_answer_may_have(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrag.backends.openai.backend.MAX_STREAM_BYTES", 3 * MEGABYTE)
    server.models = {"data": [{"id": "tiny", "max_model_len": 1 << 30}]}
    async for backend in started(server):
        server.handlers = [Sender(SSE_HEAD, b"data: " + json.dumps(chunk("x" * 60_000)).encode() + b"\n\n")]
        with pytest.raises(ServerError, match="sent more than the limit of 3,145,728 bytes for"):
            await collect(backend, prompt("Why?"), params=SamplingParams(max_tokens=1 << 29))


@pytest.mark.parametrize("piece", [b"1\r\n:\r\n", b"1\r\nx\r\n", b"1;x=" + b"y" * 5000 + b"\r\n:\r\n"])
async def test_pieces_that_hold_next_to_nothing_are_given_up(
    server: Server, backend: OpenAIBackend, piece: bytes
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    sender = Sender(head, piece * 1000)
    server.handlers = [sender]
    with pytest.raises(ServerError, match=r"sends too much: the server has sent \d+ bytes for \d+ of content"):
        await collect(backend, prompt("Why?"))
    await sender.until_client_left()


async def test_other_tasks_run_between_the_pieces_of_an_answer(server: Server, backend: OpenAIBackend) -> None:
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in b":" * 2000 + b'\n\ndata: {"x":[]}\n\n')
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def send(request: Request) -> None:
        request.writer.write(head + pieces + b"0\r\n\r\n")
        await request.writer.drain()

    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    server.handlers = [send]
    other = asyncio.create_task(count())
    with pytest.raises(ServerError, match="ended the stream in the middle"):
        await collect(backend, prompt("Why?"))
    other.cancel()
    assert num_turns > 2000


async def test_an_answer_may_begin_with_a_byte_order_mark(server: Server, backend: OpenAIBackend) -> None:
    async def send(request: Request) -> None:
        event = b"data: " + json.dumps(chunk("42", "stop")).encode() + b"\n\n"
        request.writer.write(SSE_HEAD + b"\xef\xbb\xbf" + event + b"data: [DONE]\n\n")
        await request.writer.drain()

    server.handlers = [send]
    [answer] = await collect(backend, prompt("Why?"))
    assert isinstance(answer, AnswerChunk)
    assert answer.text == "42"


async def test_an_error_without_end_is_cut(server: Server, backend: OpenAIBackend) -> None:
    sender = Sender(b"HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\n", b"no " * 1000)
    server.handlers = [sender]
    with pytest.raises(ServerError, match="status 500: no no no") as error:
        await collect(backend, prompt("Why?"))
    assert len(str(error.value)) < 700
    await sender.until_client_left()


@pytest.mark.parametrize(
    ("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("x-unknown", bytes)]
)
async def test_a_compressed_response_is_refused(
    server: Server, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    body = compress(json.dumps(MODELS).encode() + b" " * 50 * MEGABYTE)

    async def send(request: Request) -> None:
        assert request.headers["accept-encoding"] == "identity"
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
        request.writer.write(head.encode() + body)

    server.send_models = send
    with pytest.raises(ServerError, match=rf"sent a response in the unsupported encoding {coding}"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)


async def test_a_codec_that_the_server_names_is_not_used(server: Server) -> None:
    async def send(request: Request) -> None:
        await request.send(zlib.compress(json.dumps(MODELS).encode()), content_type="application/json; charset=zlib")

    server.send_models = send
    with pytest.raises(ServerError, match="did not send a JSON object"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)


async def test_cookies_are_not_kept_and_redirects_not_followed(server: Server) -> None:
    async def redirect(request: Request) -> None:
        request.writer.write(
            b"HTTP/1.1 307 There\r\nSet-Cookie: a=b\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
        )

    server.send_models = redirect
    backend = OpenAIBackend(server.url, "tiny")
    with pytest.raises(ServerError, match="status 307"):
        await backend.start(lambda line: None)
    assert server.requests == []

    async def remember(request: Request) -> None:
        body = json.dumps(MODELS).encode()
        request.writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server.send_models = remember
    await backend.start(lambda line: None)
    server.handlers = [stream(chunk("42", "stop"), "[DONE]")]
    await collect(backend, prompt("Why?"))
    assert "cookie" not in server.requests[-1].headers
    await backend.aclose()


# ------------------------------------------------------------------------------------------------------------ how long


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 100 Continue\r\n\r\n", JSON_HEAD, b"HTTP/1.1 500 Oh\r\n\r\n"],
    ids=["headers", "after an interim answer", "body", "error"],
)
async def test_a_list_of_models_that_drips_is_given_up(
    server: Server, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrag.backends.openai.http.CONNECT_TIMEOUT_S", 0.1)
    sender = Sender(head, b" ", pace_s=0.02)
    server.send_models = sender
    with pytest.raises(ServerError, match=r"sent nothing, or nothing complete, for 0\.3 s|disconnected"):
        await OpenAIBackend(server.url, "tiny", timeout_s=0.3, max_retries=0).start(lambda line: None)
    await sender.until_client_left()


async def test_interim_answers_without_end_are_given_up(server: Server) -> None:
    sender = Sender(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, pace_s=0.001)
    server.send_models = sender
    with pytest.raises(ServerError, match="sends too much: the head"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)
    await sender.until_client_left()


@pytest.mark.parametrize("block", [b"x", b": still here\n\n", b"\n"], ids=["an event", "comments", "lines"])
async def test_an_answer_that_drips_is_given_up(server: Server, hasty: OpenAIBackend, block: bytes) -> None:
    sender = Sender(SSE_HEAD, block, pace_s=0.02)
    server.handlers = [sender]
    with pytest.raises(ServerError, match=r"sent nothing, or nothing complete, for 2 s"):
        await collect(hasty, prompt("Why?"))
    await sender.until_client_left()


@pytest.mark.parametrize("phase", ["tokenizing", "headers", "tokens", "comments", "warming"])
async def test_no_server_outlasts_the_querys_deadline(server: Server, phase: str) -> None:
    senders: dict[str, Sender] = {
        "headers": Sender(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", pace_s=0.02),
        "tokens": Sender(SSE_HEAD, b"data: " + json.dumps(chunk("x")).encode() + b"\n\n", pace_s=0.02),
        "comments": Sender(SSE_HEAD, b": still here\n\n", pace_s=0.02),
        "warming": Sender(JSON_HEAD, b" ", pace_s=0.02),
        "tokenizing": Sender(JSON_HEAD, b" ", pace_s=0.02),
    }
    sender = senders[phase]
    server.handlers = [sender] * 2
    if phase == "tokenizing":
        answers = [reply({"tokens": [5]})] * 3  # to what is asked at the start

        async def tokenize(request: Request) -> None:
            await (answers.pop() if answers else sender)(request)

        server.tokenize, server.handlers = tokenize, [echo()]
    steps: list[Any] = []
    if phase == "warming":
        steps = [Append(Chunk("text", "a")), 60.0]
    backend = OpenAIBackend(server.url, "tiny", block_size=1)
    async with Pipeline(ScriptedSource(steps), backend) as pipeline:
        with pytest.raises(DeadlineExceededError):
            async for _ in pipeline.stream("Why?", deadline_s=3, params=SamplingParams(max_tokens=100)):
                pass
        await sender.until_client_left()


# ---------------------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("value", ["x", "1000", True, 0, -1, 1.5, 10**12, [1], {}])
async def test_a_length_that_is_none_is_an_error_that_names_the_server(server: Server, value: Any) -> None:
    server.models = {"data": [{"id": "tiny", "max_model_len": value}]}
    with pytest.raises(ServerError, match=rf"{server.url}/v1 sent max_model_len=.*, which is not a number of tokens"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)


@pytest.mark.parametrize("value", [0, -5])
def test_a_length_that_is_given_must_be_one(value: int) -> None:
    with pytest.raises(ConfigurationError, match=r"max_model_len=.* must be greater than or equal to 1"):
        OpenAIBackend("http://127.0.0.1:1", "tiny", max_model_len=value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": [{"id": ["tiny"]}, {"id": {}}, {"id": null}]}',
        b"[" * 100_000,
        b'{"data": ' + b"[" * 100_000,
        b'{"data": [{"id": "tiny", "max_model_len": ' + b"9" * 10_000 + b"}]}",
        b'{"data": [{"id": "tiny", "max_model_len": 1e999}]}',
        b'{"data": [{"id": "tiny", "max_model_len": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}]}",
        b"\xff\xfe{}",
        b"",
    ],
    ids=["ids", "depth", "depth in data", "digits", "infinity", "depth in a field", "bytes", "nothing"],
)
async def test_no_list_of_models_ends_in_another_error(server: Server, body: bytes) -> None:
    server.send_models = lambda request: request.send(body)
    with pytest.raises((ServerError, ConfigurationError)) as error:
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)
    assert f"{server.url}/v1" in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"text": 5}, "text=5, which is not text"),
        ({"text": ["x"]}, r"text=\['x'\], which is not text"),
        ({"text": "x", "finish_reason": 3}, "finish_reason=3, which is not text"),
        ({"text": "x", "finish_reason": "abort"}, "aborted the answer: its finish_reason is 'abort'"),
        ({"text": "x", "token_ids": "12"}, "'12' instead of a list of token ids"),
        ({"text": "x", "token_ids": [1, "2"]}, "instead of a list of token ids"),
        ({"text": "x", "token_ids": [True]}, "instead of a list of token ids"),
        ({"text": "x", "token_ids": [-1]}, "instead of a list of token ids"),
        ({"text": "x", "token_ids": [1 << 40]}, "instead of a list of token ids"),
        ({"text": "x", "token_ids": {"1": 2}}, "instead of a list of token ids"),
    ],
)
async def test_a_field_of_another_type_is_an_error(
    server: Server, backend: OpenAIBackend, choice: dict[str, Any], message: str
) -> None:
    server.handlers = [stream({"choices": [choice]}, chunk("", "stop"), "[DONE]")]
    with pytest.raises(ServerError, match=message):
        await collect(backend, prompt("Why?"))


async def test_an_empty_reason_to_finish_is_none(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(chunk("4", ""), "[DONE]")]
    with pytest.raises(ServerError, match="ended the stream in the middle of an answer"):
        await collect(backend, prompt("Why?"))


async def test_only_the_first_answer_of_an_event_with_many_is_read(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream({"choices": [{"text": "4"}, *[{"text": "x"}] * 4000]}, chunk("2", "stop"), "[DONE]")]
    assert await collect(backend, prompt("Why?")) == [AnswerChunk("4", ()), AnswerChunk("2", (), "stop")]


async def test_null_is_an_empty_text_and_half_a_character_is_replaced(server: Server, backend: OpenAIBackend) -> None:
    event = '{"choices": [{"text": "a\\ud83d", "finish_reason": null, "token_ids": null}]}'
    server.handlers = [stream({"choices": [{"text": None}]}, event, chunk("", "stop"), "[DONE]")]
    answers = [AnswerChunk("", ()), AnswerChunk("a\ufffd", ()), AnswerChunk("", (), "stop")]
    assert await collect(backend, prompt("Why?")) == answers


ESCAPES = "\x1b]0;title\x07 \u202egnorw\u202c \x9b31m \x00"


@pytest.mark.parametrize(
    "handler",
    [
        reply({"error": {"message": ESCAPES + "x" * 10_000}}, 500),
        lambda request: request.send(ESCAPES.encode() * 100, status=400),
        stream({"error": {"message": ESCAPES}}),
        stream(ESCAPES),
        stream({"choices": [{"text": [ESCAPES]}]}),
        lambda request: request.send(b"", content_type="text/" + "\u0085x"),
    ],
    ids=["message", "text", "event", "no JSON", "field", "content type"],
)
async def test_no_escape_sequence_of_a_server_reaches_a_message(
    server: Server, backend: OpenAIBackend, handler: Handler
) -> None:
    server.handlers = [handler]
    with pytest.raises(ServerError) as error:
        await collect(backend, prompt("Why?"), params=PARAMS)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700


async def test_the_names_of_models_that_are_served_are_cleaned_and_cut(server: Server) -> None:
    server.models = {"data": [{"id": ESCAPES}, *({"id": f"model {number}"} for number in range(10_000))]}
    with pytest.raises(ConfigurationError, match=r"It serves: .*model 7") as error:
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700
