"""The requests of a WebSocket with one `stream_id`: one after the other, with at most one request of the engine.

response.create generate=false ──▶ prompt so far ─┐
response.create generate=false ──▶ prompt so far ─┼▶ one request of the engine ──▶ answer
response.create                ──▶ whole prompt ──┘
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from streamrag.errors import ConfigurationError, DeadlineExceededError, PromptTooLongError, StreamRagError
from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.connections.sse import MAX_UNSENT
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.responses.conversation_stream import ConversationStream
from streamrag.serve.protocols.responses.requests import ResponseRequest, check_request
from streamrag.serve.protocols.responses.response_run import ResponseRun
from streamrag.serve.protocols.responses.states import StateStore
from streamrag.serve.service import Service, first_question
from streamrag.support.tasks import cancel_regardless
from streamrag.telemetry import Event

MAX_WAITING = 64
"""Requests that may wait in one stream."""

log = logging.getLogger("streamrag.serve")


class CreateEvent(ResponseRequest):
    """A request, as an event that a client sends."""

    type: Literal["response.create"]


@dataclass(eq=False)
class SocketContext:
    """The parts that the streams of one socket share."""

    service: Service
    states: StateStore
    caller: Caller
    frames: Frames
    num_waiting_bytes: int = 0
    """Size of the requests that wait in all streams."""


class SocketStream:
    """The requests with one `stream_id`, first come first served.

    The request of the engine is open from the first conversation that is prepared to the answer. It ends early if the
    next request cannot use it, or does not come for too long; what was prepared is then computed again.
    """

    def __init__(self, context: SocketContext) -> None:
        self.is_idle = True
        """Whether no request is open or waits."""
        self.scope = anyio.CancelScope()
        self._context = context
        self._service = context.service
        self._waiting: deque[tuple[CreateEvent, int]] = deque()
        self._woken = asyncio.Event()
        self._current: ResponseRun | None = None
        """The response that the client is waiting for."""

    def put(self, request: CreateEvent, num_bytes: int) -> None:
        """Put a request of this size behind the others.

        :raises RequestError: there are too many.
        """
        num_waiting_bytes = self._context.num_waiting_bytes + num_bytes
        if len(self._waiting) >= MAX_WAITING or num_waiting_bytes > self._service.limits.max_stream_bytes:
            raise RequestError(
                "too many requests wait: read what they are answered", status=429, code="too_many_waiting"
            )
        self._context.num_waiting_bytes = num_waiting_bytes
        self._waiting.append((request, num_bytes))
        self.is_idle = False
        self._woken.set()

    async def run(self) -> None:
        """Answer requests until cancelled."""
        with self.scope:
            while True:
                self.is_idle = not self._waiting
                response = await self._next()
                while response is not None:
                    response = await self._answer(response)

    async def _answer(self, response: ResponseRun) -> ResponseRun | None:
        """Answer a request, and return the next one if that ends it before its answer."""
        following: ResponseRun | None = None
        try:
            if response.request.brings_context:
                following = await self._answer_from_conversation(response)
                if following is None and self._current is not None:
                    await self._current.finish()
            else:
                await response.run(self._service, self._context.caller, "websocket")
        except Exception as error:  # any error is sent to the client, which may go on
            await self._send_error(error)
        self._current = following
        return following

    async def _answer_from_conversation(self, response: ResponseRun) -> ResponseRun | None:
        """Prepare prompts until a request wants the answer; return the request that cannot use them, if it comes."""
        first = response.request
        async with self._service.open(
            self._context.caller,
            "websocket",
            first.question,
            max_tokens=first.params.max_tokens,
            first_question=first_question(first.turns),
        ) as opened:
            stream = ConversationStream(self._service, opened, first.params)
            async with _reader(stream) as (events, reader):
                while response.request.body.is_prepared_only:
                    await self._prepare(response, stream)
                    following = await self._next(reader)
                    if following is None or not following.request.brings_context:
                        return following
                    if not following.request.body.is_prepared_only and following.request.params != stream.params:
                        return following
                    response = following
                await self._complete(response, stream, events, reader)
                return None

    async def _prepare(self, response: ResponseRun, stream: ConversationStream) -> None:
        is_first = stream.is_empty
        try:
            prompt = await stream.extend(response.request.conversation, is_complete=False)
        except (ConfigurationError, PromptTooLongError) as error:
            if is_first:
                raise
            await self._send_error(error)
        else:
            response.encoder.num_shared = prompt.num_shared
            await response.complete_prepared(len(prompt.partial))
        self._current = None

    async def _complete(
        self,
        response: ResponseRun,
        stream: ConversationStream,
        events: MemoryObjectReceiveStream[Event],
        reader: "asyncio.Task[None]",
    ) -> None:
        deadline_s = self._service.limits.deadline_s
        prompt = await stream.extend(response.request.conversation, is_complete=True)
        response.encoder.num_shared = prompt.num_shared
        try:
            with anyio.fail_after(deadline_s):
                await response.begin()
                await response.follow(events)
                await asyncio.wait([reader])
        except TimeoutError:
            raise DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed") from None
        reader.result()

    async def _next(self, reader: "asyncio.Task[None] | None" = None) -> ResponseRun | None:
        """Return the next request, or None if it does not come in time while a request of the engine is open.

        :raises BackendError: the engine failed meanwhile.
        """
        if reader is not None:
            reader.add_done_callback(lambda _: self._woken.set())
        while True:
            while not self._waiting:
                self._woken.clear()
                if reader is not None and reader.done():
                    reader.result()
                    return None
                with anyio.move_on_after(self._service.limits.idle_s if reader is not None else None) as scope:
                    await self._woken.wait()
                if scope.cancelled_caught:
                    return None
            request, num_bytes = self._waiting.popleft()
            self._context.num_waiting_bytes -= num_bytes
            try:
                self._current = self._check(request)
            except StreamRagError as error:
                await self._context.frames.tell(error, request.stream_id)
            else:
                return self._current

    def _check(self, body: CreateEvent) -> ResponseRun:
        states, client, frames = self._context.states, self._context.caller.client, self._context.frames
        previous = states.previous(body.previous_response_id, client, frames)
        checked = check_request(self._service, body, previous, is_socket=True)
        keep = partial(states.add, client=client, connection=None if checked.is_stored else frames)
        return ResponseRun(checked, self._service.model_name, keep=keep, send=frames.send)

    async def _send_error(self, error: Exception) -> None:
        """End a response that has begun, or send an error frame for one that has not. If none is open, send nothing."""
        failure = failure_of(error)
        if failure.status == 500:
            log.error("a request failed", exc_info=error)
        if self._current is None:
            return
        if not self._current.encoder.has_begun:
            await self._context.frames.tell(error, self._current.request.body.stream_id)
            return
        for event in self._current.encoder.fail(failure):
            await self._context.frames.send(event)


@asynccontextmanager
async def _reader(
    stream: ConversationStream,
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Event], "asyncio.Task[None]"]]:
    """Yield the events of a stream, and the task that reads them, also before they are wanted."""
    send, receive = anyio.create_memory_object_stream[Event](MAX_UNSENT)

    async def read() -> None:
        async with send, aclosing(stream.events()) as events:
            async for event in events:
                await send.send(event)

    task = asyncio.create_task(read(), name="streamrag socket stream")
    try:
        yield receive, task
    finally:
        receive.close()
        await cancel_regardless([task])
