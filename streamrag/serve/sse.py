"""Answers that are written while they come about: a task does the work, a response sends what it writes.

The work stays in one task from its first step to its last, because what it holds (a query, a scope) belongs to a task.
It is cancelled, and waited for, when the response ends in whatever way: all was sent, or the client is gone, or slow.
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
from starlette.types import Message, Receive, Scope, Send

from streamrag.serve.failures import Failure, failure_of
from streamrag.support.tasks import cancel_regardless

MAX_UNSENT = 16
"""Events that wait for a slow reader; then its query waits, and nobody else's."""

PING_S = 15

T = TypeVar("T")

Write: TypeAlias = Callable[[ServerSentEvent], Awaitable[None]]
Produce: TypeAlias = Callable[[Write], Awaitable[None]]
TellFailure: TypeAlias = Callable[[Failure], Sequence[ServerSentEvent]]


async def respond(
    request: Request, produce: Produce, *, failed: TellFailure, send_timeout_s: float, receive: Receive | None = None
) -> Response:
    """A response that sends what `produce` writes, begun with its first event.

    What `produce` raises before that is raised here, so that it becomes a status; later, `failed` says how the client
    is told. With `receive` the response hears from that when the client has gone.
    """
    send, events = anyio.create_memory_object_stream[ServerSentEvent](MAX_UNSENT)

    async def work() -> None:
        async with send:
            try:
                await produce(send.send)
            except Exception as error:  # whatever it is, the client is told, and it is raised on
                if not has_begun:
                    raise
                for event in failed(failure_of(error)):
                    await send.send(event)
                raise

    has_begun = False
    task = asyncio.create_task(work(), name="streamrag response")
    try:
        first = await unless_gone(_first(events, task), receive or request.receive)
        has_begun = True
    except BaseException:
        events.close()
        await cancel_regardless([task])
        raise
    return _Produced(first, events, task, receive, send_timeout_s)


async def _first(events: MemoryObjectReceiveStream[ServerSentEvent], task: "asyncio.Task[None]") -> ServerSentEvent:
    try:
        return await events.receive()
    except anyio.EndOfStream:
        await task
        raise RuntimeError("a response ended before it had begun") from None


class _Produced(EventSourceResponse):
    def __init__(
        self,
        first: ServerSentEvent,
        events: MemoryObjectReceiveStream[ServerSentEvent],
        task: "asyncio.Task[None]",
        receive: Receive | None,
        send_timeout_s: float,
    ) -> None:
        self._task = task
        self._events = events
        self._receive = receive
        super().__init__(self._content(first), ping=PING_S, sep="\n", send_timeout=send_timeout_s)

    async def _content(self, first: ServerSentEvent) -> AsyncGenerator[ServerSentEvent, None]:
        yield first
        async for event in self._events:
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, self._receive or receive, send)
        except SendTimeoutError:
            pass  # it reads too slowly: uvicorn closes an answer that is left so
        finally:
            self._events.close()
            await cancel_regardless([self._task])


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """What `work` returns; it is cancelled when the client goes away. The request's body must have been read.

    :raises ClientDisconnect: it has gone.
    """

    async def gone() -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()

    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
    finally:
        await cancel_regardless(tasks)
    result: T = tasks[0].result()
    return result
