"""uvicorn's connections, bounded: a head in time and of a length, one request after another, and a close that ends.

Each event goes out when it is written: Nagle's algorithm, beside an ACK that is put off, held the first up for 40 ms.
uvicorn waits for ever for a request's head, and httptools reads heads of any length. While a pipelined request waits
uvicorn does not read on, and does not see its client leave: here what is sent behind a request before its answer is
dropped, and the connection closed behind that answer, as RFC 9112 allows; the client sends it again. A refused body is
read for a moment longer, since a reset would take the refusal from the client that still sends. Whoever comes when
there are too many is told so in the form of all errors, and a peer that is gone without a word is noticed.
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamrag.serve.failures import Failure, RequestError, failure_of
from streamrag.serve.limits import Limits

LINGER_S = 2.0
"""For what was written to be read, and for what is still sent to be dropped, before a connection is reset."""


MOST_TOLD = 64
"""Connections beyond the limit that are told so at a time; further ones are hung up on."""

AGAIN_S = 5.0
"""When whoever was told so may try again."""

KEEPALIVE_S = 15
"""After so many seconds of silence the peer's machine is asked whether it is there."""


class Cycle(Protocol):
    """What uvicorn knows of a request."""

    disconnected: bool
    message_event: asyncio.Event
    more_body: bool
    response_started: bool
    response_complete: bool


class _Transport:
    """A transport whose `close` ends, also if the client reads nothing or sends for ever."""

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._is_sending():
            self.is_lingering = True
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)


if TYPE_CHECKING:
    _Base = HttpToolsProtocol
else:
    _Base = object


class _Bounded(_Base):
    """What both of uvicorn's protocols have in common here."""

    limits: Limits
    config: uvicorn.Config
    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_pipelined = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        kept = _Transport(cast(asyncio.Transport, transport), lambda: self._cycle is not None and self._cycle.more_body)
        super().connection_made(cast(asyncio.Transport, kept))
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does so only where a socket names its protocol, which one of `socket.create_server` does not.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._notice_death(sock)
        if len(self.connections) > self.limits.max_connections + MOST_TOLD:
            kept.abort()
            return
        self._time_head()

    def _notice_death(self, sock: socket.socket) -> None:
        """Of a peer that acknowledges nothing: it, or its network, is gone. A slow reader is left before."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # not outside of Linux
            for option, value in (
                (socket.TCP_KEEPIDLE, KEEPALIVE_S),
                (socket.TCP_KEEPINTVL, KEEPALIVE_S),
                (socket.TCP_USER_TIMEOUT, int(self.limits.send_timeout_s * 2000)),
            ):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        awaits_head = self._awaits_head()
        if not awaits_head and not cast(Cycle, self._cycle).more_body:
            self._is_pipelined = True
            return
        if awaits_head:
            self._time_head()
            self._num_head_bytes += len(data)
            self.app = self._too_many if self._is_full else self.config.loaded_app
        before = self._cycle
        super().data_received(data)
        if self._cycle is not before:
            self._stop_timer()
            self._num_head_bytes = 0
        elif awaits_head and self._num_head_bytes > self.limits.max_head_bytes:
            self._refuse(431, f"the head has more than {self.limits.max_head_bytes:,} bytes, which is the most")

    def on_response_complete(self) -> None:
        if self._is_pipelined or cast(Cycle, self._cycle).more_body:
            self.transport.close()
        super().on_response_complete()

    def handle_websocket_upgrade(self, *event: Any) -> None:
        self._stop_timer()
        if self._is_full:
            self._write(self._failure())
            return
        super().handle_websocket_upgrade(*event)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    @property
    def _cycle(self) -> Cycle | None:
        return cast(Cycle | None, self.cycle)

    def _awaits_head(self) -> bool:
        return self._cycle is None or (self._cycle.response_complete and not self._cycle.more_body)

    def _time_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _is_full(self) -> bool:
        return len(self.connections) > self.limits.max_connections

    def _failure(self) -> Failure:
        most = self.limits.max_connections
        message = f"{most:,} connections are open, which is the most"
        return Failure(503, "service_unavailable", "too_many_connections", message, "invalid", retry_after_s=AGAIN_S)

    async def _too_many(self, scope: Any, receive: Any, send: Any) -> None:
        """The application for whoever comes then."""
        failure = self._failure()
        await JSONResponse(failure.body(), failure.status, failure.headers() | _CLOSE)(scope, receive, send)

    def _refuse(self, status: int, message: str) -> None:
        """Say so on the connection itself; in mid-answer there is nothing to be said."""
        if self._cycle is not None and not self._awaits_head():
            if self._cycle.response_started:
                self.transport.abort()
                return
            self._cycle.disconnected = True  # whatever its answer is, this one goes out
            self._cycle.message_event.set()
        self._write(failure_of(RequestError(message, status=status, code="http")))

    def _write(self, failure: Failure) -> None:
        body = failure.json().encode()
        headers = {"content-type": "application/json", "content-length": len(body), **failure.headers(), **_CLOSE}
        head = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


_CLOSE = {"connection": "close"}


class _HttpTools(_Bounded, HttpToolsProtocol):
    def on_headers_complete(self) -> None:
        self._is_pipelined = not self._awaits_head()
        if not self._is_pipelined:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_pipelined:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_pipelined:
            super().on_message_complete()


class _H11(_Bounded, H11Protocol):  # type: ignore[misc]
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._awaits_head() and not cast(Cycle, self._cycle).more_body and self.conn.trailing_data[0]:
            self._is_pipelined = True
            self.flow.resume_reading()  # to see the client leave


def bounded_protocol(limits: Limits, *, is_h11: bool = False) -> type[asyncio.Protocol]:
    """uvicorn's protocol, of httptools or of h11, with these limits."""
    base = _H11 if is_h11 else _HttpTools
    return type(base.__name__, (base,), {"limits": limits})
