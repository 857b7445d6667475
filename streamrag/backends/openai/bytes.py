"""Limits the bytes that an OpenAI-compatible server sends, both at its socket and in the decoded answer.

A server may send arbitrarily small pieces, and each takes time. Other tasks therefore run between pieces, and the
overhead around them limits their number.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from streamrag.support.counted_stream import CountedStream

KEEP_ALIVE_S = 5.0
MAX_OVERHEAD_BYTES = 1 << 16
"""Most bytes around the content of an answer, such as chunk sizes, in addition to the content's own size."""


class TooMuchError(Exception):
    """The server sent more than allowed; the message is the limit."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a response. Lines are limited only with `max_lines`."""

    max_bytes: int
    max_lines: int | None = None
    max_line_bytes: int = 0


class CountingTransport(httpx.AsyncHTTPTransport):
    """HTTP/1.1 without proxies, over streams that count bytes. Construct it in a thread: it loads certificates."""

    def __init__(self) -> None:  # not httpx's, which has no parameter for a network backend
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=None,  # the pipeline limits concurrent queries
            keepalive_expiry=KEEP_ALIVE_S,
            network_backend=_CountingSockets(),
        )


class _CountingSockets(httpcore.AnyIOBackend):
    async def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        return CountedStream(await super().connect_tcp(*args, **kwargs))


def bound_body(response: httpx.Response, bounds: Bounds) -> None:
    """Make later reads of the body raise TooMuchError beyond these limits, or ResponseTooLargeError at the socket."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    stream = response.extensions["network_stream"]
    counted = stream if isinstance(stream, CountedStream) else None  # not after an upgrade to another protocol
    if counted is not None:
        counted.begin_body(2 * bounds.max_bytes + MAX_OVERHEAD_BYTES)
    response.stream = _BoundedBody(response.stream, counted, bounds)


class _BoundedBody(httpx.AsyncByteStream):
    """The body of a response, which raises when more is read than its bounds allow."""

    def __init__(self, body: httpx.AsyncByteStream, counted: CountedStream | None, bounds: Bounds) -> None:
        self._body = body
        self._counted = counted
        self._bounds = bounds
        self._num_bytes = 0
        self._num_lines = 0
        self._num_line_bytes = 0  # bytes of the unfinished line

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            self._num_bytes += len(piece)
            if self._num_bytes > self._bounds.max_bytes:
                raise TooMuchError(f"{self._bounds.max_bytes:,} bytes")
            if self._counted is not None:
                self._counted.check_overhead(self._num_bytes, MAX_OVERHEAD_BYTES)
            if self._bounds.max_lines is not None:
                self._check_lines(piece, self._bounds.max_lines)
            yield piece
            await asyncio.sleep(0)  # one read from the socket may contain 10,000 pieces

    def _check_lines(self, piece: bytes, max_lines: int) -> None:
        """Count a piece's lines. Raise TooMuchError beyond `max_lines`, or if the unfinished line is too long."""
        self._num_lines += piece.count(b"\n") + piece.count(b"\r")
        if self._num_lines > max_lines:
            raise TooMuchError(f"{max_lines:,} lines")
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
        self._num_line_bytes = self._num_line_bytes + len(piece) if end < 0 else len(piece) - end - 1
        if self._num_line_bytes > self._bounds.max_line_bytes:
            raise TooMuchError(f"{self._bounds.max_line_bytes:,} bytes in one line")

    async def aclose(self) -> None:
        await self._body.aclose()
