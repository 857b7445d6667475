"""The body of `POST /v1/streams`: lines of JSON that the client sends while it retrieves, each checked when it comes.

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

from starlette.types import Message, Receive

from streamrag.core import SourceEvent
from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.json_body import StrictModel, check_num_values
from streamrag.serve.failures import RequestError
from streamrag.serve.protocols.ask import QueryRequest
from streamrag.serve.service import Service
from streamrag.trace.events import EventLine, LineCodec, LineError

LINES_A_TURN = 64
"""Lines that are checked in one turn of the event loop, which takes some hundred microseconds."""

LINE_S = 0.000_1
"""CPU seconds that the pipeline takes for a line."""

LINE_BYTES = 1024
"""Memory of a line that waits, beside its text."""


class OpenLine(QueryRequest):
    """The question, with its options: the first line of a body, and only the first."""

    type: Literal["open"]
    query: str
    finish_at_end: bool = False
    """Whether the end of the body counts as `finish`. Without it, a body that ends early is a client that left."""


class FinishLine(StrictModel):
    """The context is complete."""

    type: Literal["finish"]


Line: TypeAlias = OpenLine | EventLine | FinishLine

_CODEC = LineCodec[Line](Line, "type")


def parse_line(line: bytes, number: int) -> Line:
    """Return one line of a body.

    :raises RequestError: it is not of the schema; the message names the line and the field.
    """
    try:
        check_num_values(line)
        return _CODEC.decode(line)
    except LineError as error:
        raise bad_line(number, str(error), error.where or None) from None
    except RequestError as error:
        raise bad_line(number, str(error), status=413) from None


def bad_line(number: int, message: str, param: str | None = None, *, status: int = 400) -> RequestError:
    """Return the error about line `number`, counted from 1, blank lines included."""
    return RequestError(f"line {number}: {message}", status=status, code="invalid_line", param=param, line=number)


class StreamBody:
    """The lines of a body. It alone calls the request's `receive`, and so sees the client leave.

    `read` runs in a task of its own. It stops reading while lines of more than `max_frame_bytes` wait, so that TCP
    holds up this client.
    """

    def __init__(self, receive: Receive, service: Service) -> None:
        self._receive = receive
        self._limits = service.limits
        self._account = Account(service.share)
        self._waiting: asyncio.Queue[tuple[Line | RequestError, int]] = asyncio.Queue()
        self._num_waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._has_left = asyncio.Event()
        self._is_open = False
        self._finishes_at_end = False
        self._is_finished = False
        self._num_lines = 0

    async def wait_until_left(self) -> Message:
        """Return when the client has left: an ASGI `receive`."""
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def open_line(self) -> OpenLine:
        """Wait for the first line.

        :raises RequestError: it is another one, or is bad, or does not come in time.
        """
        first = await self._next()
        assert isinstance(first, OpenLine)  # `_check` refuses others
        return first

    async def events(self) -> AsyncIterator[SourceEvent]:
        """Yield the events of the lines behind the first, until `finish`.

        :raises RequestError: a line is bad or too long, or does not come in time, or `finish` is missing.
        """
        while not isinstance(line := await self._next(), FinishLine):
            assert not isinstance(line, OpenLine)
            yield line.event()

    async def read(self) -> None:
        """Read the body until its end, and then on until the client has left."""
        try:
            await self._read_lines()
            while not self._has_left.is_set():  # drop what is behind the last line, to see the client leave
                await self._message()
        except RequestError as error:
            if self._is_finished:
                self._has_left.set()  # it sends without end
            else:
                self._put(error, 0)

    async def _read_lines(self) -> None:
        unread = bytearray()
        while not self._is_finished:
            limits = self._limits
            idle_s = limits.idle_s if self._is_open else min(limits.idle_s, limits.body_s)  # it has no place yet
            try:
                async with asyncio.timeout(idle_s):
                    is_last = await self._fill(unread)
            except TimeoutError:
                raise RequestError(f"no line has come for {idle_s:g} s", status=408, code="idle") from None
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
                if not self._finishes_at_end:
                    raise RequestError(
                        'the body ended without a line {"type":"finish"}, as of a client that was stopped; open the '
                        'stream with "finish_at_end":true if that is as good',
                        code="not_finished",
                    )
                self._is_finished = True
                self._put(FinishLine(type="finish"), 0)

    async def _fill(self, unread: bytearray) -> bool:
        """Read until there is a whole line or the body ends; return whether it has ended."""
        while True:
            message = await self._message()
            begun = len(unread)
            unread += message.get("body", b"")
            num_rest = len(unread) - 1 - unread.rfind(b"\n")
            if num_rest > self._limits.max_frame_bytes:
                raise bad_line(
                    self._num_lines + unread.count(b"\n") + 1,
                    f"it has more than {self._limits.max_frame_bytes:,} bytes, which is the most",
                    status=413,
                )
            if self._has_left.is_set() or not message.get("more_body", False):
                return True
            if b"\n" in unread[begun:]:
                return False

    async def _message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._has_left.set()
        return message

    async def _take_all(self, lines: list[bytearray]) -> None:
        began_s = time.thread_time()
        num_before = self._waiting.qsize()
        for line in lines:
            self._num_lines += 1
            if not self._is_finished and line.strip():  # a blank one is a sign of life
                self._take(bytes(line))
        took_s = time.thread_time() - began_s + LINE_S * (self._waiting.qsize() - num_before)
        await asyncio.sleep(self._account.pause_s(took_s))
        await self._has_room.wait()

    def _take(self, line: bytes) -> None:
        if len(line) > self._limits.max_frame_bytes:
            raise bad_line(self._num_lines, "it is too long", status=413)
        parsed = parse_line(line, self._num_lines)
        self._check(parsed)
        self._is_finished = isinstance(parsed, FinishLine)
        self._put(parsed, len(line))

    def _check(self, line: Line) -> None:
        if isinstance(line, OpenLine) is self._is_open:
            what = "this one is open already" if self._is_open else f"and not with {line.type!r}"
            raise bad_line(self._num_lines, f"a stream begins with one line of type 'open', {what}", "type")
        if isinstance(line, OpenLine):
            self._is_open = True
            self._finishes_at_end = line.finish_at_end

    def _put(self, line: Line | RequestError, num_bytes: int) -> None:
        self._waiting.put_nowait((line, num_bytes + LINE_BYTES))
        self._count(num_bytes + LINE_BYTES)

    async def _next(self) -> Line:
        line, num_bytes = await self._waiting.get()
        self._count(-num_bytes)
        if isinstance(line, RequestError):
            raise line
        return line

    def _count(self, num_bytes: int) -> None:
        self._num_waiting_bytes += num_bytes
        if self._num_waiting_bytes > self._limits.max_frame_bytes:
            self._has_room.clear()
        else:
            self._has_room.set()
