"""Attacks on connections: bytes around a question, not the question itself.

Each attack keeps 12 connections busy, and opens one again a quarter of a second after the service has closed it. Floods
of connections are not among them: those take a limit of the rate in front of the service.
"""

import asyncio
import contextlib
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

NUM_CONNECTIONS = 12
NUM_SOCKETS = 150
REOPEN_S = 0.25
HEADS_PER_S = 25
PIECE_BYTES = 65_536


def head(method: str, path: str, key: str | None, *headers: str) -> bytes:
    """Return the head of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    if key:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(key: str | None) -> bytes:
    """Return the head and the first line of a stream."""
    line = b'{"type": "open", "query": "What is the capital of France?"}\n'
    return head("POST", "/v1/streams", key, "transfer-encoding: chunked") + chunk(line)


def socket(key: str | None, *headers: str, path: str = "/v1/responses") -> bytes:
    """Return the head of a request for a WebSocket."""
    fields = ["connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"]
    return head("GET", path, key, *fields, "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", *headers)


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


TEXT, PING = 1, 9


# ---------------------------------------------------------------------------------------------------------- connections


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the service, which is reset at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def drop(reader: asyncio.StreamReader) -> None:
    """Read until the service closes the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(PIECE_BYTES):
            pass


async def flood(port: int, first: bytes, pieces: Iterator[bytes], *, reads: bool, sent: list[int]) -> None:
    """Send `first`, wait for the head of the answer, then send `pieces` until the service closes the connection."""
    async with connected(port) as (reader, writer):
        writer.write(first)
        sent[1] += len(first)
        await reader.readuntil(b"\r\n\r\n")
        reading = asyncio.create_task(drop(reader) if reads else asyncio.sleep(3600))
        try:
            for piece in pieces:
                writer.write(piece)
                sent[1] += len(piece)
                await writer.drain()
                if reading.done():
                    return
            await reading
        finally:
            reading.cancel()


async def flood_all(
    port: int, seconds: float, first: bytes, pieces: Callable[[], Iterator[bytes]], *, reads: bool = True
) -> str:
    """Run `flood` on 12 connections, and open each again when it has ended."""
    sent = [0, 0]

    async def again_and_again() -> None:
        while True:
            sent[0] += 1
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await flood(port, first, pieces(), reads=reads, sent=sent)
            await asyncio.sleep(REOPEN_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(again_and_again() for _ in range(NUM_CONNECTIONS)))
    return f"{sent[0]} connections, {sent[1] / 1e6:.0f} MB"


async def send_heads(port: int, seconds: float, data: bytes) -> str:
    """Send `data` on a new connection 25 times a second."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds

    async def send() -> None:
        async with connected(port) as (reader, writer):
            writer.write(data)
            await drop(reader)

    tasks = []
    while loop.time() < end_s:
        tasks.append(asyncio.create_task(send()))
        await asyncio.sleep(1 / HEADS_PER_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return f"{len(tasks)} connections, {len(tasks) * len(data) / 1e6:.0f} MB"


# ------------------------------------------------------------------------------------------------------------- attacks


def repeated(data: bytes) -> bytes:
    """Return `data` as often as it fits in a piece, once at least."""
    return data * max(PIECE_BYTES // len(data), 1)


async def trailers(port: int, key: str | None, seconds: float) -> str:
    """Send trailers without end behind the body of a stream."""
    piece = repeated(b"x-trailer: " + b"y" * 50 + b"\r\n")
    return await flood_all(port, seconds, stream(key), lambda: itertools.chain([b"0\r\n"], itertools.repeat(piece)))


async def one_trailer(port: int, key: str | None, seconds: float) -> str:
    """Send one trailer without end."""
    return await flood_all(
        port, seconds, stream(key), lambda: itertools.chain([b"0\r\nx: "], itertools.repeat(b"y" * PIECE_BYTES))
    )


async def short_trailers(port: int, key: str | None, seconds: float) -> str:
    """Send as many short trailers as a head may have, and end them."""
    return await flood_all(port, seconds, stream(key), lambda: iter([b"0\r\n" + b"a:\r\n" * 4000 + b"\r\n"]))


async def chunk_extension(port: int, key: str | None, seconds: float) -> str:
    """Send an extension of a chunk without end."""
    return await flood_all(
        port, seconds, stream(key), lambda: itertools.chain([b"1;x="], itertools.repeat(b"y" * PIECE_BYTES))
    )


async def tiny_chunks(port: int, key: str | None, seconds: float) -> str:
    """Send a stream's blank lines in chunks of one byte."""
    return await flood_all(port, seconds, stream(key), lambda: itertools.repeat(repeated(chunk(b"\n"))))


