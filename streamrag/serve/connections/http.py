"""uvicorn's connections with a bounded head, one request at a time, fair turns, and a close that ends.

uvicorn parses with h11 and wsproto here, which bound what they store: heads, trailers, extensions of chunks, frames,
fragments. This module bounds what parsing costs other clients, and other things that uvicorn leaves open:

- uvicorn waits for a request's head without a time limit.
- While a pipelined request waits, uvicorn does not read on, and does not notice when its client leaves. Here, what is
  sent behind a request before its answer is dropped and the connection closed after that answer, as RFC 9112 allows;
  the client sends it again.
- A refused body is read for a moment longer, because a reset would discard the refusal before the client reads it.
- A client that comes when there are too many connections gets an error in the form of all errors.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamrag.serve.connections.fair_share import Account, FairShare
from streamrag.serve.failures import Failure, RequestError, failure_of
from streamrag.serve.limits import Limits

LINGER_S = 2.0
"""Seconds for the client to read what was written, and to stop sending, before a connection is reset."""

MOST_TOLD = 64
"""Number of connections beyond the limit that get an error; further ones are closed without one."""

AGAIN_S = 5.0
"""Seconds after which such a client may try again."""

MAX_LINES = 128
"""Most lines of an unfinished head, or of trailers. h11 parses all of them at once, and takes 3 us for each line."""

READ_BYTES = 4096
"""Bytes that are read from a connection in one turn of the event loop. Parsing them takes 8 ms at most."""

WORST_S = 0.000_004
"""CPU seconds that parsing one byte takes at most. What takes longer was something else, such as garbage collection."""


class Connection(asyncio.BufferedProtocol):
    """A connection between asyncio's transport and uvicorn's protocol, in place of each for the other.

    Reads little in one turn of the event loop, and pauses if parsing takes much of it. Closing ends, also if the client
    reads nothing or sends without end.
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

    # ----------------------------------------------------------------------------------------- a protocol, for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closing():
            return
        began_s = time.thread_time()
        self._is_parsing = True
        self._protocol.data_received(bytes(self._buffer[:nbytes]))
        self._is_parsing = False
        self._flush()
        pause_s = self._account.pause_s(min(time.thread_time() - began_s, nbytes * WORST_S))
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
            self._pause("unread")  # a WebSocket answers each ping, and stores what is not read

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
        self._resume("unread")

    # --------------------------------------------------------------------------------------- a transport, for uvicorn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._unsent.append(data)
        if not self._is_parsing:  # else it is a pong, with many others perhaps, which go out together
            self._flush()

    def pause_reading(self) -> None:
        self._pause("uvicorn")

    def resume_reading(self) -> None:
        self._resume("uvicorn")

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self._protocol is self._http and self._http.is_receiving:
            self.close_once_read()
        elif not self.is_closing():
            self._flush()
            self._transport.close()
            self._loop.call_later(LINGER_S, self._transport.abort)

    def close_once_read(self) -> None:
        """Close after the client has read what was written, or after `LINGER_S`; drop what it still sends."""
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
        if not self._is_lingering:
            self._pauses.add(why)
            self._transport.pause_reading()

    def _resume(self, why: str) -> None:
        self._pauses.discard(why)
        if not self._pauses:
            self._transport.resume_reading()


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol of HTTP, with limits."""

    limits: Limits
    transport: Connection  # type: ignore[assignment]
    _timer: asyncio.TimerHandle | None = None
    _is_pipelined = False

    @property
    def is_receiving(self) -> bool:
        """Whether the client is still to send the rest of a request's body."""
        return self.cycle is not None and self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > most + MOST_TOLD:
            transport.abort()
        elif len(self.connections) > most:
            message = f"{most:,} connections are open, which is the most"
            kind, code = "service_unavailable", "too_many_connections"
            self._write(Failure(503, kind, code, message, "invalid", retry_after_s=AGAIN_S))
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            self._time_head()
        elif not self.is_receiving:
            self._is_pipelined = True
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        unparsed = self.conn.trailing_data[0]
        if self.conn.their_state is h11.DONE and unparsed:
            self._is_pipelined = True
            self.flow.resume_reading()  # to see the client leave
        elif unparsed.count(b"\n") > MAX_LINES and not self.transport.is_closing():
            self._refuse(431, f"the head, or its trailers, have more than {MAX_LINES} lines, which is the most")

    def on_response_complete(self) -> None:
        if self._is_pipelined or self.is_receiving:
            self.transport.close()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._stop_timer()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _time_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Write an error on the connection itself, unless an answer has begun, and close."""
        if self.cycle and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # so that no other answer is sent
            self.cycle.message_event.set()
        self._write(failure_of(RequestError(message, status=status, code="http")))

    def _write(self, failure: Failure) -> None:
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


def bounded_protocol(limits: Limits) -> Callable[..., asyncio.BaseProtocol]:
    """Return what makes the protocol of each connection for uvicorn."""
    share = FairShare()

    def connect(*args: Any, **options: Any) -> Connection:
        protocol = BoundedProtocol(*args, **options)
        protocol.limits = limits
        return Connection(protocol, Account(share))

    return connect
