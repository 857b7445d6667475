"""The body of a stream: JSON lines that are sent while they come about, read by one task and checked one by one.

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
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError
from starlette.types import Message, Receive

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update
from streamrag.retrieving import MAX_COUNT
from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.json_body import StrictModel, check_num_values, first_error
from streamrag.serve.failures import RequestError
from streamrag.serve.interfaces.ask import Options
from streamrag.serve.service import Service

MAX_CHUNKS = 4096
"""Chunks of one update."""

LINES_A_TURN = 64
"""Lines that are checked in one turn of the event loop, which takes some hundred microseconds."""

LINE_S = 0.000_1
"""CPU seconds that the pipeline takes for a line."""

LINE_BYTES = 1024
"""Bytes that a line which waits takes beside its text."""


class ChunkFields(StrictModel):
    """A passage of retrieved text, and where it came from."""

    text: str
    uri: str
    title: str = ""
    passage: int = Field(default=0, ge=0, le=MAX_COUNT)
    score: float | None = Field(default=None, allow_inf_nan=False)

    def chunk(self) -> Chunk:
        """As sources have it."""
        return Chunk(self.text, self.uri, self.title, self.passage, self.score)


class HintFields(StrictModel):
    """What the client expects still to send."""

    num_chunks: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    end_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)


def _hint(given: HintFields | None) -> Hint | None:
    return None if given is None else Hint(given.num_chunks, given.end_s)


class OpenLine(Options):
    """The question, with its options; always the first line, and only that."""

    type: Literal["open"]
    query: str
    finish_at_end: bool = False
    """Whether the end of the body counts as `finish`; else it is a client that left."""


class AppendLine(StrictModel):
    """The context grows by one chunk."""

    type: Literal["append"]
    chunk: ChunkFields
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        """As sources have it."""
        return Append(self.chunk.chunk(), _hint(self.hint))


class UpdateLine(StrictModel):
    """The context is replaced."""

    type: Literal["update"]
    chunks: list[ChunkFields] = Field(max_length=MAX_CHUNKS)
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        """As sources have it."""
        return Update(tuple(each.chunk() for each in self.chunks), _hint(self.hint))


class SkippedLine(StrictModel):
    """Something could not be used."""

    type: Literal["skipped"]
    uri: str
    reason: str

    def event(self) -> SourceEvent:
        """As sources have it."""
        return Skipped(self.uri, self.reason)


class CutShortLine(StrictModel):
    """The client's retrieval ends before it is done."""

    type: Literal["cut_short"]
    reason: str

    def event(self) -> SourceEvent:
        """As sources have it."""
        return CutShort(self.reason)


class FinishLine(StrictModel):
    """The context is complete."""

    type: Literal["finish"]


Line: TypeAlias = OpenLine | AppendLine | UpdateLine | SkippedLine | CutShortLine | FinishLine

_LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="type")])


def parsed_line(line: bytes, number: int) -> Line:
    """One line of a body.

    :raises RequestError: it is none that a stream has; says which, and what is wrong with it.
    """
    try:
        check_num_values(line)
        return _LINES.validate_json(line)
    except ValidationError as error:
        where, what = first_error(error, num_skipped=1)  # without the name of its type
        raise bad_line(number, f"{where}: {what}" if where else what, where or None) from None
    except RequestError as error:
        raise bad_line(number, str(error), status=413) from None


def bad_line(number: int, message: str, param: str | None = None, *, status: int = 400) -> RequestError:
    """What is raised for line `number`, counted from 1, blank ones too."""
    return RequestError(f"line {number}: {message}", status=status, code="invalid_line", param=param, line=number)


class Lines:
    """A body's lines, and the only reader of its `receive`, which also tells of the client's leaving.

    `read` runs in a task of its own. It stops reading while lines of more than `max_frame_bytes` wait to be used: TCP
    holds up the client then, and nobody else.
    """

    def __init__(self, receive: Receive, service: Service) -> None:
        self._receive = receive
        self._limits = service.limits
        self._account = Account(service.share)
        self._waiting: asyncio.Queue[tuple[Line | RequestError, int]] = asyncio.Queue()
        self._num_waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_gone = asyncio.Event()
        self._is_open = False
        self._finishes_at_end = False
        self._is_finished = False
        self._num_lines = 0

    async def gone(self) -> Message:
        """An ASGI `receive` that returns when the client has left, and not before."""
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def opening(self) -> OpenLine:
        """The first line.

        :raises RequestError: it is another, or a bad one, or none comes.
        """
        first = await self._next()
        assert isinstance(first, OpenLine)  # `_check` saw to it
        return first

    async def events(self) -> AsyncIterator[SourceEvent]:
        """What the lines behind it say, until the last.

        :raises RequestError: one is bad, or too long, or none comes for too long, or no `finish` at all.
        """
        while not isinstance(line := await self._next(), FinishLine):
            assert not isinstance(line, OpenLine)
            yield line.event()

    async def read(self) -> None:
        """Read the body until its end, and then on until the client has left."""
        try:
            await self._read_lines()
            while not self._is_gone.is_set():  # what comes behind the last line is let go, to see the client leave
                await self._message()
        except RequestError as error:
            if self._is_finished:
                self._is_gone.set()  # it sends on and on
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
            if self._is_gone.is_set():
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
        """Read until there is a whole line, or nothing more will come, which is returned."""
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
            if self._is_gone.is_set() or not message.get("more_body", False):
                return True
            if b"\n" in unread[begun:]:
                return False

    async def _message(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_gone.set()
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
        parsed = parsed_line(line, self._num_lines)
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
