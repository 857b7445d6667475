"""Run a source in a task of its own, and validate what it yields: a source is foreign code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import isawaitable, iscoroutine
from math import isfinite
from numbers import Real
from types import NoneType
from typing import Any, TypeVar

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Source, SourceEvent, Update, part_name
from streamrag.core.text import is_blank, readable
from streamrag.errors import ConfigurationError, SourceError
from streamrag.support.messages import is_number, is_whole, plain_text, short_repr, type_name
from streamrag.support.tasks import cancel_and_wait, end_or_leave, is_cancelled

_END = object()
MAX_COUNT = (1 << 31) - 1  # the largest passage number that a trace can store

T = TypeVar("T")


class Retrieval:
    """The retrieval of a source for one query, in a task of its own.

    Because of the task, the source may hold timeouts and cancel scopes open at its `yield`s, and any task may call
    `aclose`. The source continues when the next event is requested.

    let_go_s: most seconds that the source may take to stop, before it is left behind; None if the caller limits this.
    """

    def __init__(self, source: Source, query: str, *, let_go_s: float | None = None) -> None:
        self.source = source
        self._query = query
        self._let_go_s = let_go_s
        self._pulled: asyncio.Queue[SourceEvent | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._blank_chunks = BlankChunks()

    async def events(self) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events. Call it once. Closing the iterator closes the source.

        Raises what the source raises, and SourceError for an invalid event, or for a CancelledError, GeneratorExit or
        other BaseException of the source, which would end the query without an error.
        """
        self._task = asyncio.create_task(self._pull(), name="streamrag source")
        self._task.add_done_callback(lambda _: self._pulled.put_nowait(None))
        try:
            while (event := await self._pulled.get()) is not None:
                yield event
                self._pulled.task_done()
        finally:
            await self.aclose()
        if self._task.cancelled():
            raise self._failed(asyncio.CancelledError())
        self._task.result()

    async def aclose(self) -> None:
        """Stop the source, if it runs, and wait for its end; after `let_go_s`, leave it with a ResourceWarning."""
        self._is_stopped = True
        if self._task is None:
            return
        if self._let_go_s is None:
            await cancel_and_wait([self._task])
        else:
            culprit = part_name(self.source)
            await end_or_leave(self._task, "retrieval that was stopped", culprit, at_most_s=self._let_go_s)

    async def _pull(self) -> None:
        """Queue each event when the previous one was used. A cancellation in between is thrown into the source.

        Raises what the source raises, SourceError for an invalid event or a BaseException; CancelledError once stopped.
        """
        async with closing(_stream(self.source, self._query)) as events:
            resume: Callable[[], Awaitable[SourceEvent]] = events.__anext__
            while True:
                try:
                    event = await resume()
                except StopAsyncIteration:
                    self._raise_swallowed()
                    return
                except Exception as error:
                    self._raise_swallowed(error)
                    raise
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    self._raise_swallowed(error)
                    if isinstance(error, asyncio.CancelledError) and is_cancelled():  # the event loop shuts down
                        raise
                    raise self._failed(error) from error
                self._raise_swallowed()
                for each in self._blank_chunks.skip(_checked(self.source, event)):
                    self._pulled.put_nowait(each)
                resume = events.__anext__
                try:
                    await self._pulled.join()
                except asyncio.CancelledError as error:
                    resume = partial(events.athrow, error)

    def _raise_swallowed(self, error: BaseException | None = None) -> None:
        """Raise CancelledError if the query was stopped, even if the source has swallowed or replaced that error."""
        if self._is_stopped:
            raise asyncio.CancelledError from error

    def _failed(self, error: BaseException) -> SourceError:
        """Return the error for an exception that would end the query silently."""
        what = type_name(error) if isinstance(error, asyncio.CancelledError | GeneratorExit) else short_repr(error)
        return SourceError(f"{part_name(self.source)} failed: {what}, although the query was not stopped")


class BlankChunks:
    """A filter of one query's chunks that replaces those without text by a `Skipped`."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, int]] = set()

    def skip(self, event: SourceEvent) -> Iterator[SourceEvent]:
        """Yield a `Skipped` for each blank chunk's place, once, then the event with the others; no blank `Append`."""
        chunks = event.chunks if isinstance(event, Update) else (event.chunk,) if isinstance(event, Append) else ()
        blank = [chunk for chunk in chunks if is_blank(chunk.text)]
        for place in dict.fromkeys((chunk.uri, chunk.passage) for chunk in blank):
            if place not in self._reported:
                self._reported.add(place)
                yield Skipped(place[0], "it has no text")
        if blank and isinstance(event, Update):
            yield replace(event, chunks=tuple(chunk for chunk in chunks if not is_blank(chunk.text)))
        elif not blank:
            yield event


def _stream(source: Source, query: str) -> AsyncIterator[SourceEvent]:
    """Call the source's `stream`; raise SourceError if it returned something else than an async iterator."""
    events = source.stream(query)
    if iscoroutine(events):
        events.close()
        raise SourceError(f"{part_name(source)}.stream is a coroutine: make it an async generator, which yields events")
    if not isinstance(events, AsyncIterable):
        raise SourceError(f"{part_name(source)}.stream returned {type_name(events)}: it must return an async iterator")
    return events


