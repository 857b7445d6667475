"""What servers send that speak OpenAI's protocol in their own way."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai_server import Handler, Request, Server, chunk, collect, echo, prompt, reply, stream

from streamrag.backends.openai import OpenAIBackend
from streamrag.backends.openai.messages import is_error, server_words
from streamrag.core import AnswerChunk
from streamrag.errors import ConfigurationError, ServerError

PARIS = json.dumps(chunk("Paris "))
IS = json.dumps(chunk("is.", "stop"))
ANSWER = [AnswerChunk("Paris ", ()), AnswerChunk("is.", (), "stop")]
DONE = "data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend(server.url, "tiny")
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()


def body(text: str | bytes, content_type: str = "text/event-stream") -> Handler:
    return lambda request: request.send(text if isinstance(text, bytes) else text.encode(), content_type=content_type)


# ------------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize(
    "text",
    [
        f"id: 1\ndata: {PARIS}\n\n: ping\n\nid: 2\ndata: {IS}\n\n{DONE}",
        f"data:\n\ndata: {PARIS}\n\ndata: \n\ndata: {IS}\n\n{DONE}",
        f"event: ping\n\ndata: {PARIS}\n\nevent: ping\ndata:\n\ndata: {IS}\n\n{DONE}",
        f"retry: 3000\n\ndata: {PARIS}\n\ndata: {IS}\n\n{DONE}",
        f"\ufeffdata: {PARIS}\n\ndata: {IS}\n\n{DONE}",
        f"data:{PARIS}\r\n\r\ndata:{IS}\r\n\r\ndata:[DONE]\r\n\r\n",
        f"data: {PARIS}\r\rdata: {IS}\r\rdata: [DONE]\r\r",
        f"data: {PARIS}\n\ndata: {IS}\n\ndata:  [DONE] \n\n",
        f"data: {PARIS}\n\ndata: {IS}\n\ndata: [DONE]",
        f"data: {PARIS}\n\ndata: {IS}",
        f"data: {PARIS}\n\ndata: {IS}\n\n",
        "".join(f"data: {line}\n" for line in json.dumps(chunk("Paris "), indent=1).split("\n")) + f"\ndata: {IS}\n\n",
        f"data: null\n\ndata: {PARIS}\n\ndata: null\n\ndata: {IS}\n\n{DONE}",
        f'data: {PARIS[:-1]}, "seed": 16147046464046250000, "score": NaN}}\n\ndata: {IS}\n\n{DONE}',  # Together's seed
        f": OPENROUTER PROCESSING\n\nevent: message\ndata: {PARIS}\n\nfoo: bar\ndata: {IS}\n\n{DONE}",
    ],
)  # fmt: skip
async def test_an_answer_is_read_from_any_event_stream(server: Server, backend: OpenAIBackend, text: str) -> None:
    server.handlers = [body(text)]
    assert await collect(backend, prompt("Why?")) == ANSWER


async def test_pings_are_not_counted_as_chunks_of_the_answer(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [body(f"data: {PARIS}\n\n" + "event: ping\ndata:\n\n" * 2000 + f"data: {IS}\n\n{DONE}")]
    assert await collect(backend, prompt("Why?")) == ANSWER


# ------------------------------------------------------------------------------------------------------------- errors


NO_ERRORS: list[Any] = [
    None, {}, "", " ", [], False, 0, {"message": "", "code": None}, {"message": None, "type": None, "param": None},
    {"code": 0, "message": ""}, [{"message": ""}], {"error": {}},
]  # fmt: skip


@pytest.mark.parametrize("field", ["error", "errors", "error_message", "error_msg"])
async def test_an_error_without_content_is_none(server: Server, backend: OpenAIBackend, field: str) -> None:
    for value in NO_ERRORS:
        events = [chunk("Paris ") | {field: value}, chunk("is.", "stop", error=None) | {field: value}]
        server.handlers = [stream(*events, "[DONE]")]
        assert await collect(backend, prompt("Why?")) == ANSWER


ERRORS: list[Any] = [
    {"object": "error", "message": "quota exceeded", "type": "BadRequestError", "param": None, "code": 400},
    {"type": "error", "error": {"type": "overloaded_error", "message": "quota exceeded"}},
    {"type": "error", "message": "quota exceeded"},
    {"error_message": "quota exceeded"},
    {"error_code": 336003, "error_msg": "quota exceeded"},
    {"error": "quota exceeded"},
    {"error": {"message": "quota exceeded", "code": 429}},
    {"error": {"code": 429, "message": "quota exceeded", "status": "RESOURCE_EXHAUSTED", "details": []}},
    {"error": True, "message": "quota exceeded"},
    {"errors": [{"code": 1000, "message": "quota exceeded"}], "success": False},
    {"detail": "quota exceeded"},
    {"detail": [{"loc": ["body", "prompt"], "msg": "quota exceeded", "type": "value_error"}]},
    {"detail": {"error": "quota exceeded"}},
    {"message": "quota exceeded", "code": 429},
    {"code": 429, "msg": "quota exceeded"},
    {"code": 429, "reason": "quota exceeded"},
    [{"error": {"code": 429, "message": "quota exceeded"}}],
    {"choices": [], "error": {"message": "quota exceeded"}},
    {"choices": [{"text": "", "finish_reason": "error", "error": {"code": 502, "message": "quota exceeded"}}]},
]  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "data: {paris}\n\ndata: {error}\n\ndata: [DONE]\n\n", "data: {error}\n\n", "event: error\ndata: {error}\n\n",
        "{error}", "{error}\n", "{pretty}\n\ndata: [DONE]\n\n", "error: {error}\n\n", "data: {paris}\n\n{error}\n",
    ],
)  # fmt: skip
async def test_the_server_s_own_words_about_an_error_reach_the_user(
    server: Server, backend: OpenAIBackend, layout: str
) -> None:
    for value in ERRORS:
        parts = {"{paris}": PARIS, "{error}": json.dumps(value), "{pretty}": json.dumps(value, indent=2)}
        text = layout
        for name, part in parts.items():
            text = text.replace(name, part)
        server.handlers = [body(text)]
        with pytest.raises(ServerError, match="quota exceeded") as raised:
            await collect(backend, prompt("Why?"))
        assert len(str(raised.value)) < 700


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/problem+json"])
async def test_an_error_in_place_of_a_stream_is_shown_whatever_its_status(
    server: Server, backend: OpenAIBackend, content_type: str
) -> None:
    for value in ERRORS[:-2]:
        for handler in (body(json.dumps(value), content_type), reply(value, 500)):
            server.handlers = [handler]
            with pytest.raises(ServerError, match="quota exceeded"):
                await collect(backend, prompt("Why?"))


async def test_an_error_in_place_of_a_json_answer_is_an_error(server: Server, backend: OpenAIBackend) -> None:
    for value in ({"error": {"message": "quota exceeded"}}, {"object": "error", "message": "quota exceeded"}):
        server.handlers = [reply(value)]
        with pytest.raises(ServerError, match="quota exceeded"):
            await collect(backend, prompt("Long context. " * 9, is_complete=False), prompt("Why?"))


PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><style>body { color: red }</style>
<script>if (a < b) { alert("x") }</script><title>Sign in &ndash; Example\x1b]0;x\x07</title></head>
<body><h1>Who   are\nyou?</h1></body></html>"""


