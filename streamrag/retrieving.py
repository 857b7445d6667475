"""What a source yields, checked: a source is anybody's code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from inspect import iscoroutine
from typing import TypeVar

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Source, SourceEvent, Update, part_name
from streamrag.errors import SourceError
from streamrag.tasks import is_cancelled

__all__ = ["closing", "source_events"]

T = TypeVar("T")


async def source_events(source: Source, query: str) -> AsyncGenerator[SourceEvent, None]:
    """The source's events; closing this closes them. What the source raises is raised here.

    Raises SourceError for what is no event, and for a CancelledError or GeneratorExit of the source's own: raised on,
    either would end the query without a word. Raises CancelledError where the source swallowed one that was meant.
    """
    events = source.stream(query)
    if iscoroutine(events):
        events.close()
        raise SourceError(f"{part_name(source)}.stream is a coroutine: make it an async generator, which yields events")
    if not isinstance(events, AsyncIterable):
        raise SourceError(f"{part_name(source)}.stream returned {_kind(events)}: it must return an async iterator")
    async with closing(events) as pulled:
        while True:
            try:
                event = await anext(pulled)
            except StopAsyncIteration:
                _raise_swallowed()
                return
            except (asyncio.CancelledError, GeneratorExit) as error:
                if is_cancelled():
                    raise
                raise SourceError(
                    f"{part_name(source)} failed: {_kind(error)}, though nobody has stopped the query"
                ) from error
            except Exception as error:
                _raise_swallowed(error)
                raise
            _raise_swallowed()
            yield _checked(source, event)


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
        case Append(Chunk(text=str(), source=str(), title=str()), Hint() | None):
            return event
        case Update(tuple(chunks), Hint() | None) if all(map(_is_chunk, chunks)):
            return event
        case Update(list(chunks), Hint() | None) if all(map(_is_chunk, chunks)):
            return replace(event, chunks=tuple(chunks))
        case Skipped(str(), str()) | CutShort(str()):
            return event
    raise SourceError(f"{part_name(source)} failed: it yielded {_fault(event)}")


def _is_chunk(chunk: object) -> bool:
    return (
        isinstance(chunk, Chunk)
        and isinstance(chunk.text, str)
        and isinstance(chunk.source, str)
        and isinstance(chunk.title, str)
    )


def _fault(event: object) -> str:
    """What is wrong with it, for the source's author."""
    match event:
        case Append(chunk=chunk) if not _is_chunk(chunk):
            return f"an Append with {_chunk_fault(chunk)}"
        case Update(chunks=chunks) if not isinstance(chunks, tuple | list):
            return f"an Update with {_kind(chunks)} in place of a tuple of chunks"
        case Update(chunks=chunks) if wrong := [chunk for chunk in chunks if not _is_chunk(chunk)]:
            return f"an Update with {_chunk_fault(wrong[0])}"
        case Append(hint=hint) | Update(hint=hint):
            return f"{_kind(event)} with {_kind(hint)} in place of a Hint"
        case Skipped() | CutShort():
            return f"{_kind(event)} of which a field is no text"
    return f"{_kind(event)}: it must yield Append, Update, Skipped or CutShort"


def _chunk_fault(chunk: object) -> str:
    if not isinstance(chunk, Chunk):
        return f"{_kind(chunk)} in place of a Chunk"
    name, value = next(
        (name, value) for name in ("text", "source", "title") if not isinstance(value := getattr(chunk, name), str)
    )
    return f"a Chunk whose {name} is {_kind(value)}, and must be a str"


def _kind(value: object) -> str:
    """What it is, for a message: its value may be long."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
