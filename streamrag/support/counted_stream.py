"""A connection that counts what a server sends: httpcore reads heads, sizes of chunks and trailers as they come."""

import ssl
from typing import Any

import httpcore

MAX_HEAD_BYTES = 1 << 15
"""Bytes from the request to the end of the response's head, any number of interim responses (1xx) included. Common
servers send less than 8 KiB."""

MAX_HEAD_LINES = 400
HEAD_PIECE_BYTES = 1 << 12  # read at a time while a head is awaited: parsing it blocks the event loop


class ResponseTooLargeError(Exception):
    """A server sends more than it should. Never leaves the package."""


class CountedStream(httpcore.AsyncNetworkStream):
    """A stream that counts anew with each request. Call `begin_body` when a response's head has been read."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._max_bytes: int | None = None  # None: the head is awaited
        self.num_bytes = 0
        """Bytes read from the socket since the request was sent."""
        self._num_lines = 0

    def begin_body(self, max_bytes: int) -> None:
        """Allow `max_bytes` for the whole response, of which the head has been read."""
        self._max_bytes = max_bytes

    def check_overhead(self, num_body_bytes: int, max_bytes: int) -> None:
        """Compare what was sent with what was of use.

        :raises ResponseTooLargeError: beside so much of the body, more than that and `max_bytes` was sent.
        """
        if self.num_bytes > 2 * num_body_bytes + max_bytes + MAX_HEAD_BYTES:
            raise ResponseTooLargeError(f"the server has sent {self.num_bytes} bytes for {num_body_bytes} of content")

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
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
