"""Event streams as responses: one task produces the events and sends them.

The work runs in a single task from start to end, because what it holds (a query, a cancel scope) belongs to a task. The
task is cancelled and awaited when the response ends for any reason: all events are sent, or the client left or is slow.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamrag.serve.failures import Failure, failure_of
from streamrag.support.tasks import cancel_and_wait

PING_S = 15

COMMENT = b": ping\n\n"
"""A comment, which keeps a connection open."""

EMPTY_LINES = b"\n\n"
"""Two empty lines, for clients that expect an event between any two, such as `vllm bench serve`. In a stream whose
events have ids, a client may take them for an event without data."""

T = TypeVar("T")

Write: TypeAlias = Callable[[bytes], Awaitable[None]]
Produce: TypeAlias = Callable[[Write], Awaitable[None]]
OnFailure: TypeAlias = Callable[[Failure], Sequence[bytes]]


def format_event(data: str, *, event: str | None = None, id: int | None = None) -> bytes:
    """Return an event of one line of data. Its lines end with LF: `vllm bench serve` does not read CRLF."""
    head = "" if id is None else f"id: {id}\n"
    name = "" if event is None else f"event: {event}\n"
    return f"{head}{name}data: {data}\n\n".encode()


async def respond(
    request: Request,
    produce: Produce,
    *,
    on_failure: OnFailure,
    send_timeout_s: float,
    receive: Receive | None = None,
    ping: bytes = COMMENT,
) -> Response:
    """Start `produce`, wait for its first event, and return a response that sends this event and all later ones.

    An error of `produce` before the first event is raised here, as is RuntimeError if `produce` ends without an event.
    A later error is sent as the events of `on_failure`. `produce` waits for the socket, and is cancelled if the client
    leaves, or reads nothing for `send_timeout_s`. If the client leaves before the first event, ClientDisconnect is
    raised here. `receive`, by default the request's own, is an ASGI `receive` that reports that the client has left.
    `ping` is sent every `PING_S`.
    """
    stream = _EventStream(produce, on_failure, receive, send_timeout_s, ping)
    try:
        await unless_disconnected(stream.wait_for_event(), receive or request.receive)
    except BaseException:
        await stream.aclose()
        raise
    return stream


class _EventStream(Response):
    """A response of events, which ends with the task that produces them. The first event waits for its call."""

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Produce,
        on_failure: OnFailure,
        receive: Receive | None,
        send_timeout_s: float,
        ping: bytes,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "connection": "keep-alive", "x-accel-buffering": "no"})
        self._receive = receive
        self._send_timeout_s = send_timeout_s
        self._ping = ping
        self._has_event: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sending: asyncio.Future[Send] = asyncio.get_running_loop().create_future()
        self._unsent_since_s: float | None = None
        self._task = asyncio.create_task(self._work(produce, on_failure), name="streamrag response")

    async def wait_for_event(self) -> None:
        """Wait until there is an event to send; raise the error of a task that ends before."""
        await asyncio.wait([self._task, self._has_event], return_when=asyncio.FIRST_COMPLETED)
        if not self._has_event.done():
            self._task.result()
            raise RuntimeError("a response ended before it had begun")

    async def aclose(self) -> None:
        """End the task that produces events."""
        await cancel_and_wait([self._task])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then the events until the task ends, the client leaves, or it reads too slowly. Then uvicorn
        closes the unfinished response. A HEAD gets the head only."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        watches = [
            asyncio.create_task(_wait_until_left(self._receive or receive)),
            asyncio.create_task(self._ping_forever()),
        ]
        try:
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            self._sending.set_result(send)
            while not any(task.done() for task in (self._task, *watches)) and (left_s := self._time_left_s()) > 0:
                await asyncio.wait((self._task, *watches), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([self._task, *watches])

    async def _work(self, produce: Produce, on_failure: OnFailure) -> None:
        """Produce and send the events and the end. Send an error as events, but raise it if there is no event yet."""
        try:
            await produce(self._write)
        except Exception as error:
            if not self._has_event.done():
                raise
            for event in on_failure(failure_of(error)):
                await self._write(event)
        if self._has_event.done():
            await self._write(b"", more_body=False)

    async def _write(self, event: bytes, more_body: bool = True) -> None:
        """Send an event, the first one once the response has begun."""
        if not self._has_event.done():
            self._has_event.set_result(None)
        send = self._sending.result() if self._sending.done() else await asyncio.shield(self._sending)
        if self._unsent_since_s is None:  # else a ping waits behind an event
            self._unsent_since_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": event, "more_body": more_body})
        self._unsent_since_s = None

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            await self._write(self._ping)

    def _time_left_s(self) -> float:
        """Return the seconds within which the client has to read what was sent."""
        if self._unsent_since_s is None:
            return self._send_timeout_s
        return self._unsent_since_s + self._send_timeout_s - asyncio.get_running_loop().time()


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client leaves, cancel it and raise ClientDisconnect. Read the body first."""
    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(work), asyncio.create_task(_wait_until_left(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
    finally:
        await cancel_and_wait(tasks)
    result: T = tasks[0].result()
    return result
