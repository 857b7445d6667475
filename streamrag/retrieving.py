"""What a source yields, checked: a source is anybody's code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import iscoroutine
from typing import TypeVar

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Source, SourceEvent, Update, part_name
from streamrag.errors import SourceError
from streamrag.kinds import is_number, is_whole, kind_of
from streamrag.tasks import cancel_regardless, is_cancelled

__all__ = ["closing", "source_events"]

T = TypeVar("T")


async def source_events(source: Source, query: str) -> AsyncGenerator[SourceEvent, None]:
    """The source's events; closing this closes them. What the source raises is raised here.

    The source has a task of its own, so that what it times or cancels around its `yield`s is itself; it goes on when
    the next event is asked for. Raises SourceError for what is no event, and for a CancelledError, GeneratorExit or
    group of errors of the source's own: raised on, they would end the query without a word.
    """
    events = source.stream(query)
    if iscoroutine(events):
        events.close()
        raise SourceError(f"{part_name(source)}.stream is a coroutine: make it an async generator, which yields events")
    if not isinstance(events, AsyncIterable):
        raise SourceError(f"{part_name(source)}.stream returned {kind_of(events)}: it must return an async iterator")
    pulled: asyncio.Queue[SourceEvent | None] = asyncio.Queue()
    pull = asyncio.create_task(_pull(source, events, pulled), name="streamrag source")
    pull.add_done_callback(lambda _: pulled.put_nowait(None))
    try:
        while event := await pulled.get():
            yield event
            pulled.task_done()
    finally:
        await cancel_regardless([pull])
    if pull.cancelled():
        raise _stopped_by_itself(source, asyncio.CancelledError())
    pull.result()


async def _pull(
    source: Source, events: AsyncIterator[SourceEvent], pulled: "asyncio.Queue[SourceEvent | None]"
) -> None:
    """Each event, once that before it is done with. A cancellation meanwhile is for the source: it is thrown there."""
    async with closing(events) as generator:
        go_on: Callable[[], Awaitable[SourceEvent]] = generator.__anext__
        while True:
            try:
                event = await go_on()
            except StopAsyncIteration:
                _raise_swallowed()
                return
            except Exception as error:
                _raise_swallowed(error)
                raise
            except (asyncio.CancelledError, GeneratorExit, BaseExceptionGroup) as error:
                if is_cancelled():
                    raise asyncio.CancelledError from error
                raise _stopped_by_itself(source, error) from error
            _raise_swallowed()
            pulled.put_nowait(_checked(source, event))
            go_on = generator.__anext__
            try:
                await pulled.join()
            except asyncio.CancelledError as error:
                go_on = partial(generator.athrow, error)


def _stopped_by_itself(source: Source, error: BaseException) -> SourceError:
    what = f"{error!r:.500}" if isinstance(error, BaseExceptionGroup) else kind_of(error)
    return SourceError(f"{part_name(source)} failed: {what}, though nobody has stopped the query")


def closing(iterator: AsyncIterator[T]) -> "aclosing[AsyncGenerator[T, None]]":
    """Closes foreign async iterators too, which need not be generators."""
    return aclosing(iterator if isinstance(iterator, AsyncGenerator) else _as_generator(iterator))


async def _as_generator(iterator: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    try:
        async for item in iterator:
            yield item
    finally:
        if close := getattr(iterator, "aclose", None):
            await close()


def _raise_swallowed(error: Exception | None = None) -> None:
    """A source that catches everything, or makes another error of a cancellation, does not outlive its query."""
    if is_cancelled():
        raise asyncio.CancelledError from error


def _checked(source: Source, event: SourceEvent) -> SourceEvent:
    """The event, of the types that it says; a list of chunks becomes a tuple, which stays as it is."""
    match event:
        case Append(chunk, Hint() | None) if not _chunk_fault(chunk):
            return event
        case Update(tuple(chunks), Hint() | None) if not any(map(_chunk_fault, chunks)):
            return event
        case Update(list(chunks), Hint() | None) if not any(map(_chunk_fault, chunks)):
            return replace(event, chunks=tuple(chunks))
        case Skipped(str(), str()) | CutShort(str()):
            return event
    raise SourceError(f"{part_name(source)} failed: it yielded {_fault(event)}")


def _fault(event: object) -> str:
    """What is wrong with it, for the source's author."""
    match event:
        case Append(chunk=chunk) if fault := _chunk_fault(chunk):
            return f"an Append with {fault}"
        case Update(chunks=chunks) if not isinstance(chunks, tuple | list):
            return f"an Update with {kind_of(chunks)} in place of a tuple of chunks"
        case Update(chunks=chunks) if faults := list(filter(None, map(_chunk_fault, chunks))):
            return f"an Update with {faults[0]}"
        case Append(hint=hint) | Update(hint=hint):
            return f"{kind_of(event)} with {kind_of(hint)} in place of a Hint"
        case Skipped() | CutShort():
            return f"{kind_of(event)} of which a field is no text"
    return f"{kind_of(event)}: it must yield Append, Update, Skipped or CutShort"


def _chunk_fault(chunk: object) -> str:
    """What is wrong with it, or nothing. Numbers may be NumPy's."""
    if not isinstance(chunk, Chunk):
        return f"{kind_of(chunk)} in place of a Chunk"
    for name in ("text", "source", "title"):
        if not isinstance(value := getattr(chunk, name), str):
            return f"a Chunk whose {name} is {kind_of(value)}, and must be a str"
    if not is_whole(chunk.passage):
        return f"a Chunk whose passage is {kind_of(chunk.passage)}, and must be a whole number"
    if chunk.score is not None and not is_number(chunk.score):
        return f"a Chunk whose score is {kind_of(chunk.score)}, and must be a number that is not NaN, or None"
    return ""
