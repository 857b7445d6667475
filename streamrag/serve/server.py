"""The service on a socket: uvicorn, signals, and an exit status that says how it ended."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from streamrag.errors import ConfigurationError
from streamrag.serve.connections.http import bounded_protocol
from streamrag.serve.limits import Limits
from streamrag.serve.service import Service

DRAINED, ABORTED, ENGINE_DEAD = 0, 3, 4
"""Exit statuses: all open queries came to their end; some were aborted; the engine died. 1 is an error at the start."""

CLOSE_S = 5
"""Seconds that connections have to close once their queries have ended."""

KEEPALIVE_S = 15
"""Seconds of silence after which TCP asks the peer's machine whether it is there."""


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, so that open queries end before connections do."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, send_timeout_s: float = Limits().send_timeout_s) -> socket.socket:
    """Return a socket bound to an address; port 0 takes a free one. It refuses connections until it is served.

    Connections inherit its options. Each event is sent when it is written: Nagle's algorithm, beside a delayed ACK,
    held the first up for 40 ms. A peer that acknowledges nothing is noticed, later than one that reads too slowly.

    :raises ConfigurationError: the address is in use, or none of this machine.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # only on Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(send_timeout_s * 2000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, ValueError, TypeError) as error:  # the others: of a text that is no name at all
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error
    return sock


def config_of(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`."""
    logging.getLogger("sse_starlette").setLevel(logging.WARNING)  # it would log what is sent
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        http=bounded_protocol(limits),  # type: ignore[arg-type]
        timeout_graceful_shutdown=CLOSE_S,
        h11_max_incomplete_event_size=limits.max_head_bytes,
        ws_max_size=2 * limits.max_frame_bytes,  # up to here the client is told; beyond, the socket is closed
        ws="wsproto",
        ws_per_message_deflate=False,
        server_header=False,
    )


class Signals:
    """SIGTERM, SIGINT and SIGHUP, which are this service's until the event loop ends: a third one does not end the
    process before its exit status is known."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal."""
        self.hurry = asyncio.Event()
        """Set by the second one."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                asyncio.get_running_loop().add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def serve(
    app: ASGIApp, service: Service, sock: socket.socket, *, on_ready: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal, or until the engine has died, and return the exit status. A second signal aborts at once.

    The service must have been started; it is closed here.

    :raises ConfigurationError: another program listens there already.
    """
    server, signals = QuietServer(config_of(app, service.limits)), Signals()
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
    try:
        await _wait_for_any(serving, server.listens)
        if server.listens.is_set():
            on_ready()
            await _wait_for_any(serving, signals.stop, service.dead)
        closing = asyncio.create_task(service.aclose(drain_s=service.limits.drain_s))
        await _wait_for_any(closing, signals.hurry)
        if not closing.done():
            await service.aclose()
        was_drained = await closing
    finally:
        await service.aclose()
        server.should_exit = True
        await asyncio.wait([serving])
    try:
        serving.result()
    except OSError as error:
        raise ConfigurationError(f"cannot listen: {error.strerror or error}") from error
    if service.dead.is_set():
        return ENGINE_DEAD
    return DRAINED if was_drained else ABORTED


async def _wait_for_any(task: "asyncio.Task[Any]", *events: asyncio.Event) -> None:
    """Wait until the task is done or one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
