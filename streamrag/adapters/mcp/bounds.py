"""What an MCP server may send: how much in one message, and how much that nobody has asked for.

A message is bounded before it is parsed, since that blocks the event loop: here, over HTTP, and by `relay` for a
server that was started. Whatever has no bound of its own is counted when it has been parsed.
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

from streamrag.adapters.mcp.relay import MAX_VALUES, has_too_many_values

MAX_OPEN_REQUESTS = 64
"""Requests of the server that were not answered yet; it may not read the answers."""
MAX_ASKED = 10_000
"""Requests of ours that are remembered; some are never answered."""
MESSAGE_BYTES = 1 << 10
"""Bytes that a message counts for beside its own: it is a task."""
JUNK_BYTES = 1 << 16
"""Bytes that a line that is no message counts for beside its own: it is logged."""
BYTES_PER_S = 1 << 20
"""Rate of bytes that a server may send without being asked."""
MIN_BURST_BYTES = 1 << 23
"""Bytes that it may send at once: so many, or two messages of the longest."""

_BLANK_LINE = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r(?!\n)|\n)")


class Traffic:
    """Counts the messages of one connection, and calls `drop`, with a reason, when it is too much."""

    def __init__(self, max_bytes: int, drop: Callable[[str], None]) -> None:
        self._burst_bytes = max(MIN_BURST_BYTES, 2 * max_bytes)
        self._drop = drop
        self._asked: dict[str, None] = {}
        self._num_open = 0
        self._unasked_bytes = 0.0
        self._now = asyncio.get_running_loop().time
        self._counted_s = self._now()
        self.answered_s = self._now()
        """When the server has last answered."""
        self.is_dropped = False

    @asynccontextmanager
    async def counted(self, transport: AbstractAsyncContextManager[Any]) -> AsyncGenerator[Any, None]:
        """The same transport, with its messages counted."""
        async with transport as (read, write):
            yield _CountedRead(read, self), _CountedWrite(write, self)

    def sends(self, message: object) -> None:
        """We send that now."""
        if isinstance(message, JSONRPCRequest):
            self._asked[str(message.id)] = None
            if len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]

    def sent(self, message: object) -> None:
        """The server, or its pipe, has taken it."""
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._num_open -= 1

    def came(self, item: Any) -> None:
        """A message from the server, or what failed to be one."""
        message: Any = getattr(item, "message", None)
        if isinstance(message, JSONRPCResponse | JSONRPCError) and str(message.id) in self._asked:
            del self._asked[str(message.id)]
            self.answered_s = self._now()
            return
        if isinstance(message, JSONRPCRequest):
            self._num_open += 1
            if self._num_open > MAX_OPEN_REQUESTS:
                self._end(f"it has {MAX_OPEN_REQUESTS} requests open, and does not read the answers")
        num_bytes = _junk_bytes(item) if message is None else len(message.model_dump_json()) + MESSAGE_BYTES
        before_s, self._counted_s = self._counted_s, self._now()
        leaked = BYTES_PER_S * (self._counted_s - before_s)
        self._unasked_bytes = max(0.0, self._unasked_bytes - leaked) + num_bytes
        if self._unasked_bytes > self._burst_bytes:
            self._end("it has sent too much that nobody asked for")

    def _end(self, reason: str) -> None:
        self.is_dropped = True
        self._drop(reason)


def _junk_bytes(error: object) -> int:
    """Return the bytes that a parse error counts for, with its text where the parser says what it could not read."""
    text = error.errors(include_url=False)[0]["input"] if isinstance(error, ValidationError) else ""
    return JUNK_BYTES + (len(text) if isinstance(text, str) else 0)


class _Counted:
    """A stream of `mcp`, which counts what passes through it."""

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
    """A counting `ReadStream` of `mcp`."""

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
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
    """A counting `WriteStream` of `mcp`."""

    async def send(self, item: Any) -> None:
        self._traffic.sends(item.message)
        await self._stream.send(item)
        self._traffic.sent(item.message)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A message over HTTP, be it JSON or an event, has at most `max_bytes` and `MAX_VALUES`.

    Nothing is decompressed, or decoded by a codec that the server names.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._transport.handle_async_request(request)
        response.headers.pop("content-encoding", None)
        response.encoding = "utf-8"
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        response.stream = (_BoundedEvents if is_stream else _BoundedBody)(response.stream, self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._body = body
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        whole = bytearray()
        async for piece in self._body:
            whole += piece
            self._check_length(whole)
            yield piece
            await asyncio.sleep(0)  # one read from the socket may hold 10,000 pieces
        if has_too_many_values(whole):
            raise httpx2.StreamError(f"more than {MAX_VALUES:,} values in one answer")

    def _check_length(self, message: bytearray) -> None:
        if len(message) > self._max_bytes:
            raise httpx2.StreamError(f"more than {self._max_bytes:,} bytes in one answer")

    async def aclose(self) -> None:
        await self._body.aclose()


class _BoundedEvents(_BoundedBody):
    async def __aiter__(self) -> AsyncIterator[bytes]:
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
        self._check(event)  # an end is the end of an event too

    def _check(self, event: bytearray) -> None:
        self._check_length(event)
        if len(event) <= MAX_VALUES:
            return
        if event.count(b"\n") + event.count(b"\r") > 2 * MAX_VALUES:
            raise httpx2.SSEError(f"more than {MAX_VALUES:,} lines in one event")
        lines = (line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        if has_too_many_values(b"\n".join(lines)):
            raise httpx2.SSEError(f"more than {MAX_VALUES:,} values in one event")
