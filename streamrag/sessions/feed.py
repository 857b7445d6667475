"""What a source or an async iterator brings into a session that follows it."""

from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import aclosing

from streamrag.core import Append, Chunk, Source, SourceEvent, Update, part_name
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.query.retrieval import Retrieval, checked_chunk, closing
from streamrag.support.messages import kind_of, message_of

MAX_SEEN = 4096
"""Chunks of a source that are remembered besides those of the newest update, so that the next does not repeat them."""


def check_followed(given: object, query: str) -> None:
    """Check that this can be followed.

    :raises ConfigurationError: it cannot.
    """
    if isinstance(given, type):
        raise ConfigurationError(f"what is followed is the class {given.__name__}, and must be an object of it")
    if not callable(getattr(given, "stream", None)) and not isinstance(given, AsyncIterable):
        raise ConfigurationError(
            f"what is followed is {kind_of(given)}: it must be a source, or an async iterator of texts or Chunks"
        )
    if not isinstance(query, str):
        raise ConfigurationError(f"the query is {kind_of(query)}, and must be a str")


async def append_all(
    followed: Source | AsyncIterable[Chunk | str], query: str, append: Callable[[Chunk], Awaitable[int]]
) -> None:
    """Append each new chunk of a source, or each item of an async iterator, until it ends.

    :raises SourceError: it failed, or yielded something else.
    """
    try:
        if callable(getattr(followed, "stream", None)):
            await _append_source(followed, query, append)  # type: ignore[arg-type]
        else:
            await _append_iterator(followed, append)  # type: ignore[arg-type]
    except StreamRagError:
        raise
    except Exception as error:  # a source is anybody's code; whatever it raises is a failed retrieval
        raise SourceError(f"{_name(followed)} failed: {type(error).__name__}: {message_of(error)}") from error


async def _append_source(source: Source, query: str, append: Callable[[Chunk], Awaitable[int]]) -> None:
    seen: dict[Chunk, None] = {}
    async with aclosing(Retrieval(source, query).events()) as events:
        async for event in events:
            for chunk in _new_chunks(event, seen):
                await append(chunk)


async def _append_iterator(iterable: AsyncIterable[Chunk | str], append: Callable[[Chunk], Awaitable[int]]) -> None:
    async with closing(aiter(iterable)) as items:
        async for item in items:
            try:
                chunk = checked_chunk(Chunk(item, "") if isinstance(item, str) else item)
            except ConfigurationError as error:
                raise SourceError(f"{_name(iterable)} failed: it yielded something else: {error}") from None
            await append(chunk)


def _name(followed: object) -> str:
    name = getattr(followed, "__name__", None)  # a generator's
    return name if isinstance(name, str) else part_name(followed)


def _new_chunks(event: SourceEvent, seen: dict[Chunk, None]) -> list[Chunk]:
    """Return the chunks of an event that were not seen, and add all to `seen`."""
    if isinstance(event, Append):
        chunks: tuple[Chunk, ...] = (event.chunk,)
        new = [event.chunk]  # also one that is as another was: a log says the same thing twice
    elif isinstance(event, Update):
        chunks = event.chunks
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in seen]
    else:
        return []
    for chunk in chunks:  # the newest stand last
        seen.pop(chunk, None)
        seen[chunk] = None
    while len(seen) > MAX_SEEN + len(chunks):
        del seen[next(iter(seen))]
    return new
