"""Event streams as responses: one task produces the events while the response sends them.

The work runs in a single task from start to end, because what it holds (a query, a cancel scope) belongs to a task. The
task is cancelled and awaited when the response ends for any reason: all events are sent, or the client left or is slow.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamrag.serve.failures import Failure, failure_of
from streamrag.support.tasks import cancel_and_wait

MAX_UNSENT = 16  # events that are buffered for a slow reader, before backpressure stops its query
PING_S = 15

T = TypeVar("T")


class StreamEvent(ServerSentEvent):
    """An event whose lines end with LF: `vllm bench serve` does not read CRLF."""

    DEFAULT_SEPARATOR = "\n"


class Comment(StreamEvent):
    """A comment, which keeps a connection open."""

    def __init__(self) -> None:
        super().__init__(comment="ping")


class EmptyLines(StreamEvent):
    """Two empty lines, for clients that expect an event between any two, such as `vllm bench serve`.

    In a stream whose events have ids, a client may take them for an event without data.
    """

    def encode(self) -> bytes:
        """Return the two line ends."""
        return b"\n\n"


Write: TypeAlias = Callable[[StreamEvent], Awaitable[None]]
Produce: TypeAlias = Callable[[Write], Awaitable[None]]
OnFailure: TypeAlias = Callable[[Failure], Sequence[StreamEvent]]


async def respond(
    request: Request,
    produce: Produce,
    *,
    on_failure: OnFailure,
    send_timeout_s: float,
    receive: Receive | None = None,
    ping: Callable[[], StreamEvent] = Comment,
) -> Response:
    """Start `produce`, wait for its first event, and return a response that sends this event and all later ones.

    An error of `produce` before the first event is raised here, as is RuntimeError if `produce` ends without an event.
    A later error is sent as the events of `on_failure`. `produce` waits while `MAX_UNSENT` events are unsent, and is
    cancelled if the client leaves, or reads nothing for `send_timeout_s`. If the client leaves before the first event,
    ClientDisconnect is raised here. `receive`, by default the request's own, is an ASGI `receive` that reports that the
    client has left. What `ping` returns is sent every `PING_S`.
    """
    send, events = anyio.create_memory_object_stream[StreamEvent](MAX_UNSENT)
    has_begun = False

    async def work() -> None:
        """Write the events of `produce`. After an error, write its events if the response has begun, and raise it."""
        async with send:
            try:
                await produce(send.send)
            except Exception as error:  # reported to the client, and raised for the log
                if has_begun:
                    for event in on_failure(failure_of(error)):
                        await send.send(event)
                raise

    async def first_event() -> StreamEvent:
        try:
            return await events.receive()
        except anyio.EndOfStream:
            await task
            raise RuntimeError("a response ended before it had begun") from None

    task = asyncio.create_task(work(), name="streamrag response")
    try:
        first = await unless_disconnected(first_event(), receive or request.receive)
    except BaseException:
        events.close()
        await cancel_and_wait([task])
        raise
    has_begun = True
    return _EventStream(first, events, task, receive, send_timeout_s, ping)


class _EventStream(EventSourceResponse):
    """A response of events, the first one given, which ends with the task that produces them."""

    def __init__(
        self,
        first: StreamEvent,
        events: MemoryObjectReceiveStream[StreamEvent],
        task: "asyncio.Task[None]",
        receive: Receive | None,
        send_timeout_s: float,
        ping: Callable[[], StreamEvent],
    ) -> None:
        self._task = task
        self._events = events
        self._receive = receive
        super().__init__(self._all(first), ping=PING_S, ping_message_factory=ping, send_timeout=send_timeout_s)

    async def _all(self, first: StreamEvent) -> AsyncGenerator[StreamEvent, None]:
        yield first
        async for event in self._events:
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, self._receive or receive, send)
        except SendTimeoutError:
            pass  # the client reads too slowly: uvicorn closes the unfinished response
        finally:
            self._events.close()
            await cancel_and_wait([self._task])


async def unless_disconnected(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client leaves, cancel it and raise ClientDisconnect. Read the body first."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(work), asyncio.create_task(wait_for_disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
    finally:
        await cancel_and_wait(tasks)
    result: T = tasks[0].result()
    return result
