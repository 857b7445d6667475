"""What goes on in a WebSocket: in each lane one request after the other, and at most one stream of the engine.

response.create generate=false ──▶ prompt so far ─┐
response.create generate=false ──▶ prompt so far ─┼▶ one stream of the engine ──▶ answer
response.create                ──▶ whole prompt ──┘
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from streamrag.errors import ConfigurationError, DeadlineExceededError, PromptTooLongError, StreamRagError
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.interfaces.responses.answering import Answering
from streamrag.serve.interfaces.responses.brought import Brought
from streamrag.serve.interfaces.responses.requests import ResponseRequest, understood
from streamrag.serve.service import first_question
from streamrag.serve.sse import MAX_UNSENT
from streamrag.support.tasks import cancel_regardless
from streamrag.telemetry import Event

if TYPE_CHECKING:
    from streamrag.serve.interfaces.responses.sockets import Connection

MAX_WAITING = 64
"""Requests of one lane that it has not come to."""

log = logging.getLogger("streamrag.serve")


class CreateEvent(ResponseRequest):
    """What a client sends."""

    type: Literal["response.create"]


class Lane:
    """Does what is asked with one `stream_id`, first come first served.

    Its stream of the engine is open from the first conversation that is prepared to the answer, to a request that
    it is of no use for, or until the client says nothing for too long; what was prepared is then computed anew.
    """

    def __init__(self, connection: "Connection") -> None:
        self.is_idle = True
        """Whether it has nothing to do, and holds nothing."""
        self.scope = anyio.CancelScope()
        self._connection = connection
        self._service = connection.service
        self._waiting: deque[tuple[CreateEvent, int]] = deque()
        self._woken = asyncio.Event()
        self._current: Answering | None = None
        """What the client is waiting for."""

    def take(self, request: CreateEvent, num_bytes: int) -> None:
        """Put a request of so many bytes behind the others.

        :raises RequestError: there are too many.
        """
        held = self._connection.num_waiting_bytes + num_bytes
        if len(self._waiting) >= MAX_WAITING or held > self._service.limits.max_stream_bytes:
            raise RequestError(
                "too many requests wait: read what they are answered", status=429, code="too_many_waiting"
            )
        self._connection.num_waiting_bytes = held
        self._waiting.append((request, num_bytes))
        self.is_idle = False
        self._woken.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        with self.scope:
            while True:
                self.is_idle = not self._waiting
                response = await self._next()
                while response is not None:
                    response = await self._do(response)

    async def _do(self, response: Answering) -> Answering | None:
        """What was asked instead, if that ends it."""
        following: Answering | None = None
        try:
            if response.asked.brings_context:
                following = await self._stream(response)
                if following is None and self._current is not None:
                    await self._current.finish()
            else:
                await response.run(self._service, self._connection.caller, "websocket")
        except Exception as error:  # whatever it is, the client is told, and may go on
            await self._tell(error)
        self._current = following
        return following

    async def _stream(self, response: Answering) -> Answering | None:
        """From the first conversation that is prepared to the answer. What was asked instead, if it is of no use."""
        first = response.asked
        async with self._service.open(
            self._connection.caller,
            "websocket",
            first.question,
            max_tokens=first.params.max_tokens,
            first_question=first_question(first.turns),
        ) as opened:
            brought = Brought(self._service, opened, first.params)
            async with _reading(brought) as (events, reading):
                while response.asked.request.is_prepared_only:
                    await self._prepare(response, brought)
                    following = await self._next(reading)
                    if following is None or not following.asked.brings_context:
                        return following
                    if not following.asked.request.is_prepared_only and following.asked.params != brought.params:
                        return following
                    response = following
                await self._answer(response, brought, events, reading)
                return None

    async def _prepare(self, response: Answering, brought: Brought) -> None:
        is_first = brought.is_empty
        try:
            prompt = await brought.extend(response.asked.whole, is_complete=False)
        except (ConfigurationError, PromptTooLongError) as error:
            if is_first:
                raise
            await self._tell(error)
        else:
            response.writer.num_shared = prompt.num_shared
            await response.prepared(len(prompt.partial))
        self._current = None

    async def _answer(
        self,
        response: Answering,
        brought: Brought,
        events: MemoryObjectReceiveStream[Event],
        reading: "asyncio.Task[None]",
    ) -> None:
        deadline_s = self._service.limits.deadline_s
        prompt = await brought.extend(response.asked.whole, is_complete=True)
        response.writer.num_shared = prompt.num_shared
        try:
            with anyio.fail_after(deadline_s):
                await response.begin()
                await response.follow(events)
                await asyncio.wait([reading])
        except TimeoutError:
            raise DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed") from None
        reading.result()

    async def _next(self, reading: "asyncio.Task[None] | None" = None) -> Answering | None:
        """What is asked next; None if nothing is for so long that what was prepared should go.

        :raises BackendError: the engine failed meanwhile.
        """
        if reading is not None:
            reading.add_done_callback(lambda _: self._woken.set())
        while True:
            while not self._waiting:
                self._woken.clear()
                if reading is not None and reading.done():
                    reading.result()
                    return None
                with anyio.move_on_after(self._service.limits.idle_s if reading is not None else None) as scope:
                    await self._woken.wait()
                if scope.cancelled_caught:
                    return None
            request, num_bytes = self._waiting.popleft()
            self._connection.num_waiting_bytes -= num_bytes
            try:
                self._current = self._understood(request)
            except StreamRagError as error:
                await self._connection.tell(error, request.stream_id)
            else:
                return self._current

    def _understood(self, request: CreateEvent) -> Answering:
        connection = self._connection
        states, client = connection.states, connection.caller.client
        previous = states.previous(request.previous_response_id, client, connection)
        asked = understood(self._service, request, previous, is_socket=True)
        owner = client if asked.is_stored else connection
        return Answering(asked, self._service.model_name, states, owner, client, connection.send)

    async def _tell(self, error: Exception) -> None:
        """As the end of a response that was begun, as an error of one that was not, or not at all: nobody waits."""
        failure = failure_of(error)
        if failure.status == 500:
            log.error("a request failed", exc_info=error)
        if self._current is None:
            return
        if not self._current.writer.has_begun:
            await self._connection.tell(error, self._current.asked.request.stream_id)
            return
        for event in self._current.writer.failed(failure):
            await self._connection.send(event)


@asynccontextmanager
async def _reading(
    brought: Brought,
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Event], "asyncio.Task[None]"]]:
    """Its events, and the task that reads them, whether somebody wants them already or not."""
    send, receive = anyio.create_memory_object_stream[Event](MAX_UNSENT)

    async def read() -> None:
        async with send, aclosing(brought.events()) as events:
            async for event in events:
                await send.send(event)

    task = asyncio.create_task(read(), name="streamrag lane")
    try:
        yield receive, task
    finally:
        receive.close()
        await cancel_regardless([task])
