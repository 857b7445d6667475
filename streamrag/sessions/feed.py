"""Append what a source or an async iterator yields to a session."""

from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import aclosing

from streamrag.core import Append, Chunk, Source, SourceEvent, Update, part_name
from streamrag.core.retrieval import Retrieval, checked_chunk, closing
from streamrag.errors import ConfigurationError, SourceError, StreamRagError
from streamrag.support.messages import message_of, type_name

MAX_SEEN = 4096
"""Chunks of a source that are remembered, besides the newest update, so that later updates do not append them again."""


def check_followed(followed: object, query: str) -> None:
    """Raise ConfigurationError unless `followed` (no class) has a `stream` or is async iterable, and `query` a str."""
    if isinstance(followed, type):
        raise ConfigurationError(f"the followed source is the class {followed.__name__}, and must be an object of it")
    if not callable(getattr(followed, "stream", None)) and not isinstance(followed, AsyncIterable):
        raise ConfigurationError(
            f"the followed source is {type_name(followed)}: it must be a source, or an async iterator of texts or "
            "Chunks"
        )
    if not isinstance(query, str):
        raise ConfigurationError(f"the query is {type_name(query)}, and must be a str")


async def append_all(
    followed: Source | AsyncIterable[Chunk | str], query: str, append: Callable[[Chunk], Awaitable[int]]
) -> None:
    """Append each new chunk of a source, or each item of an async iterator, until the source or iterator ends.

    :raises SourceError: an exception other than a StreamRagError was raised, or an item is no text or valid chunk.
    """
    try:
        if callable(getattr(followed, "stream", None)):
            await _append_source(followed, query, append)  # type: ignore[arg-type]
        else:
            await _append_iterator(followed, append)  # type: ignore[arg-type]
    except StreamRagError:
        raise
    except Exception as error:  # a source is foreign code: any exception means that retrieval failed
        raise SourceError(f"{_name(followed)} failed: {type(error).__name__}: {message_of(error)}") from error


async def _append_source(source: Source, query: str, append: Callable[[Chunk], Awaitable[int]]) -> None:
    """Append the chunk of each Append, and of each Update the chunks that the source has not yielded before."""
    seen: dict[Chunk, None] = {}
    async with aclosing(Retrieval(source, query).events()) as events:
        async for event in events:
            for chunk in _new_chunks(event, seen):
                await append(chunk)


async def _append_iterator(iterable: AsyncIterable[Chunk | str], append: Callable[[Chunk], Awaitable[int]]) -> None:
    """Append each item, a text as a chunk without a URI, and close the iterator; raise SourceError for other items."""
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
    """Return the chunk of an Append, or the distinct chunks of an Update that are not in `seen`; none of other events.
    Add the event's chunks to `seen` as its newest, and remove the oldest beyond `MAX_SEEN` others."""
    if isinstance(event, Append):
        chunks: tuple[Chunk, ...] = (event.chunk,)
        new = [event.chunk]  # even if it equals an earlier one: a log may say the same thing twice
    elif isinstance(event, Update):
        chunks = event.chunks
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in seen]
    else:
        return []
    for chunk in chunks:  # move to the end: the oldest are forgotten first
        seen.pop(chunk, None)
        seen[chunk] = None
    while len(seen) > MAX_SEEN + len(chunks):
        del seen[next(iter(seen))]
    return new