async def blank_lines(port: int, key: str | None, seconds: float) -> str:
    """Send blank lines on a stream."""
    return await flood_all(port, seconds, stream(key), lambda: itertools.repeat(chunk(b"\n" * PIECE_BYTES)))


async def tiny_lines(port: int, key: str | None, seconds: float) -> str:
    """Send the shortest lines that a stream can have."""
    line = json.dumps({"type": "skipped", "uri": "", "reason": ""}, separators=(",", ":")).encode() + b"\n"
    return await flood_all(port, seconds, stream(key), lambda: itertools.repeat(chunk(repeated(line))))


async def long_heads(port: int, key: str | None, seconds: float) -> str:
    """Send heads of 240 KiB in one piece, without a key."""
    return await send_heads(port, seconds, head("POST", "/v1/ask", None, *["a:"] * 61_440))


async def short_headers(port: int, key: str | None, seconds: float) -> str:
    """Send heads of short lines, as long as a head may be, without a key."""
    return await send_heads(port, seconds, head("POST", "/v1/ask", None, *["a:"] * 4000))


async def empty_fragments(port: int, key: str | None, seconds: float) -> str:
    """Send empty fragments of one message."""
    piece = repeated(frame(0, is_last=False))
    return await flood_all(
        port, seconds, socket(key), lambda: itertools.chain([frame(TEXT, is_last=False)], itertools.repeat(piece))
    )


async def tiny_fragments(port: int, key: str | None, seconds: float) -> str:
    """Send fragments of one byte."""
    piece = repeated(frame(0, b"a", is_last=False))
    return await flood_all(
        port, seconds, socket(key), lambda: itertools.chain([frame(TEXT, is_last=False)], itertools.repeat(piece))
    )


async def large_fragments(port: int, key: str | None, seconds: float) -> str:
    """Send large fragments of one message."""
    piece = frame(0, b"a" * 60_000, is_last=False)
    return await flood_all(
        port, seconds, socket(key), lambda: itertools.chain([frame(TEXT, is_last=False)], itertools.repeat(piece))
    )


async def pings(port: int, key: str | None, seconds: float) -> str:
    """Send pings, and read what comes back."""
    return await flood_all(port, seconds, socket(key), lambda: itertools.repeat(repeated(frame(PING))))


async def unread_pings(port: int, key: str | None, seconds: float) -> str:
    """Send pings, and read nothing."""
    piece = repeated(frame(PING, b"a" * 125))
    return await flood_all(port, seconds, socket(key), lambda: itertools.repeat(piece), reads=False)


async def empty_messages(port: int, key: str | None, seconds: float) -> str:
    """Send messages of no bytes."""
    return await flood_all(port, seconds, socket(key), lambda: itertools.repeat(repeated(frame(TEXT))))


async def unused_openings(port: int, key: str | None, seconds: float) -> str:
    """Open questions of a megabyte on 150 sockets, one wide character in each, and use none of them."""
    history = [{"role": "user", "content": "\U0001f600" + "x" * 1_000_000}]
    opening = json.dumps({"type": "open", "id": "q", "history": history}, ensure_ascii=False).encode()

    async def hold() -> None:
        async with connected(port) as (reader, writer):
            writer.write(socket(key, path="/v1/ask/socket") + frame(TEXT, opening))
            await drop(reader)
            await asyncio.Event().wait()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(hold() for _ in range(NUM_SOCKETS)), return_exceptions=True)
    return f"{NUM_SOCKETS} sockets, {NUM_SOCKETS * len(opening) / 1e6:.0f} MB"


async def compressed_messages(port: int, key: str | None, seconds: float) -> str:
    """Send messages that inflate a thousandfold."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = (deflate.compress(b"a" * 1_900_000) + deflate.flush(zlib.Z_SYNC_FLUSH))[:-4]
    piece = repeated(frame(TEXT, data, is_compressed=True))
    first = socket(key, "sec-websocket-extensions: permessage-deflate")
    return await flood_all(port, seconds, first, lambda: itertools.repeat(piece))


ATTACKS: dict[str, Callable[[int, str | None, float], Coroutine[Any, Any, str]]] = {
    attack.__name__: attack
    for attack in (
        trailers,
        one_trailer,
        short_trailers,
        chunk_extension,
        tiny_chunks,
        blank_lines,
        tiny_lines,
        long_heads,
        short_headers,
        empty_fragments,
        tiny_fragments,
        large_fragments,
        pings,
        unread_pings,
        empty_messages,
        unused_openings,
        compressed_messages,
    )
}
