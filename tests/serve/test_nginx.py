"""The service behind a real nginx, with the configuration that `deploy/` has: nothing is held back."""

import asyncio
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from tests.serve.serving import CHUNKS, Serving, serving

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
NGINX = os.environ.get("NGINX_PATH") or shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NAME = "rag.example.org"

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed; NGINX_PATH=/path/to/nginx names one")


@asynccontextmanager
async def behind_nginx(served: Serving, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the nginx in front of `served`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = re.sub(r"^ *ssl_.*\n", "", CONFIGURATION.read_text(), flags=re.MULTILINE)
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8080", served.url[7:])
    temporary = "".join(f"{what}_temp_path {folder}; " for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log info; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{text}}}\n"
    )
    command = [str(NGINX), "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(120):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                break
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, headers={"host": NAME}, timeout=120) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def aclosing_writer(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()


OPTIONS = {"hosts": frozenset({NAME, "127.0.0.1"})}

QUESTION = {"stream": True, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


async def test_events_pass_while_the_answer_is_still_to_come(tmp_path: Path) -> None:
    goes_on = anyio.Event()
    async with serving([CHUNKS[0], goes_on], app_options=OPTIONS) as served, behind_nginx(served, tmp_path) as client:
        async with client.stream("POST", "/v1/chat/completions", json=QUESTION) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert await anext(lines) == ""
            assert served.service.queries  # retrieval has not ended, and this has come through
            goes_on.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert len(served.watcher.started[0].id) == 32  # as nginx has it


async def test_a_client_that_leaves_nginx_frees_everything(tmp_path: Path) -> None:
    async with serving([CHUNKS[0], anyio.Event()], app_options=OPTIONS) as served:
        async with behind_nginx(served, tmp_path) as client:
            async with client.stream("POST", "/v1/chat/completions", json=QUESTION):
                await served.watcher.has_begun.wait()
            await served.watcher.has_ended.wait()
            assert (served.source.num_streams, served.backend.num_requests) == (0, 0)
    assert served.watcher.ended == [("chat", "left")]


async def test_a_body_that_is_still_being_sent_is_answered(tmp_path: Path) -> None:
    class Echo:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            is_more = True
            while is_more:
                message = await receive()
                is_more = message["more_body"]
                await send({"type": "http.response.body", "body": message["body"], "more_body": is_more})

    routes = [Route("/echo", Echo(), methods=["POST"])]
    async with serving(app_options=OPTIONS, more_routes=routes) as served, behind_nginx(served, tmp_path) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST /echo HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"5\r\nfirst\r\n")
        async with aclosing_writer(writer):
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert b"first" in await reader.readuntil(b"first\r\n")
            writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
            assert b"second" in await reader.readuntil(b"0\r\n\r\n")


async def test_websockets_pass(tmp_path: Path) -> None:
    websockets = pytest.importorskip("websockets")

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await socket.send_text(message["text"])

    routes = [WebSocketRoute("/echo", echo)]
    async with serving(app_options=OPTIONS, more_routes=routes) as served, behind_nginx(served, tmp_path) as client:
        host, port = client.base_url.host, client.base_url.port
        async with websockets.connect(f"ws://{NAME}/echo", host=host, port=port) as connection:
            for text in ("one", "two"):
                await connection.send(text)
                assert await connection.recv() == text


async def test_a_name_that_is_not_ours_is_refused_behind_nginx_too(tmp_path: Path) -> None:
    async with serving(app_options=OPTIONS) as served, behind_nginx(served, tmp_path) as client:
        assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 421
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_flood_of_requests_and_a_long_head_end_at_nginx(tmp_path: Path) -> None:
    async with serving(app_options=OPTIONS) as served, behind_nginx(served, tmp_path) as client:
        assert (await client.get("/healthz", headers={"x-long": "y" * 16_384})).status_code == 400
        assert (await client.get("/healthz", headers={"x-long": "y" * 4000})).status_code == 200
        statuses = [(await client.get("/healthz")).status_code for _ in range(101)]
        while statuses[-1] != 429:
            statuses.append((await client.get("/healthz")).status_code)
        assert statuses[:50] == [200] * 50