@pytest.mark.parametrize("content_type", ["text/html", "text/html; charset=utf-8", "text/event-stream", "text/plain"])
@pytest.mark.parametrize("page", [PAGE, "\ufeff" + PAGE, PAGE.lower()])
async def test_a_page_in_place_of_a_stream_is_shown_as_text(
    server: Server, backend: OpenAIBackend, page: str, content_type: str
) -> None:
    server.handlers = [body(page, content_type)]
    with pytest.raises(ServerError, match=r"(?i): Sign in – Example ]0;x Who are you\?") as raised:
        await collect(backend, prompt("Why?"))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 700


async def test_a_long_page_in_one_line_is_shown_too(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [body("<html><title>Sign in</title>" + "x" * 200_000, "Text/HTML")]
    with pytest.raises(ServerError, match=r": Sign in xxx") as raised:
        await collect(backend, prompt("Why?"))
    assert len(str(raised.value)) < 700


async def test_words_without_a_form_are_shown_if_the_answer_is_missing(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [body(f"data: {PARIS}\n\nupstream connect error\n")]
    with pytest.raises(ServerError, match=r"ended the stream in the middle of an answer: upstream connect error"):
        await collect(backend, prompt("Why?"))
    server.handlers = [body(f"data: {PARIS}\n\ndata: {IS}\n\n\nupstream connect error\n")]
    assert await collect(backend, prompt("Why?")) == ANSWER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"error": "Not Found", "message": "no such path", "path": "/v1"}', "Not Found: no such path"),
        ('{"error": {"message": "Compute error."}, "message": "Compute error."}', "Compute error."),
        ('{"detail": [{"loc": ["body", "top_p"], "msg": "too big"}, {"msg": "b"}]}', "body; top_p: too big; b"),
        ('{"error": {"code": 5}}', '{"error": {"code": 5}}'),
        ("<model> was not found", "<model> was not found"),
        ("<h1>Bad &amp; ugly</h1>", "Bad & ugly"),
        ('{"error": ' + "[" * 2000, '{"error": ' + "[" * 490),
        ("<a" * 40_000 + "</", ("<a" * 250)),
        ("  ", ""),
    ],
)
def test_words_are_a_message_a_page_s_text_or_the_whole(text: str, words: str) -> None:
    assert server_words(text) == words


