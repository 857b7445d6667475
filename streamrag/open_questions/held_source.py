"""The sources of queries ahead, and of the answer if it uses what these have found."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

from streamrag.core import Append, Chunk, Source, SourceEvent, Update, part_name
from streamrag.query.retrieval import Retrieval


class HeldSource:
    """A source whose retrieval ends with `committed`, and not before: until then its query has no complete prompt.

    An error of the source is raised then too, when somebody reads the answer.
    """

    def __init__(self, source: Source) -> None:
        self.name = part_name(source)
        self.committed = asyncio.Event()
        self.chunks: list[Chunk] = []
        """The passages that it has found so far."""
        self._source = source

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield the events of the source, and return once the question is committed."""
        failure: Exception | None = None
        try:
            async with aclosing(Retrieval(self._source, query).events()) as events:
                async for event in events:
                    match event:
                        case Append(chunk):
                            self.chunks.append(chunk)
                        case Update(chunks):
                            self.chunks = list(chunks)
                    yield event
        except Exception as error:
            failure = error
        await self.committed.wait()
        if failure is not None:
            raise failure


class FoundPassages:
    """A source of passages that were found before, which arrive at once."""

    name = "found before the commit"

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = tuple(chunks)

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Append each passage; the question does not matter."""
        for chunk in self._chunks:
            yield Append(chunk)
