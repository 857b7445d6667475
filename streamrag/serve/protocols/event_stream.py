"""The service's own protocol: each event of a query as one event of SSE, ended by `answered` or `error`."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from streamrag.core import Chunk
from streamrag.serve.connections.sse import Produce, Write, respond
from streamrag.serve.failures import Failure
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of, name_of, values_of
from streamrag.telemetry import Answer, Answered, ContextChanged, Event


async def write_events(write: Write, events: AsyncIterator[Event]) -> None:
    """Write the events of one query, in order; a changed context is written as its difference to the one before."""
    context: tuple[Chunk, ...] = ()
    async for event in events:
        await write(encode(event, context))
        if isinstance(event, ContextChanged):
            context = event.chunks


def encode(event: Event, context: tuple[Chunk, ...] = ()) -> ServerSentEvent:
    """Return an event as SSE, given the context before it."""
    return ServerSentEvent(json_of(values_of(event, context)), event=name_of(event))


def encode_failure(failure: Failure) -> Sequence[ServerSentEvent]:
    """Return the event that ends a stream which fails."""
    return [ServerSentEvent(failure.json(), event="error")]


async def respond_with_events(
    request: Request, service: Service, produce: Produce, *, receive: Receive | None = None
) -> Response:
    """Respond with the events that `produce` writes. `receive` returns when the client has left, as of `respond`."""
    timeout_s = service.limits.send_timeout_s
    return await respond(request, produce, failed=encode_failure, send_timeout_s=timeout_s, receive=receive)


async def answer_of(query: AbstractAsyncContextManager[AsyncIterator[Event]]) -> Answer:
    """Return the answer to a query, once it is whole."""
    async with query as events:
        async for event in events:
            if isinstance(event, Answered):
                return event.answer
    raise RuntimeError("a query ended without an answer and without an error")
