"""Limits on what an MCP server sends: per message, and in total for messages that are not answers.

Messages over HTTP are limited before they are parsed, because parsing blocks the event loop. Those of a server process,
which the user trusts, and the total are counted after parsing.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

import anyio
import httpx2
from mcp.types import JSONRPCError, JSONRPCRequest, JSONRPCResponse
from pydantic import ValidationError

from streamrag.support.bounded_reading import MarkedText

MAX_VALUES = 1 << 16  # maximum number of values in an HTTP message; parsing each takes memory and time
MAX_OPEN_REQUESTS = 64  # maximum number of the server's open requests; it may not read our answers
MAX_ASKED = 10_000  # maximum number of our requests to remember; some are never answered
MESSAGE_BYTES = 1 << 10  # overhead that is counted for a message, in bytes: each creates a task
JUNK_BYTES = 63 << 10  # further overhead that is counted for an invalid message, in bytes: each is logged
BYTES_PER_S = 1 << 20  # maximum rate of unsolicited bytes (leaky bucket)
MIN_BURST_BYTES = 1 << 23  # minimum burst of unsolicited bytes; the burst is at least two messages of maximum length

_BLANK_LINE = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r(?!\n)|\n)")


class Traffic:
    """A counter of one connection's messages, which calls `drop` with a reason when a limit is exceeded."""

    def __init__(self, max_bytes: int, drop: Callable[[str], None]) -> None:
        self._max_bytes = max_bytes
        self._burst_bytes = max(MIN_BURST_BYTES, 2 * max_bytes)
        self._drop = drop
        self._asked: dict[str, None] = {}
        self._num_open = 0
        self._unasked_bytes = 0.0
        self._now = asyncio.get_running_loop().time
        self._counted_s = self._now()
        self.answered_s = self._now()
        """Time of the server's last answer."""
        self.is_dropped = False

    @asynccontextmanager
    async def counted(self, transport: AbstractAsyncContextManager[Any]) -> AsyncGenerator[Any, None]:
        """Open a transport, and yield its two streams wrapped so that their messages are counted."""
        async with transport as (read, write):
            yield _CountedRead(read, self), _CountedWrite(write, self)

    def sends(self, message: object) -> None:
        """Remember the id of a request that is about to be sent, and forget the oldest of more than `MAX_ASKED`."""
        if isinstance(message, JSONRPCRequest):
            self._asked[str(message.id)] = None
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]

    def sent(self, message: object) -> None:
        """Count one open request less for an answer of ours that the server, or its pipe, has accepted."""
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._num_open -= 1

    def came(self, item: Any) -> None:
        """Count a message or a parse error as unsolicited; for an answer to a request of ours, only set `answered_s`.

        Too many such bytes in a short time, too many open requests of the server, or an answer of more than `max_bytes`
        drop the connection.
        """
        message: Any = getattr(item, "message", None)
        num_bytes = _junk_bytes(item) if message is None else len(message.model_dump_json())
        if isinstance(message, JSONRPCResponse | JSONRPCError) and str(message.id) in self._asked:
            del self._asked[str(message.id)]
            self.answered_s = self._now()
            if num_bytes > self._max_bytes:
                self._end(f"one answer has more than {self._max_bytes:,} bytes")
            return
        if isinstance(message, JSONRPCRequest):
            self._num_open += 1
            if self._num_open > MAX_OPEN_REQUESTS:
                self._end(f"it has more than {MAX_OPEN_REQUESTS} open requests, and does not read the answers")
        before_s, self._counted_s = self._counted_s, self._now()
        leaked = BYTES_PER_S * (self._counted_s - before_s)
        self._unasked_bytes = max(0.0, self._unasked_bytes - leaked) + num_bytes + MESSAGE_BYTES
        if self._unasked_bytes > self._burst_bytes:
            self._end("it has sent too many unsolicited messages")

    def _end(self, reason: str) -> None:
        """Drop the connection for this reason. From now on, nothing is read from it."""
        self.is_dropped = True
        self._drop(reason)


