"""A source that does not end before its question is committed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from streamrag.core import Source, SourceEvent, part_name
from streamrag.query.retrieval import Retrieval


class HeldSource:
    """A source whose retrieval ends with `committed`, and not before: until then its query has no complete prompt.

    An error of the source is raised then too, when somebody reads the answer.
    """

    def __init__(self, source: Source) -> None:
        self.name = part_name(source)
        self.committed = asyncio.Event()
        self._source = source

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Yield the events of the source, and return once the question is committed."""
        failure: Exception | None = None
        try:
            async with aclosing(Retrieval(self._source, query).events()) as events:
                async for event in events:
                    yield event
        except Exception as error:
            failure = error
        await self.committed.wait()
        if failure is not None:
            raise failure