async def with_timeouts(
    events: AsyncGenerator[T, None], timeout_s: Callable[[], float | None]
) -> AsyncGenerator[T | None, None]:
    """Yield each event, and None after `timeout_s()` seconds without one (None: never). Close this before `events`."""
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events), name="streamrag next event")
            await asyncio.wait([pending], timeout=timeout_s())
            if not pending.done():
                yield None
                continue
            event, pending = pending.result(), None
            if event is _END:
                return
            yield event
    finally:
        if pending is not None:
            await cancel_and_wait([pending])


async def _next(events: AsyncGenerator[T, None]) -> object:
    return await anext(events, _END)


def closing(iterator: AsyncIterator[T]) -> "aclosing[AsyncGenerator[T, None]]":
    """Return a context manager that closes an async iterator, also one that is not a generator."""
    return aclosing(iterator if isinstance(iterator, AsyncGenerator) else _as_generator(iterator))


async def _as_generator(iterator: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items, and at the end call the iterator's `aclose`, if there is one, and await its result."""
    try:
        async for item in iterator:
            yield item
    finally:
        if (close := getattr(iterator, "aclose", None)) and isawaitable(closed := close()):
            await closed


def _checked(source: Source, event: SourceEvent) -> SourceEvent:
    """Return a valid event with plain types, such as tuples and Python's numbers; raise SourceError for others."""
    match event:
        case Append(chunk, hint) if not _chunk_fault(chunk) and not _hint_fault(hint):
            return event if (plain := _plain(chunk)) is chunk else replace(event, chunk=plain)
        case Update(chunks, hint) if (
            isinstance(chunks, tuple | list) and not any(map(_chunk_fault, chunks)) and not _hint_fault(hint)
        ):
            return replace(event, chunks=tuple(map(_plain, chunks)))
        case Skipped(str(), str()) | CutShort(str()):
            return event
    raise SourceError(f"{part_name(source)} failed: it yielded {_fault(event)}")


def checked_chunk(chunk: object) -> Chunk:
    """Return a valid chunk with plain types; raise ConfigurationError if it is not a chunk, or an invalid one."""
    if not isinstance(chunk, Chunk):
        raise ConfigurationError(f"data must be a Chunk or a str, and not {type_name(chunk)}")
    if fault := _chunk_fault(chunk):
        raise ConfigurationError(f"data must not be {fault}")
    return _plain(chunk)


def _plain(chunk: Chunk) -> Chunk:
    """Return a valid chunk with plain str, int and float in place of their subclasses and NumPy's, and with `readable`
    text and title; itself if plain."""
    texts = (chunk.text, chunk.uri, chunk.title)
    is_plain = type(chunk.passage) is int and type(chunk.score) in (float, NoneType) and {*map(type, texts)} == {str}
    text, uri, title = map(plain_text, texts)
    text, title = readable(text), readable(title)
    if is_plain and (text, title) == (chunk.text, chunk.title):
        return chunk
    score = None if chunk.score is None else float(chunk.score)
    return replace(chunk, text=text, uri=uri, title=title, passage=int(chunk.passage), score=score)


def _fault(event: object) -> str:
    """Describe what is wrong with `event`, for the author of the source."""
    match event:
        case Append(chunk=chunk) if fault := _chunk_fault(chunk):
            return f"an Append with {fault}"
        case Update(chunks=chunks) if not isinstance(chunks, tuple | list):
            return f"an Update with {type_name(chunks)} in place of a tuple of chunks"
        case Update(chunks=chunks) if faults := list(filter(None, map(_chunk_fault, chunks))):
            return f"an Update with {faults[0]}"
        case Append(hint=hint) | Update(hint=hint):
            return f"{type_name(event)} with {_hint_fault(hint)}"
        case Skipped() | CutShort():
            return f"{type_name(event)} of which a field is no text"
    return f"{type_name(event)}: it must yield Append, Update, Skipped or CutShort"


def _chunk_fault(chunk: object) -> str:
    """Describe what is wrong with `chunk`; return an empty text if it is valid. NumPy numbers are."""
    if not isinstance(chunk, Chunk):
        return f"{type_name(chunk)} in place of a Chunk"
    for name in ("text", "uri", "title"):
        if not isinstance(value := getattr(chunk, name), str):
            return f"a Chunk whose {name} is {type_name(value)}, and must be a str"
    if not is_whole(chunk.passage) or not 0 <= chunk.passage <= MAX_COUNT:
        what = short_repr(chunk.passage) if is_whole(chunk.passage) else type_name(chunk.passage)
        return f"a Chunk whose passage is {what}, and must be a whole number from 0 to {MAX_COUNT:,}"
    if chunk.score is not None and not (is_number(chunk.score) and isfinite(chunk.score)):
        return f"a Chunk whose score is {short_repr(chunk.score)}, and must be a finite number, or None"
    return ""


def _hint_fault(hint: object) -> str:
    """Describe what is wrong with `hint`; return an empty text if it is valid."""
    if hint is None:
        return ""
    if not isinstance(hint, Hint):
        return f"{type_name(hint)} in place of a Hint"
    for name in ("num_chunks", "end_s"):
        if (value := getattr(hint, name)) is not None and not isinstance(value, Real):
            return f"a Hint whose {name} is {type_name(value)}, and must be a number or None"
    return ""