def _junk_bytes(error: object) -> int:
    """Return the bytes to count for a parse error: the overhead, and the unparsed text if known."""
    text = error.errors(include_url=False)[0]["input"] if isinstance(error, ValidationError) else ""
    return JUNK_BYTES + (len(text) if isinstance(text, str) else 0)


def _has_too_many_values(message: bytes | bytearray) -> bool:
    """Whether a JSON message has more than `MAX_VALUES` commas and opening brackets outside of its strings."""
    if _num_values(message) <= MAX_VALUES:
        return False
    outside = message.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    return _num_values(b"".join(outside)) > MAX_VALUES


def _num_values(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


class _Counted:
    """A wrapper of a stream of `mcp` that counts its messages."""

    def __init__(self, stream: Any, traffic: Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class _CountedRead(_Counted):
    """A stream of the server's messages, which ends when the connection is dropped."""

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """Return the next message, after it was counted; raise EndOfStream if the connection is, or gets, dropped."""
        if not self._traffic.is_dropped:
            item = await self._stream.receive()
            self._traffic.came(item)
        if self._traffic.is_dropped:
            raise anyio.EndOfStream
        return item

    def __aiter__(self) -> "_CountedRead":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class _CountedWrite(_Counted):
    async def send(self, item: Any) -> None:
        self._traffic.sends(item.message)
        await self._stream.send(item)
        self._traffic.sent(item.message)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """An HTTP transport that limits each message, JSON or event, to `max_bytes` and `MAX_VALUES`.

    Bodies are neither decompressed nor decoded with a codec that the server names.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request; return the response. Reading its body raises StreamError or SSEError beyond the limits."""
        response = await self._transport.handle_async_request(request)
        response.headers.pop("content-encoding", None)
        response.encoding = "utf-8-sig"
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = (_BoundedEvents if is_stream else _BoundedBody)(response.stream, self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _BoundedBody(httpx2.AsyncByteStream):
    """A body of one JSON message, within the limits."""

    def __init__(self, body: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._body = body
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the text's pieces; raise StreamError beyond `max_bytes`, and at the end for too many values."""
        whole, text = bytearray(), MarkedText()
        async for piece in self._body:
            whole += piece
            self._check_length(whole)
            yield text.convert(piece)
            await asyncio.sleep(0)  # one read from the socket may hold 10,000 pieces
        if _has_too_many_values(whole):
            raise httpx2.StreamError(f"more than {MAX_VALUES:,} values in one answer")

    def _check_length(self, message: bytearray) -> None:
        """Raise StreamError if a message has more than `max_bytes`."""
        if len(message) > self._max_bytes:
            raise httpx2.StreamError(f"more than {self._max_bytes:,} bytes in one answer")

    async def aclose(self) -> None:
        await self._body.aclose()


class _BoundedEvents(_BoundedBody):
    """A body of server-sent events, each within the limits."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield each piece once the events that it ends, and the length of the unfinished one, are checked."""
        event = bytearray()
        async for piece in self._body:
            num_seen = max(0, len(event) - 3)
            event += piece
            begin = 0
            for end in _BLANK_LINE.finditer(event, num_seen):
                self._check(event[begin : end.end()])
                begin = end.end()
            del event[:begin]
            self._check_length(event)
            yield piece
            await asyncio.sleep(0)
        self._check(event)  # the last event may lack a blank line

    def _check(self, event: bytearray) -> None:
        """Raise StreamError for an event of more than `max_bytes`, SSEError for one with too many lines or values."""
        self._check_length(event)
        if len(event) <= MAX_VALUES:
            return
        if event.count(b"\n") + event.count(b"\r") > 2 * MAX_VALUES:
            raise httpx2.SSEError(f"more than {MAX_VALUES:,} lines in one event")
        lines = (line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        if _has_too_many_values(b"\n".join(lines)):
            raise httpx2.SSEError(f"more than {MAX_VALUES:,} values in one event")
