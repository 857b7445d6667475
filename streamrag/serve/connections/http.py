"""uvicorn's connections, with limits on heads and CPU time, one request at a time, and a close that always ends.

uvicorn parses with h11 and wsproto here, which bound what they buffer: heads, trailers, chunk extensions, frames,
fragments. This module bounds the CPU time of parsing, and fixes what uvicorn leaves open:

- uvicorn waits for a request's head without a timeout.
- While a pipelined request waits, uvicorn stops reading and does not notice a disconnect. Here, pipelined bytes are
  dropped and the connection is closed after the current response, as RFC 9112 allows; the client sends them again.
- After a refused body, reading continues for a moment: a reset would discard the response before the client reads it.
- A client beyond the connection limit gets an error in the usual form.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.connections.gate import OnFailure
from streamrag.serve.failures import Failure, RequestError, failure_of
from streamrag.serve.limits import Limits

LINGER_S = 2.0  # seconds for the client to read the response and to stop sending, before the connection is aborted
MAX_REFUSED = 64  # number of connections beyond the limit that get an error; further ones are aborted
RETRY_AFTER_S = 5.0  # Retry-After of these errors, in seconds
MAX_LINES = 128  # Maximum lines of an unfinished head or of trailers. h11 parses them all at once, in 3 us per line.
READ_BYTES = 4096  # bytes read from a connection per turn of the event loop: at most 8 ms of parsing

MAX_S_PER_BYTE = 0.000_004
"""Maximum CPU seconds to parse one byte. Anything longer was something else, such as garbage collection."""


class HttpConnection(asyncio.BufferedProtocol):
    """A proxy between asyncio's transport and uvicorn's protocol: a protocol for one, a transport for the other.

    Reads little per turn of the event loop, and pauses if parsing takes too much CPU time. `close` takes effect even if
    the client reads nothing or sends forever.
    """

    def __init__(self, protocol: "BoundedProtocol", account: Account) -> None:
        self._http = protocol
        self._protocol: Any = protocol
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(READ_BYTES)
        self._pauses: set[str] = set()
        self._is_parsing = False
        self._unsent: list[bytes] = []
        self._is_lingering = False

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the received bytes, send what was written meanwhile as one piece, and pause reading if parsing took too
        long. Do nothing once the connection is closing."""
        if self.is_closing():
            return
        start_s = time.thread_time()
        self._is_parsing = True
        self._protocol.data_received(bytes(self._buffer[:nbytes]))
        self._is_parsing = False
        self._flush()
        pause_s = self._account.pause_s(min(time.thread_time() - start_s, nbytes * MAX_S_PER_BYTE))
        if pause_s and not self.is_closing():
            self._pause("busy")
            self._loop.call_later(pause_s, self._resume, "busy")

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()
        if self._protocol is not self._http:
            self._pause("unread")  # wsproto answers each ping and buffers the pongs

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
        self._resume("unread")

    # asyncio.Transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._unsent.append(data)
        if not self._is_parsing:  # pongs that are written while parsing are sent together
            self._flush()

    def pause_reading(self) -> None:
        self._pause("uvicorn")

    def resume_reading(self) -> None:
        self._resume("uvicorn")

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written and close, with an abort after `LINGER_S`; during a body, as `close_once_read` does."""
        if self._protocol is self._http and self._http.is_receiving:
            self.close_once_read()
        elif not self.is_closing():
            self._flush()
            self._transport.close()
            self._loop.call_later(LINGER_S, self._transport.abort)

    def close_once_read(self) -> None:
        """Send what was written and an EOF, once; drop what the client still sends, and abort after `LINGER_S`."""
        if not self.is_closing():
            self._is_lingering = True
            self._flush()
            self._transport.write_eof()
            self._transport.resume_reading()
            self._loop.call_later(LINGER_S, self._transport.abort)

    def _flush(self) -> None:
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()

    def _pause(self, why: str) -> None:
        """Stop reading until this reason is resumed. While lingering, reading goes on."""
        if not self._is_lingering:
            self._pauses.add(why)
            self._transport.pause_reading()

    def _resume(self, why: str) -> None:
        """Remove this reason to pause, and read again if none is left."""
        self._pauses.discard(why)
        if not self._pauses:
            self._transport.resume_reading()


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits."""

    limits: Limits
    on_failure: OnFailure
    transport: HttpConnection  # type: ignore[assignment]
    _timer: asyncio.TimerHandle | None = None
    _is_pipelined = False

    @property
    def is_receiving(self) -> bool:
        """Whether part of a request's body is still to come."""
        return self.cycle is not None and self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the head. Over `max_connections`, respond with 503 instead; `MAX_REFUSED` over, abort."""
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > most + MAX_REFUSED:
            transport.abort()
        elif len(self.connections) > most:
            message = f"{most:,} connections are open, which is the most"
            kind, code = "service_unavailable", "too_many_connections"
            self._write(Failure(503, kind, code, message, "invalid", retry_after_s=RETRY_AFTER_S))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the current request. Drop pipelined ones, and let the connection close after the response.
        Refuse heads and trailers of too many lines (431)."""
        if self.conn.their_state is h11.IDLE:
            self._start_timer()
        elif not self.is_receiving:
            self._is_pipelined = True
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        unparsed = self.conn.trailing_data[0]
        if self.conn.their_state is h11.DONE and unparsed:
            self._is_pipelined = True
            self.flow.resume_reading()  # to notice a disconnect
        elif unparsed.count(b"\n") > MAX_LINES and not self.transport.is_closing():
            self._refuse(431, f"the head or the trailers have more than {MAX_LINES} lines, which is the most")

    def on_response_complete(self) -> None:
        if self._is_pipelined or self.is_receiving:
            self.transport.close()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_timer()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        """Close the connection after `head_s`, unless the timer is stopped or runs already."""
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Respond with an error in place of the application, which sees a disconnect, and close; abort if a response
        has begun."""
        if self.cycle and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # suppresses the application's response
            self.cycle.message_event.set()
        self._write(failure_of(RequestError(message, status=status, code="http")))

    def _write(self, failure: Failure) -> None:
        """Report an error, write it as a whole response, and close as `close_once_read` does."""
        self.on_failure({}, failure.status)
        body = failure.json().encode()
        head = [
            f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}",
            f"content-length: {len(body)}",
            "content-type: application/json",
            "connection: close",
            *(f"{name}: {value}" for name, value in failure.headers().items()),
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close_once_read()


class BoundedWebSocket(WSProtocol):
    """uvicorn's WebSocket, which is closed if a message that has begun is not whole within `body_s`."""

    limits: Limits
    _timer: asyncio.TimerHandle | None = None

    def handle_message(self, event: TextMessage | BytesMessage) -> None:
        super().handle_message(event)
        if self._timer is not None and event.message_finished:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and not event.message_finished:
            self._timer = self.loop.call_later(self.limits.body_s, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _end(self) -> None:
        """Close the socket, which the application sees as a disconnect."""
        if not self.close_sent and not self.transport.is_closing():
            self.close_sent = True
            reason = f"a message was not received within {self.limits.body_s:g} s"
            self.queue.put_nowait({"type": "websocket.disconnect", "code": 1008, "reason": reason})
            self.transport.write(self.conn.send(CloseConnection(code=1008, reason=reason)))
            self.transport.close()


def bounded_socket(limits: Limits) -> Callable[..., asyncio.BaseProtocol]:
    """Return a factory of WebSockets for uvicorn."""

    def connect(*args: Any, **options: Any) -> BoundedWebSocket:
        protocol = BoundedWebSocket(*args, **options)
        protocol.limits = limits
        return protocol

    return connect


def bounded_protocol(limits: Limits, on_failure: OnFailure) -> Callable[..., asyncio.BaseProtocol]:
    """Return a protocol factory for uvicorn, whose connections share the event loop fairly."""
    share = FairShare()

    def connect(*args: Any, **options: Any) -> HttpConnection:
        protocol = BoundedProtocol(*args, **options)
        protocol.limits, protocol.on_failure = limits, on_failure
        return HttpConnection(protocol, Account(share))

    return connect
