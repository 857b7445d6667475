"""An OpenAI-compatible server that does what each test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from streamrag.backends.openai import OpenAIBackend
from streamrag.core import BackendEvent, Prompt, SamplingParams

MODELS = {"data": [{"id": "tiny", "max_model_len": 1000}, {"id": "other"}]}
PARAMS = SamplingParams(max_tokens=5)


@dataclass
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def send(self, body: bytes, *, status: int = 200, content_type: str = "application/json") -> None:
        self.writer.write(
            f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await self.writer.drain()

    async def send_json(self, value: Any, *, status: int = 200) -> None:
        await self.send(json.dumps(value).encode(), status=status)

    async def begin_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await self.writer.drain()

    async def send_event(self, value: Any) -> None:
        self.writer.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())
        await self.writer.drain()

    async def end(self) -> None:
        self.writer.close()

    async def disconnected(self) -> None:
        with suppress(ConnectionError):  # which is what closing looks like when something was not read
            assert await self.reader.read() == b""


Handler = Callable[[Request], Awaitable[None]]


class Server:
    """Answers `/models` by itself, and each request for a completion by the next handler."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.handlers: list[Handler] = []
        self.models: Any = MODELS
        self.num_connections = 0
        self.send_models: Handler = lambda request: request.send_json(self.models)
        self.tokenize: Handler = lambda request: request.send_json({"detail": "Not Found"}, status=404)

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                request = Request(method, path, headers, json.loads(body or b"{}"), writer, reader)
                if path == "/v1/models":
                    await self.send_models(request)
                elif path == "/tokenize":
                    await self.tokenize(request)
                else:
                    self.requests.append(request)
                    await self.handlers.pop(0)(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            self.num_connections -= 1
            writer.close()

    async def until_no_connection(self) -> None:
        while self.num_connections:  # noqa: ASYNC110 - the client's end of it sets no event
            await asyncio.sleep(0.005)


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **more}]}


def stream(*events: Any) -> Handler:
    async def handle(request: Request) -> None:
        await request.begin_stream()
        for event in events:
            await request.send_event(event)
        await request.end()

    return handle


def reply(value: Any, status: int = 200) -> Handler:
    return lambda request: request.send_json(value, status=status)


def prompt(text: str, *, is_complete: bool = True, num_shared: int = 0) -> Prompt:
    return Prompt(tuple(map(ord, text)), num_shared, is_complete)


async def prompts(*values: Prompt) -> AsyncIterator[Prompt]:
    for value in values:
        yield value


async def collect(backend: OpenAIBackend, *values: Prompt, params: SamplingParams = PARAMS) -> list[BackendEvent]:
    async with aclosing(backend.generate(prompts(*values), params)) as events:
        return [event async for event in events]


def echo(**fields: Any) -> Handler:
    """A completion that repeats the ids it was sent."""

    async def handle(request: Request) -> None:
        ids = request.body["prompt"]
        shown = {"prompt_token_ids": ids} if request.body.get("return_token_ids") else {}
        await request.send_json({**chunk("x", "length", **shown), "usage": {"prompt_tokens": len(ids)}, **fields})

    return handle


REFUSE = reply({"error": {"message": "unknown field"}}, status=400)
