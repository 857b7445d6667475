"""One WebSocket of `/v1/responses`. The requests with one `stream_id` are a stream: they run one after the other.

response.create generate=false ──▶ prompt so far ─┐
response.create generate=false ──▶ prompt so far ─┼▶ one request of the engine ──▶ answer
response.create                ──▶ whole prompt ──┘
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Literal, TypeAlias

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.websockets import WebSocket

from streamrag.errors import ConfigurationError, DeadlineExceededError, PromptTooLongError, StreamRagError
from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.responses.conversation_stream import ConversationStream
from streamrag.serve.protocols.responses.requests import ResponseRequest, check_request
from streamrag.serve.protocols.responses.response_run import ResponseRun
from streamrag.serve.protocols.responses.states import StateStore
from streamrag.serve.service import Service, conversation_of
from streamrag.support.tasks import cancel_and_wait
from streamrag.telemetry import QueryEvent

MAX_WAITING = 64  # maximum queued requests of one stream
MAX_UNSENT = 16  # events that are buffered for a slow reader, before backpressure stops its query

Reader: TypeAlias = asyncio.Task[None]


class CreateEvent(ResponseRequest):
    """A request, as an event from the client."""

    type: Literal["response.create"]


class ResponseSocket(Frames):
    """A WebSocket of the Responses API. Its streams, and the states that are not stored, end with it."""

    is_measured = True

    def __init__(self, service: Service, states: StateStore, socket: WebSocket, caller: Caller) -> None:
        super().__init__(socket, service, "stream_id")
        self.service = service
        self.states = states
        self.caller = caller
        self.num_queued_bytes = 0  # memory of the queued requests of all streams
        self._streams: dict[str | None, SocketStream] = {}

    async def run(self) -> None:
        """Queue requests in their streams, or send why not, until the client leaves or reads too slowly; then forget
        unstored states."""
        try:
            async with self.open() as tasks:
                await self.serve(CreateEvent, partial(self._queue, tasks))
        finally:
            self.caller.account.release(self.num_queued_bytes)
            self.states.forget(self.caller.client, self)

    async def _queue(self, tasks: TaskGroup, request: CreateEvent, num_bytes: int) -> None:
        """Queue a request in its stream. Raises RequestError if there are too many streams, or too much is queued."""
        self._stream(request.stream_id, tasks).put(request, num_bytes)

    def _stream(self, stream_id: str | None, tasks: TaskGroup) -> "SocketStream":
        """Return the stream of this id, or start it. If there are too many, end an idle one, or raise RequestError."""
        if stream_id in self._streams:
            return self._streams[stream_id]
        most = self.service.limits.max_queries_per_client
        if len(self._streams) >= most:
            idle = [key for key, stream in self._streams.items() if stream.is_idle]
            if not idle:
                message = f"{most} streams of this connection are busy, which is the most"
                raise RequestError(message, status=429, code="too_many_streams", param="stream_id")
            self._streams.pop(idle[0]).scope.cancel()
        stream = self._streams[stream_id] = SocketStream(self)
        tasks.start_soon(stream.run)
        return stream


class SocketStream:
    """The requests with one `stream_id`, first come first served.

    A request of the engine is open from the first conversation that is prepared to the answer. It ends early if the
    next request cannot use it, or does not arrive within the idle timeout; what was prepared is then computed again.
    """

    def __init__(self, socket: ResponseSocket) -> None:
        self.is_idle = True  # whether no request is open or queued
        self.scope = anyio.CancelScope()
        self._socket = socket
        self._service = socket.service
        self._queue: deque[tuple[CreateEvent, int]] = deque()
        self._wake = asyncio.Event()
        self._current: ResponseRun | None = None  # the response that the client is waiting for

    def put(self, request: CreateEvent, num_bytes: int) -> None:
        """Queue a request of this size. Raises RequestError if too many wait here, or too many bytes of the client."""
        if len(self._queue) >= MAX_WAITING:
            message = "too many requests wait: read the responses to earlier ones first"
            raise RequestError(message, status=429, code="too_many_waiting")
        self._socket.caller.account.hold(num_bytes, self._service.limits.max_stream_bytes)
        self._socket.num_queued_bytes += num_bytes
        self._queue.append((request, num_bytes))
        self.is_idle = False
        self._wake.set()

    async def run(self) -> None:
        """Answer requests in order until `scope` is cancelled, which raises no error; keep `is_idle` up to date."""
        with self.scope:
            while True:
                self.is_idle = not self._queue
                response = await self._next()
                while response is not None:
                    response = await self._answer(response)

    async def _answer(self, response: ResponseRun) -> ResponseRun | None:
        """Answer one request or, if it only prepares a prompt, also later requests that extend it; send any error.
        Return the first request that cannot use the prompt, which becomes the current one; None if there is none."""
        following: ResponseRun | None = None
        try:
            if response.request.brings_context:
                following = await self._answer_from_conversation(response)
                if following is None and self._current is not None:
                    await self._current.finish()
            else:
                await response.run(self._service, self._socket.caller, "websocket")
        except Exception as error:  # sent to the client, which may continue
            await self._send_error(error)
        self._current = following
        return following

    async def _answer_from_conversation(self, response: ResponseRun) -> ResponseRun | None:
        """Prepare prompts until a request wants the answer; send the answer, but leave its last events to the caller.

        Returns the first request that cannot use the prompts. Returns None after the answer, or if the next request
        does not come in time.
        """
        first = response.request
        async with self._service.open(
            self._socket.caller,
            "websocket",
            first.question,
            max_tokens=first.params.max_tokens,
        ) as opened:
            conversation_id = conversation_of(self._socket.caller, first.turns, first.question)
            stream = ConversationStream(self._service, opened, first.params, conversation_id)
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
        """Set the conversation, and complete a response without an answer. Raise only the first prompt's error.

        Errors of later prompts are sent, and leave the last prompt in place.
        """
        is_first = stream.is_empty
        try:
            prompt = await stream.extend(response.request.conversation, is_complete=False)
        except (ConfigurationError, PromptTooLongError) as error:
            if is_first:
                raise
            await self._send_error(error)
        else:
            response.encoder.num_shared = prompt.num_shared
            counts_tokens = self._service.model.unit == "tokens"
            await response.complete_prepared(len(prompt.partial) if counts_tokens else None)
        self._current = None

    async def _complete(
        self,
        response: ResponseRun,
        stream: ConversationStream,
        events: MemoryObjectReceiveStream[QueryEvent],
        reader: Reader,
    ) -> None:
        """Set the whole conversation, and send its answer's events except the last. Raises DeadlineExceededError after
        the deadline, and the reader's error."""
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

    async def _next(self, reader: Reader | None = None) -> ResponseRun | None:
        """Return the next valid request, which becomes the current one. Invalid requests are answered with errors.

        With `reader`, returns None if it is done or no request comes in `idle_s`. Raises `reader`'s error.
        """
        if reader is not None:
            reader.add_done_callback(lambda _: self._wake.set())
        while True:
            while not self._queue:
                self._wake.clear()
                if reader is not None and reader.done():
                    reader.result()
                    return None
                with anyio.move_on_after(self._service.limits.idle_s if reader is not None else None) as scope:
                    await self._wake.wait()
                if scope.cancelled_caught:
                    return None
            if await self._take():
                return self._current

    async def _take(self) -> bool:
        """Make the next queued request the current one if it is valid; otherwise send its error and return False."""
        request, num_bytes = self._queue.popleft()
        self._socket.num_queued_bytes -= num_bytes
        self._socket.caller.account.release(num_bytes)
        try:
            self._current = self._check(request)
        except StreamRagError as error:
            await self._socket.send_error(error, request.stream_id)
            return False
        return True

    def _check(self, body: CreateEvent) -> ResponseRun:
        """Return a run of the request. Raises StreamRagError if it, or the response that it continues, is unusable."""
        socket, client = self._socket, self._socket.caller.client
        previous = socket.states.previous(body.previous_response_id, client, socket)
        request = check_request(self._service, client, body, previous, is_socket=True)
        keep = partial(socket.states.add, client=client, connection=None if request.is_stored else socket)
        service = self._service
        return ResponseRun(request, body.model or service.model_name, service.base_url, keep=keep, send=socket.send)

    async def _send_error(self, error: Exception) -> None:
        """Report an error. If there is a current response, fail it or, before it has begun, send an error frame."""
        if self._current is not None and not self._current.encoder.has_begun:
            await self._socket.send_error(error, self._current.request.body.stream_id)
            return
        failure = self._socket.note(error)
        if self._current is None:
            return
        for event in self._current.encoder.fail(failure):
            await self._socket.send(event)


@asynccontextmanager
async def _reader(stream: ConversationStream) -> AsyncIterator[tuple[MemoryObjectReceiveStream[QueryEvent], Reader]]:
    """Read a stream's events in a task, ahead of demand, until the block ends; give the events and the task."""
    send, receive = anyio.create_memory_object_stream[QueryEvent](MAX_UNSENT)

    async def read() -> None:
        async with send, aclosing(stream.events()) as events:
            async for event in events:
                await send.send(event)

    task = asyncio.create_task(read(), name="streamrag socket stream")
    try:
        yield receive, task
    finally:
        receive.close()
        await cancel_and_wait([task])
