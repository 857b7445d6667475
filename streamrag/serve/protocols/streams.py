"""`POST /v1/streams`: a client streams in its own context while it retrieves, and gets every event of the query as SSE.

The request's body has lines of JSON. The response begins with the first of them, on the same connection, and the model
computes the context while more is on its way.

{"type": "open", "query": "...", ...options}
{"type": "append", "chunk": {"text": "...", "uri": "..."}, "hint": {"num_chunks": 2}}
{"type": "update", "chunks": [...]}
{"type": "skipped", "uri": "...", "reason": "..."}
{"type": "cut_short", "reason": "..."}
{"type": "finish"}
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive

from streamrag.core import SourceEvent
from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel, check_num_values
from streamrag.serve.connections.sse import Write
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.ask import QueryRequest
from streamrag.serve.protocols.event_encoder import respond_with_events, write_events
from streamrag.serve.service import Service
from streamrag.support.bounded_reading import MarkedText
from streamrag.support.tasks import cancel_and_wait
from streamrag.trace.events import EventLine, LineCodec, LineError

LINES_A_TURN = 64  # lines that are parsed in one turn of the event loop: a few hundred microseconds
LINE_S = 0.000_1  # CPU seconds that the pipeline takes for a line
LINE_BYTES = 1024  # memory of a queued line besides its text


class OpenLine(QueryRequest):
    """The question with its options: the first line of a body, and only the first."""

    type: Literal["open"]
    query: str
    finish_at_end: bool = False
    """Whether the end of the body counts as `finish`. Otherwise a body without `finish` is an error."""


class FinishLine(StrictModel):
    type: Literal["finish"]


Line: TypeAlias = OpenLine | EventLine | FinishLine

_CODEC = LineCodec[Line](Line, "type")


def routes(service: Service) -> list[Route]:
    """Return `POST /v1/streams`, which answers the first line's question from the following lines as its source."""

    async def streams(request: Request) -> Response:
        """Respond with the events of a query whose source is the request's body, which a task reads meanwhile."""
        body = StreamBody(request.receive, service)
        caller = request.scope[CALLER]

        async def produce(write: Write) -> None:
            reader = asyncio.create_task(body.read(), name="streamrag reads a stream")
            try:
                first = await body.open_line()
                options = first.query_options(service)
                async with service.events(caller, "streams", first.query, source=body, **options) as events:
                    await write_events(write, events)
            finally:
                await cancel_and_wait([reader])

        return await respond_with_events(request, service, produce, receive=body.wait_until_left)

    return [Route("/v1/streams", streams, methods=["POST"])]


def parse_line(line: bytes, number: int) -> Line:
    """Return one line of a body. Raises RequestError with the line and the field, 413 for too many values, else 400."""
    try:
        check_num_values(line)
        return _CODEC.decode(line)
    except LineError as error:
        raise bad_line(number, str(error), error.where or None) from None
    except RequestError as error:
        raise bad_line(number, str(error), status=413) from None


def bad_line(number: int, message: str, param: str | None = None, *, status: int = 400) -> RequestError:
    """Return the error for line `number`, counted from 1 with blank lines."""
    return RequestError(f"line {number}: {message}", status=status, code="invalid_line", param=param, line=number)


