"""The service on a socket: uvicorn, signal handling, and exit statuses."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from streamrag.errors import ConfigurationError
from streamrag.serve.connections.gate import Gate
from streamrag.serve.connections.http import bounded_protocol, bounded_socket
from streamrag.serve.limits import Limits
from streamrag.serve.service import Service

DRAINED, ABORTED, ENGINE_DEAD = 0, 3, 4
"""Exit statuses: all open queries ended by themselves; some were aborted; the engine died. 1 is a failed start."""

CLOSE_S = 5  # seconds that connections have to close once their queries have ended
KEEPALIVE_S = 15  # seconds of silence after which TCP sends keepalive probes


class QuietServer(uvicorn.Server):
    """A uvicorn server without signal handlers, so that open queries end before connections do."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0 takes a free one. It refuses connections until it is served.

    Connections inherit its options. TCP_NODELAY sends each event at once: Nagle's algorithm with delayed ACKs held
    events up for 40 ms. TCP_USER_TIMEOUT drops peers that acknowledge nothing for twice `Limits.send_timeout_s`.

    :raises ConfigurationError: the address is in use, malformed, or not one of this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(Limits.send_timeout_s * 2000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, ValueError, TypeError) as error:  # ValueError, TypeError: malformed host names
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}") from error
    return sock


def uvicorn_config(app: Gate, limits: Limits) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`, and silence a logger that would log the content of events."""
    logging.getLogger("sse_starlette").setLevel(logging.WARNING)  # it logs the content of events
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        http=bounded_protocol(limits, app.on_failure),  # type: ignore[arg-type]
        timeout_graceful_shutdown=CLOSE_S,
        h11_max_incomplete_event_size=limits.max_head_bytes,
        ws_max_size=2 * limits.max_frame_bytes,  # frames up to this size get an error; larger ones close the socket
        ws=bounded_socket(limits),  # type: ignore[arg-type]
        ws_per_message_deflate=False,
        server_header=False,
    )


class Signals:
    """A handler of SIGTERM, SIGINT and SIGHUP, from now until the event loop ends; a third signal is ignored."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()  # set by the first signal
        self.abort = asyncio.Event()  # set by the second signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.abort if self.stop.is_set() else self.stop).set()


async def serve(
    app: Gate, service: Service, sock: socket.socket, *, on_ready: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal or the engine's death, close the service, and return `DRAINED`, `ABORTED` or `ENGINE_DEAD`.

    The caller must have started the service. `on_ready` is called once connections are accepted. The first signal
    drains open queries; a second one aborts them. Connections are closed after the service.

    :raises ConfigurationError: another program already listens on the address.
    """
    server, signals = QuietServer(uvicorn_config(app, service.limits)), Signals()
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
    try:
        await _wait_for_any(serving, server.listens)
        if server.listens.is_set():
            on_ready()
            await _wait_for_any(serving, signals.stop, service.dead)
        closing = asyncio.create_task(service.aclose(drain_s=service.limits.drain_s))
        await _wait_for_any(closing, signals.abort)
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
    """Wait until the task is done or one of the events is set. The task's error is not raised."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
