"""What uvicorn leaves open: slow and long heads, pipelining, smuggling, idle connections, closing in mid-body."""

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import websockets
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.server import ServerState

from streamrag import Append
from streamrag.serve import Limits, Service, create_app
from streamrag.serve.connections.http import MAX_REFUSED, READ_BYTES, BoundedProtocol
from streamrag.serve.failures import ANONYMOUS
from streamrag.serve.server import listen, uvicorn_config
from streamrag.testing import ScriptedBackend, Step
from tests.serve.raw import Raw, raw
from tests.serve.serving import CHUNKS, PARIS, Serving, limits_of, serving

ASKED = {"question": "What is the capital of France?"}


async def works(served: Serving) -> None:
    """A good request gets its answer."""
    answer = await served.http.post("/v1/ask", json=ASKED)
    assert answer.status_code == 200
    assert "event: answered" in answer.text


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/ask HTTP/1.1", "host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_a_head_that_does_not_come_in_time_is_hung_up_on() -> None:
    async with serving(limits=limits_of(head_s=2)) as served, AsyncExitStack() as clients:
        silent, slow, second = [await clients.enter_async_context(raw(served.url)) for _ in range(3)]
        await slow.send(b"POST /v1/ask HTTP/1.1\r\nhost: loc")
        await second.post("/v1/ask", ASKED)
        assert await second.status() == 200
        await second.text()
        await second.send(b"P")  # its second head is as slow
        for client in (silent, slow, second):
            assert await client.is_closed()
        await works(served)


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_head_that_is_too_long_is_refused(is_whole: bool) -> None:
    async with serving(limits=limits_of(max_head_bytes=4096)) as served, raw(served.url) as client:
        head = request(b"", "content-length: 0", *(f"x-{i}: {'y' * 100}" for i in range(120)))
        if is_whole:
            await client.send(head)
        else:
            for start in range(0, len(head) - 4, 1000):
                await client.send(head[start : start + 1000][: len(head) - 4 - start])
        status = await client.status()
        assert status in (400, 431)
        assert json.loads(await client.text())["error"]["code"] == "http"
        await works(served)


