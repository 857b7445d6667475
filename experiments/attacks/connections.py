"""Attacks on connections: what is sent on a socket before, and beside, any question."""

import asyncio
import base64
import contextlib
import itertools
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

NUM_CONNECTIONS = 12
PIECE = 65_536

Pieces = Callable[[], Iterator[bytes]]


def head(method: str, path: str, key: str | None, *headers: str) -> bytes:
    """Return the head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    if key:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def upgrade(key: str | None, *headers: str) -> bytes:
    """Return the head of a request for a WebSocket."""
    return head(
        "GET",
        "/v1/responses",
        key,
        "connection: upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        *headers,
    )


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, is_compressed: bool = False) -> bytes:
    """Return a masked WebSocket frame; the mask is zero."""
    first = opcode | 0x80 * is_last | 0x40 * is_compressed
    if len(payload) < 126:
        length = bytes([0x80 | len(payload)])
    elif len(payload) < 65_536:
        length = bytes([0x80 | 126]) + len(payload).to_bytes(2)
    else:
        length = bytes([0x80 | 127]) + len(payload).to_bytes(8)
    return bytes([first]) + length + bytes(4) + payload


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose answers are read and dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def drop(reader: asyncio.StreamReader) -> None:
    """Read until the service closes the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(PIECE):
            pass


async def send(port: int, first: bytes, pieces: Iterator[bytes]) -> int:
    """Send `first` and then `pieces` on one connection until it is closed; return the number of bytes."""
    num_bytes = 0
    async with connected(port) as (reader, writer):
        reading = asyncio.create_task(drop(reader))
        try:
            for piece in itertools.chain([first], pieces):
                writer.write(piece)
                num_bytes += len(piece)
                await writer.drain()
                if reading.done():
                    break
        finally:
            reading.cancel()
    return num_bytes


async def on_connections(
    port: int, seconds: float, first: bytes, pieces: Pieces, num_connections: int = NUM_CONNECTIONS
) -> str:
    """Send on several connections; whichever the service closes is opened again."""
    totals = [0, 0]

    async def again_and_again() -> None:
        while True:
            with contextlib.suppress(OSError):
                totals[0] += 1
                totals[1] += await send(port, first, pieces())
            await asyncio.sleep(0)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(again_and_again() for _ in range(num_connections)))
    return f"{totals[0]} connections, {totals[1] / 1e6:.0f} MB on those that were closed"


OPEN_LINE = b'{"type": "open", "query": "What?"}\n'


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(key: str | None) -> bytes:
    """Return the head and the first line of a stream."""
    return head("POST", "/v1/streams", key, "transfer-encoding: chunked") + chunk(OPEN_LINE)


async def trailers(port: int, key: str | None, seconds: float) -> str:
    """Trailers without end, behind the body of a stream."""
    line = b"x-trailer: " + b"y" * 50 + b"\r\n"
    return await on_connections(
        port, seconds, stream(key) + b"0\r\n", lambda: itertools.repeat(line * (PIECE // len(line)))
    )


async def endless_trailer(port: int, key: str | None, seconds: float) -> str:
    """One trailer without end."""
    return await on_connections(port, seconds, stream(key) + b"0\r\nx: ", lambda: itertools.repeat(b"y" * PIECE))


async def long_heads(port: int, key: str | None, seconds: float) -> str:
    """Heads of 240 KiB in one piece, 25 a second, without a key."""
    whole = head("POST", "/v1/ask", None, *("a:" for _ in range(60_000)))[: 240 << 10] + b"\r\n\r\n"
    return await every(port, seconds, 0.04, whole)


async def every(port: int, seconds: float, pause_s: float, data: bytes) -> str:
    """Send `data` on a new connection every `pause_s`."""
    tasks: list[asyncio.Task[int]] = []
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while loop.time() < end_s:
        tasks.append(asyncio.create_task(send(port, data, iter(()))))
        await asyncio.sleep(pause_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return f"{len(tasks)} connections, {len(tasks) * len(data) / 1e6:.0f} MB"


ATTACKS: dict[str, Callable[[int, str | None, float], Awaitable[str]]] = {
    "trailers": trailers,
    "endless_trailer": endless_trailer,
    "long_heads": long_heads,
}
