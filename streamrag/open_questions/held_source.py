"""The sources of queries ahead, and of the answer if it uses what these have found."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from streamrag.core import Append, Chunk, Source, SourceEvent, Update, part_name
from streamrag.core.retrieval import Retrieval
from streamrag.modes.context import passage_key


class HeldSource:
    """A source whose retrieval ends with `committed`, and not before: until then its query has no complete prompt.

    An error of the source is also raised only then.
    """

    def __init__(self, source: Source) -> None:
        self.name = part_name(source)
        self.committed = asyncio.Event()
        self.chunks: list[Chunk] = []
        """The passages that it has found so far."""
        self.is_dropped = False
        """Whether its query is being stopped, and is of no interest any more."""
        self._source = source

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield the source's events and update `chunks`; wait for `committed`; then raise any error of the source."""
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


class WithFound:
    """A source whose context also has passages that were found before: in front of appended ones, behind updated ones.

    Errors of the source are raised as without them.
    """

    def __init__(self, source: Source, found: Sequence[Chunk]) -> None:
        self.name = part_name(source)
        self._source = source
        self._found = found

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Append the found passages; then yield the source's events, updates with the found passages that they lack."""
        known = {passage_key(chunk) for chunk in self._found}
        for chunk in self._found:
            yield Append(chunk)
        async with aclosing(Retrieval(self._source, query).events()) as events:
            async for event in events:
                if isinstance(event, Update):
                    own = {passage_key(chunk) for chunk in event.chunks}
                    rest = (chunk for chunk in self._found if passage_key(chunk) not in own)
                    yield replace(event, chunks=(*event.chunks, *rest))
                elif not isinstance(event, Append) or passage_key(event.chunk) not in known:
                    yield event
