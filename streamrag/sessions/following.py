"""What is new in the events of a source that a session follows."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from streamrag.core import Append, Chunk, Source, SourceEvent, Update, part_name
from streamrag.errors import SourceError, StreamRagError
from streamrag.kinds import message_of
from streamrag.retrieving import Retrieval

MAX_SEEN = 4096
"""Chunks of a source that are remembered besides those of the newest update, so that the next does not repeat them."""


async def append_all(source: Source, query: str, append: Callable[[Chunk], Awaitable[int]]) -> None:
    """Each chunk that the source appends, and of its updates those that it has not yielded before.

    :raises SourceError: the source failed.
    """
    seen: dict[Chunk, None] = {}
    try:
        async with aclosing(Retrieval(source, query).events()) as events:
            async for event in events:
                for chunk in _new(event, seen):
                    await append(chunk)
    except StreamRagError:
        raise
    except Exception as error:  # a source is anybody's code; whatever it raises is a failed retrieval
        raise SourceError(f"{part_name(source)} failed: {type(error).__name__}: {message_of(error)}") from error


def _new(event: SourceEvent, seen: dict[Chunk, None]) -> list[Chunk]:
    if isinstance(event, Append):
        given: tuple[Chunk, ...] = (event.chunk,)
        new = [event.chunk]  # also one that is as another was: a log says the same thing twice
    elif isinstance(event, Update):
        given = event.chunks
        new = [chunk for chunk in dict.fromkeys(given) if chunk not in seen]
    else:
        return []
    for chunk in given:  # the newest stand last
        seen.pop(chunk, None)
        seen[chunk] = None
    while len(seen) > MAX_SEEN + len(given):
        del seen[next(iter(seen))]
    return new
