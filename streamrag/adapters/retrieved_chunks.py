"""Helpers of the adapters to retrieve chunks, and chunks that keep the framework's document."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from streamrag.core import Append, Chunk, Source, SourceEvent, Update
from streamrag.core.retrieval import Retrieval
from streamrag.modes.context import Context, UpdateMode
from streamrag.support.tasks import LET_GO_S


async def retrieve(source: Source, query: str) -> AsyncGenerator[SourceEvent, None]:
    """Yield the source's validated events. Closing the generator stops the source."""
    async with aclosing(Retrieval(source, query, let_go_s=LET_GO_S).events()) as events:
        async for event in events:
            yield event


async def retrieve_all(source: Source, query: str) -> tuple[Chunk, ...]:
    """Run the source to its end, and return its final context, without duplicates; ignore `Skipped` and `CutShort`."""
    chunks = Context()
    async with aclosing(retrieve(source, query)) as events:
        async for event in events:
            if isinstance(event, Append | Update):
                chunks = chunks.with_chunks(UpdateMode().fold(chunks, event))
    return chunks


@dataclass(frozen=True, slots=True)
class FoundChunk(Chunk):
    """A chunk that keeps the framework's document that it was made from."""

    origin: Any = field(default=None, compare=False, repr=False)
