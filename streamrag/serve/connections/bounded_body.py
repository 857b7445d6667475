"""The body of a request, bounded in length (413) and in time (408)."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from streamrag.serve.failures import RequestError
from streamrag.serve.limits import Limits


class BoundedBody:
    """A request's body, bounded in length and in time; the body of a stream has no time limit here."""

    def __init__(self, path: str, headers: Headers, receive: Receive, limits: Limits) -> None:
        is_stream = path == "/v1/streams"
        self._headers = headers
        self._receive = receive
        self._max_bytes = limits.max_stream_bytes if is_stream else limits.max_body_bytes
        self._max_s = None if is_stream else limits.body_s
        self._deadline_s: float | None = None
        self._num_bytes = 0
        self.is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        """Whether the whole body was received. A response before that closes the connection."""

    def check_length(self) -> None:
        """Check the announced Content-Length. Raises RequestError if the body is too long."""
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_long()

    async def receive(self) -> Message:
        """Return the next message. Raises RequestError if the body is too long (413) or takes too long (408)."""
        if self.is_read or self._max_s is None:
            message = await self._receive()
        else:
            now = asyncio.get_running_loop().time
            self._deadline_s = now() + self._max_s if self._deadline_s is None else self._deadline_s
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    message = await self._receive()
            except TimeoutError:
                error = f"the body was not received within {self._max_s:g} s"
                raise RequestError(error, status=408, code="body_too_slow") from None
        self.is_read = self.is_read or not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise self._too_long()
        return message

    def _too_long(self) -> RequestError:
        message = f"the body has more than {self._max_bytes:,} bytes, which is the most"
        return RequestError(message, status=413, code="body_too_long")