def test_an_error_is_found_in_an_object_of_any_size() -> None:
    assert not is_error({"choices": None})
    assert not is_error({"choices": [None, 5], "usage": {}})
    assert is_error({"error": [[[{"a": 1}]]]})


# ------------------------------------------------------------------------------------------------------------- models


def models(value: Any, status: int = 200) -> Handler:
    return reply(value, status)


LISTS: dict[str, Handler] = {
    "a plain list": models([{"id": "tiny", "object": "model"}, {"id": "b"}]),
    "without the model": models({"data": [{"id": "b"}]}),
    "an empty list": models({"object": "list", "data": []}),
    "null": models({"data": None}),
    "404": models({"detail": "Not Found"}, 404),
    "405": models({"detail": "Method Not Allowed"}, 405),
    "401": models({"error": "Unauthorized"}, 401),
    "403": models({"error": "Forbidden"}, 403),
    "500": models({}, 500),
    "an error": models({"error": {"message": "no"}}),
    "a page": body(PAGE, "text/html"),
    "nothing": body("", "application/json"),
}


@pytest.mark.parametrize("name", LISTS)
async def test_a_given_model_and_length_need_no_list_of_models(server: Server, name: str) -> None:
    server.send_models = LISTS[name]
    server.handlers = [body(f"data: {PARIS}\n\ndata: {IS}\n\n{DONE}")]
    lines: list[str] = []
    backend = OpenAIBackend(server.url, "tiny", max_model_len=500)
    await backend.start(lines.append)
    assert (backend.model.name, backend.model.max_model_len) == ("tiny", 500)
    assert await collect(backend, prompt("Why?")) == ANSWER
    assert any("does not serve 'tiny'" in line for line in lines) == (name != "a plain list")
    await backend.aclose()


async def test_a_list_without_the_model_stops_a_backend_without_a_length(server: Server) -> None:
    server.send_models = LISTS["without the model"]
    with pytest.raises(ConfigurationError, match=r"does not serve 'tiny'\. It serves: b\. .*give max_model_len"):
        await OpenAIBackend(server.url, "tiny").start(lambda line: None)


async def test_a_server_that_is_gone_stops_a_backend_whatever_is_given(server: Server) -> None:
    async def hang_up(request: Request) -> None:
        await request.end()

    server.send_models = hang_up
    with pytest.raises(ServerError, match="disconnected"):
        await OpenAIBackend(server.url, "tiny", max_model_len=5, retry_delay_s=0).start(lambda line: None)


async def test_the_only_model_of_a_plain_list_is_used(server: Server) -> None:
    server.models = [{"id": "tiny", "max_model_len": 900}]
    backend = OpenAIBackend(server.url)
    await backend.start(lambda line: None)
    assert (backend.model.name, backend.model.max_model_len) == ("tiny", 900)
    await backend.aclose()


# ------------------------------------------------------------------------------------------------------------ address


class Paths(Server):
    """A server that keeps the path of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    async def _serve(self, reader: Any, writer: Any) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.paths.append(lines[0].split(" ")[1])
        sizes = [int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")]
        await reader.readexactly(sum(sizes))
        request = Request("", "", {}, {}, writer, reader)
        if "models" in self.paths[-1]:
            await request.send_json({"data": [{"id": "tiny", "max_model_len": 900}]})
        else:
            await request.send(f"data: {PARIS}\n\ndata: {IS}\n\n".encode(), status=200)
        writer.close()


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("?api-version=1", "/v1"),
        ("/?api-version=1", "/v1"),
        ("/v1?api-version=1", "/v1"),
        ("/v1/?api-version=1#top", "/v1"),
        ("/openai/deployments/tiny/?api-version=1", "/openai/deployments/tiny"),
    ],
)
async def test_a_query_in_the_address_goes_with_every_request(address: str, path: str) -> None:
    server = Paths()
    async with server:
        lines: list[str] = []
        backend = OpenAIBackend(server.url + address, "tiny")
        await backend.start(lines.append)
        assert await collect(backend, prompt("Why?")) == ANSWER
        await backend.aclose()
        assert server.paths[0] == f"{path}/models?api-version=1"
        assert server.paths[-1] == f"{path}/completions?api-version=1"
        assert all(each.endswith("?api-version=1") for each in server.paths)
        assert not any("api-version" in line for line in lines), "a query may be a secret"


async def test_an_answer_to_a_probe_that_is_an_error_is_a_refusal(server: Server, tiny_model: Any) -> None:
    server.handlers = [reply({"error": "unknown field"}), echo()]
    backend = OpenAIBackend(server.url, "tiny", tokenizer=tiny_model)
    await backend.start(lambda line: None)
    assert backend.model.is_exact
    await backend.aclose()