class StreamBody:
    """A body of lines, as a source. It alone calls the request's `receive`, so it also detects that the client left.

    `read` runs in a task of its own. It stops reading while the queued lines take more than `max_frame_bytes`, so that
    TCP applies backpressure to the client.
    """

    name = "pushed by a client"

    def __init__(self, receive: Receive, service: Service) -> None:
        self._receive = receive
        self._limits = service.limits
        self._account = Account(service.share)
        self._queue: asyncio.Queue[tuple[Line | RequestError, int]] = asyncio.Queue()
        self._num_queued_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_left = asyncio.Event()
        self._is_open = False
        self._finishes_at_end = False
        self._is_finished = False
        self._num_lines = 0
        self._text = MarkedText()

    async def wait_until_left(self) -> Message:
        """Wait until the client has left: an ASGI `receive`."""
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def open_line(self) -> OpenLine:
        """Wait for the first line, and return it. Raises RequestError if it is invalid, late, or not of type open."""
        first = await self._next()
        assert isinstance(first, OpenLine)  # `_take` rejects others
        return first

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield the events of the lines until `finish`. Raises RequestError for an invalid, late or missing line."""
        while not isinstance(line := await self._next(), FinishLine):
            assert not isinstance(line, OpenLine)
            yield line.event()

    async def read(self) -> None:
        """Read the body until the client has left, or queue the RequestError of an invalid, late or missing line, and
        return.

        Drops what follows the last line; a client that sends too much then counts as having left.
        """
        try:
            await self._read_lines()
            while not self._has_left.is_set():  # drops what follows the last line, to detect a disconnect
                await self._message()
        except RequestError as error:
            if self._is_finished:
                self._has_left.set()  # the client sends without end
            else:
                self._put(error, 0)

    async def _read_lines(self) -> None:
        """Queue lines until `finish`, the body's end or a disconnect. Raises RequestError for a bad line, or if none is
        received in time."""
        unread = bytearray()
        while not self._is_finished:
            limits = self._limits
            idle_s = limits.idle_s if self._is_open else min(limits.idle_s, limits.body_s)  # not admitted yet
            try:
                async with asyncio.timeout(idle_s):
                    is_last = await self._fill(unread)
            except TimeoutError:
                raise RequestError(f"no line was received for {idle_s:g} s", status=408, code="idle") from None
            if self._has_left.is_set():
                return
            *lines, rest = unread.split(b"\n")
            if is_last and rest.strip():
                lines, rest = [*lines, rest], bytearray()
            unread = rest
            for start in range(0, len(lines), LINES_A_TURN):
                await self._take_all(lines[start : start + LINES_A_TURN])
                if self._is_finished:
                    return
            if is_last:
                self._finish()

    def _finish(self) -> None:
        """Queue `finish` for the end of the body if the client wants that; otherwise raise RequestError."""
        if not self._finishes_at_end:
            raise RequestError(
                'the body ended without a line {"type":"finish"}, as if the client had been stopped; open the stream '
                'with "finish_at_end":true if its end is the end of the context',
                code="not_finished",
            )
        self._is_finished = True
        self._put(FinishLine(type="finish"), 0)

    async def _fill(self, unread: bytearray) -> bool:
        """Read until `unread` has a line, the body ends or the client leaves; return whether one of the last two
        happened. Raises RequestError for a line that is too long."""
        most = self._limits.max_frame_bytes
        while True:
            message = await self._message()
            num_before = len(unread)
            is_last = self._has_left.is_set() or not message.get("more_body", False)
            try:
                unread += self._text.convert(message.get("body", b""), is_last=is_last)
            except ValueError as error:
                raise bad_line(self._num_lines + 1, f"it is not UTF-16, as its byte order mark says: {error}") from None
            if len(unread) - 1 - unread.rfind(b"\n") > most:
                number = self._num_lines + unread.count(b"\n") + 1
                raise bad_line(number, f"it has more than {most:,} bytes, which is the most", status=413)
            if is_last:
                return True
            if b"\n" in unread[num_before:]:
                return False

    async def _message(self) -> Message:
        """Return the next message, and note whether the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._has_left.set()
        return message

    async def _take_all(self, lines: list[bytearray]) -> None:
        """Parse and queue lines, but no blank ones; pause for the time they cost, and wait until the queue has room."""
        start_s = time.thread_time()
        num_before = self._queue.qsize()
        for line in lines:
            self._num_lines += 1
            if not self._is_finished and line.strip():  # a blank line is a heartbeat
                self._take(bytes(line))
        took_s = time.thread_time() - start_s + LINE_S * (self._queue.qsize() - num_before)
        await asyncio.sleep(self._account.pause_s(took_s))
        await self._has_room.wait()

    def _take(self, line: bytes) -> None:
        """Parse and queue a line. Raises RequestError unless exactly the first one is of type open."""
        if len(line) > self._limits.max_frame_bytes:
            raise bad_line(self._num_lines, "it is too long", status=413)
        parsed = parse_line(line, self._num_lines)
        if isinstance(parsed, OpenLine) is self._is_open:
            what = "this one is open already" if self._is_open else f"and not with {parsed.type!r}"
            raise bad_line(self._num_lines, f"a stream begins with one line of type 'open', {what}", "type")
        if isinstance(parsed, OpenLine):
            self._is_open = True
            self._finishes_at_end = parsed.finish_at_end
        self._is_finished = isinstance(parsed, FinishLine)
        self._put(parsed, len(line))

    def _put(self, line: Line | RequestError, num_bytes: int) -> None:
        self._queue.put_nowait((line, num_bytes + LINE_BYTES))
        self._count(num_bytes + LINE_BYTES)

    async def _next(self) -> Line:
        """Wait for the next line, dequeue it, and return it. Raises the RequestError that `read` queued."""
        line, num_bytes = await self._queue.get()
        self._count(-num_bytes)
        if isinstance(line, RequestError):
            raise line
        return line

    def _count(self, num_bytes: int) -> None:
        """Add to the size of the queue, and let `read` continue only below the limit."""
        self._num_queued_bytes += num_bytes
        if self._num_queued_bytes > self._limits.max_frame_bytes:
            self._has_room.clear()
        else:
            self._has_room.set()
