"""A connection that bounds what httpcore buffers before it returns: response heads, chunk sizes and trailers."""

import ssl
from typing import Any

import httpcore

MAX_HEAD_BYTES = 1 << 15
"""Bytes from the request to the end of the response head, interim responses (1xx) included. Common servers send less
than 8 KiB."""

MAX_HEAD_LINES = 400
HEAD_PIECE_BYTES = 1 << 12  # bytes per read before the head is complete: parsing them blocks the event loop


class ResponseTooLargeError(Exception):
    """A server sends more than the limits allow. Never leaves the package."""


class CountedStream(httpcore.AsyncNetworkStream):
    """A stream that counts the bytes of each response. Call `begin_body` after reading the response head."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._max_bytes: int | None = None  # None before the head is complete
        self.num_bytes = 0  # bytes read from the socket since the request was sent
        self._num_lines = 0

    def begin_body(self, max_bytes: int) -> None:
        """Set the limit for the whole response, its head included."""
        self._max_bytes = max_bytes

    def check_overhead(self, num_body_bytes: int, max_bytes: int) -> None:
        """Raise ResponseTooLargeError if over `num_body_bytes` + `max_bytes` bytes were sent beside the body."""
        if self.num_bytes > 2 * num_body_bytes + max_bytes + MAX_HEAD_BYTES:
            raise ResponseTooLargeError(f"the server has sent {self.num_bytes} bytes for {num_body_bytes} of content")

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read up to `max_bytes`, fewer in the head; raise ResponseTooLargeError beyond a limit, or ReadError."""
        if self._max_bytes is None:
            if self.num_bytes >= MAX_HEAD_BYTES or self._num_lines > MAX_HEAD_LINES:
                raise ResponseTooLargeError(f"the head of the server's answer is larger than {MAX_HEAD_BYTES} bytes")
            max_bytes = min(max_bytes, HEAD_PIECE_BYTES)
        elif self.num_bytes >= self._max_bytes:
            raise ResponseTooLargeError(f"the server has sent {self.num_bytes} bytes")
        try:
            piece = await self._stream.read(max_bytes, timeout)
        except OSError as error:  # a broken TLS record is an ssl.SSLError, which httpcore does not translate
            raise httpcore.ReadError(str(error)) from error
        self.num_bytes += len(piece)
        if self._max_bytes is None:
            self._num_lines += piece.count(b"\n")
        return piece

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write a request, which starts the counts anew. An OSError becomes an httpcore.WriteError."""
        self._max_bytes, self.num_bytes, self._num_lines = None, 0, 0
        try:
            await self._stream.write(buffer, timeout)
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