@pytest.fixture
def num_received(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the bytes that were parsed."""
    counter: Counter[str] = Counter()
    parse = BoundedProtocol.data_received

    def counting(self: BoundedProtocol, data: bytes) -> None:
        counter["bytes"] += len(data)
        parse(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", counting)
    return counter


async def test_a_head_that_comes_in_one_piece_is_parsed_no_further_than_the_limit(num_received: Counter[str]) -> None:
    limits = limits_of(max_head_bytes=8192)
    async with serving(limits=limits) as served, raw(served.url) as client:
        client.writer.write(request(b"", *(f"x-{i}: {'y' * 1000}" for i in range(100)), "content-length: 0"))
        assert await client.status() in (400, 431)
        assert num_received["bytes"] <= limits.max_head_bytes + READ_BYTES
        await works(served)


async def test_a_head_of_many_lines_is_refused_before_they_are_parsed(num_received: Counter[str]) -> None:
    async with serving() as served, raw(served.url) as client:
        client.writer.write(request(b"", *["a:"] * 5000))
        assert await client.status() == 431
        assert "lines" in json.loads(await client.text())["error"]["message"]
        assert num_received["bytes"] <= READ_BYTES
        await works(served)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", b"x: " + b"y" * 995 + b"\r\n"),
        (b"0\r\n", b"a:\r\n" * 2000),
        (b"0\r\nx: ", b"y" * 1000),
        (b"1;x=", b"y" * 1000),
    ],
    ids=["trailers", "short trailers", "one trailer", "an extension of a chunk"],
)
async def test_trailers_and_extensions_around_a_body_are_bounded(
    num_received: Counter[str], begin: bytes, piece: bytes
) -> None:
    async with serving() as served, raw(served.url) as client:
        await client.post("/v1/streams")
        await client.line({"type": "open", "query": "What?"})
        assert await client.status() == 200
        before = num_received["bytes"]
        client.writer.write(begin + piece * 1000)
        assert await client.is_closed()
        assert num_received["bytes"] - before <= served.service.limits.max_head_bytes + 2 * READ_BYTES
        await works(served)


async def test_a_message_in_fragments_without_end_is_closed_at_the_limit_and_nothing_is_inflated() -> None:
    limits = limits_of(max_frame_bytes=4096)
    async with serving(limits=limits) as served:
        async with websockets.connect(f"ws{served.url.removeprefix('http')}/v1/responses") as client:
            assert client.protocol.extensions == []

            async def fragments() -> AsyncIterator[str]:
                for _ in range(1000):
                    yield "x" * 100

            with suppress(websockets.ConnectionClosed):
                await client.send(fragments())
            await client.wait_closed()
            assert client.close_code == 1009
        await works(served)


@pytest.mark.parametrize(
    ("frame", "type"), [("", "error"), ('{"type": "append", "data": ["reading"], "id": "a"}', "appended")]
)
async def test_a_socket_of_many_frames_is_read_at_a_slower_pace(frame: str, type: str) -> None:
    async with serving() as served:
        share = served.app._turns[ANONYMOUS]._share
        share.now_s = lambda: 0.0  # on a busy machine, frames come so slowly that they are free
        id = (await served.http.post("/v1/sessions", json={})).json()["id"]
        async with websockets.connect(f"ws{served.url.removeprefix('http')}/v1/sessions/{id}/socket") as client:
            while not share.busy_until_s:
                await client.send(frame)
                while json.loads(await client.recv())["type"] != type:
                    pass


async def test_a_pipelined_request_is_dropped_and_its_connection_closed() -> None:
    """While it waits, uvicorn would not read on, and not see the client leave."""
    body = json.dumps(ASKED).encode()
    one = request(body, f"content-length: {len(body)}")
    async with serving() as served:
        for sends in ([one + one + one], [one, one]):
            async with raw(served.url) as client:
                for data in sends:
                    await client.send(data)
                assert await client.status() == 200
                assert "event: answered" in await client.text()
                assert await client.is_closed()
        await works(served)
    assert len(served.watcher.started) == 3


async def test_a_client_that_pipelines_is_seen_to_leave() -> None:
    body = json.dumps(ASKED).encode()
    one = request(body, f"content-length: {len(body)}")
    async with serving([Append(PARIS), anyio.Event()]) as served:
        async with raw(served.url) as client:
            await client.send(one * 3)
            await served.watcher.has_begun.wait()
        async with asyncio.timeout(120):
            await served.watcher.has_ended.wait()
        assert served.source.num_streams == 0


@pytest.mark.parametrize(
    "head",
    [
        ("content-length: 4", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "content-length: 4"),
        ("content-length: 4", "content-length: 5"),
        ("content-length: +4",),
        ("content-length: 4, 5",),
        ("transfer-encoding: chunked, identity",),
        ("transfer-encoding : chunked",),
        ("transfer-encoding: xchunked",),
        ("content-length: 4\r\n folded: yes",),
    ],
)
async def test_no_second_request_is_smuggled_in_the_first(head: tuple[str, ...]) -> None:
    hidden = request(json.dumps(ASKED).encode(), f"content-length: {len(json.dumps(ASKED))}")
    async with serving() as served:
        async with raw(served.url) as client:
            await client.send(request(b"0\r\n\r\n" + hidden, *head))
            assert 400 <= await client.status() < 500
            assert await client.is_closed()
        assert served.watcher.started == []
        await works(served)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\x00: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: [\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\norigin: http://[\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_request_get_a_4xx_in_the_form_of_all_errors(garbage: bytes) -> None:
    async with serving() as served, raw(served.url) as client:
        await client.send(garbage)
        assert 400 <= await client.status() < 500
        assert json.loads(await client.text())["error"]["message"]
        await works(served)


async def test_a_refusal_reaches_a_client_that_still_sends() -> None:
    async with serving(limits=Limits(max_body_bytes=100_000)) as served, raw(served.url) as client:
        await client.send(request(b"", "content-length: 900000000"))
        for _ in range(64):
            await client.send(b"x" * 65_536)
        assert await client.status() == 413
        assert json.loads(await client.text())["error"]["code"] == "body_too_long"
        await works(served)


@pytest.mark.parametrize("path", ["/v1/ask", "/v1/nowhere"])
async def test_an_answer_before_the_end_of_a_body_says_that_it_is_the_connections_last(path: str) -> None:
    limits = Limits(max_body_bytes=2000)
    async with serving(limits=limits) as served, raw(served.url) as client:
        await client.post(path)
        for _ in range(5):
            await client.piece(b"x" * 1000)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"keep-alive" not in head
        assert await client.is_closed()
        await works(served)


async def test_a_body_that_does_not_come_in_time_is_refused() -> None:
    async with serving(limits=limits_of(body_s=0.3)) as served, raw(served.url) as client:
        await client.send(request(b'{"quest', "content-length: 100"))
        assert await client.status() == 408
        assert json.loads(await client.text())["error"]["code"] == "body_too_slow"
        assert await client.is_closed()
        await works(served)


async def test_a_malformed_http_chunk_in_mid_stream_ends_the_query() -> None:
    async with serving() as served, raw(served.url) as client:
        await client.post("/v1/streams")
        await client.line({"type": "open", "query": "What?"})
        assert await client.status() == 200
        await client.until("retrieval_started")
        await client.send(b"this is no chunk\r\n")
        assert await client.is_closed()
        async with asyncio.timeout(120):
            await served.watcher.has_ended.wait()
    assert served.watcher.ended == [("streams", "left")]


async def test_an_event_is_not_held_back_until_the_one_before_was_acknowledged() -> None:
    config = uvicorn_config(create_app(Service(ScriptedBackend(), None)), Limits())
    config.load()
    made: list[Any] = []

    def make() -> asyncio.Protocol:
        made.append(config.http_protocol_class(config, ServerState(), {}))  # type: ignore[operator]
        return made[-1]

    sock = listen("127.0.0.1", 0)
    async with await asyncio.get_running_loop().create_server(make, sock=sock):
        async with raw(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
            await client.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            kept = made[0].get_extra_info("socket")
            assert await client.status() == 200
            assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


async def test_a_websocket_outlives_the_time_for_a_head() -> None:
    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)

    async with (
        serving(limits=limits_of(head_s=2), more_routes=[WebSocketRoute("/echo", echo)]) as served,
        raw(served.url) as slow,
    ):
        async with websockets.connect(f"ws{served.url.removeprefix('http')}/echo") as client:
            assert await slow.is_closed()  # which has sent no head, and came before
            await client.send("still here")
            assert await client.recv() == "still here"


async def test_a_thousand_idle_connections_delay_no_request() -> None:
    async with serving(CHUNKS, limits=limits_of(head_s=60)) as served, AsyncExitStack() as clients:
        held: list[Raw] = [await clients.enter_async_context(raw(served.url)) for _ in range(1000)]
        await works(served)
        last = held[-1]
        await last.post("/v1/ask", ASKED)
        assert await last.status() == 200
        assert "event: answered" in await last.text()


async def test_connections_beyond_the_limit_are_told_so() -> None:
    async with serving(limits=limits_of(max_connections=5, head_s=60)) as served:
        async with AsyncExitStack() as clients:
            for _ in range(5):
                await clients.enter_async_context(raw(served.url))
            upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x" * 24}
            for path, headers in (("/healthz", {}), ("/v1/responses", {**upgrade, "sec-websocket-version": "13"})):
                answer = await served.http.get(path, headers=headers)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "too_many_connections"
                assert (answer.headers["retry-after"], answer.headers["connection"]) == ("5", "close")
        async with asyncio.timeout(120):
            while (await served.http.get("/healthz")).status_code != 200:
                pass


async def test_far_more_connections_than_the_limit_are_hung_up_on() -> None:
    async with serving(limits=limits_of(max_connections=5, head_s=60)) as served, AsyncExitStack() as clients:
        many = [await clients.enter_async_context(raw(served.url)) for _ in range(5 + MAX_REFUSED + 3)]
        for client in many[-3:]:
            assert await client.is_closed()
        await many[0].post("/v1/ask", ASKED)
        assert await many[0].status() == 200, "it came when there was room"


def num_held() -> int:
    """Files, sockets and tasks."""
    return len(os.listdir("/proc/self/fd")) + len(asyncio.all_tasks())


async def test_a_storm_of_clients_that_connect_and_drop_leaves_nothing_behind() -> None:
    """At every stage: with no word, in a head, in a body, with an answer under way, as a WebSocket."""
    whole = request(b'{"question": "What?"}', "content-length: 21", "authorization: Bearer storm")
    upgrade = (
        b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer storm\r\nconnection: upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    said = (b"", whole[:20], whole[:-5], whole, upgrade)

    def steps(query: str) -> Iterable[Step]:
        return (Append(PARIS), 1000.0) if query == "What?" else CHUNKS

    async with serving(steps, keys={"key": "ada", "storm": "bob"}) as served:
        await works(served)
        before = num_held()

        async def drop(number: int) -> None:
            _, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
            writer.write(said[number % len(said)])
            await asyncio.sleep(0)
            if number % 2:
                writer.transport.abort()
            else:
                writer.close()

        for _ in range(2):
            await asyncio.gather(*(drop(number) for number in range(250)))
            await works(served)  # others are served meanwhile
        async with asyncio.timeout(120):
            while served.service.queries or num_held() > before:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0)
        assert served.backend.num_requests == served.source.num_streams == 0
        assert served.watcher.started


async def test_a_reader_that_comes_back_again_and_again_leaves_nothing_behind() -> None:
    async with serving() as served:
        session = (await served.http.post("/v1/sessions", json={})).json()["id"]
        await works(served)
        before = num_held()
        for number in range(100):
            async with raw(served.url) as reader:
                head = f"GET /v1/sessions/{session}/events HTTP/1.1\r\nhost: localhost\r\nlast-event-id: {number}"
                await reader.send(f"{head}\r\n\r\n".encode())
                assert await reader.status() == 200
                await reader.until("session")
        async with asyncio.timeout(120):
            while num_held() > before:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0)


async def test_a_websocket_whose_message_does_not_become_whole_is_closed() -> None:
    async with serving(limits=limits_of(body_s=0.1)) as served:
        address = served.url.replace("http", "ws") + "/v1/ask/socket"
        async with websockets.connect(address, close_timeout=1) as connection:
            waits = asyncio.Event()

            async def pieces() -> AsyncIterator[str]:
                yield '{"type": "open", "id"'
                await waits.wait()

            sending = asyncio.create_task(connection.send(pieces()))
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await connection.recv()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (
                1008,
                "a message was not received within 0.1 s",
            )
            waits.set()
            await asyncio.wait([sending])
            sending.exception()
