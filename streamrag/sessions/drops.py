"""Notify readers of dropped data, debounced."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

TOGETHER_S = 0.25
"""Drops within this time are reported together."""


@dataclass(frozen=True, slots=True)
class DataDropped:
    """Chunks were dropped before they came into the prompt, because the engine could not keep up."""

    num_chunks: int
    """Chunks dropped since the reader's last event."""
    from_version: int
    """Version of the first of them."""
    to_version: int
    """Version of the last of them. Some chunks in between may not have been dropped."""
    num_dropped: int
    """All chunks dropped since the session began."""


@dataclass(eq=False)
class _Reader:
    """The drops that were not reported to one reader yet."""

    num_chunks: int = 0
    first: int = 0
    last: int = 0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class Drops:
    """The drops of one session, for any number of readers."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []
        self._num_dropped = 0
        self._has_ended = asyncio.Event()

    def put(self, number: int, num_dropped: int) -> None:
        """Add the dropped chunk of this number to the next event of each reader; `num_dropped` were dropped in all."""
        self._num_dropped = num_dropped
        for reader in self._readers:
            reader.first = reader.first if reader.num_chunks else number
            reader.last = number
            reader.num_chunks += 1
            reader.has_news.set()

    def end(self) -> None:
        """End all readers, once they have received what was dropped."""
        self._has_ended.set()
        for reader in self._readers:
            reader.has_news.set()

    async def read(self) -> AsyncGenerator[DataDropped, None]:
        """Yield one event for all drops since the last event, `TOGETHER_S` after the first of them, from now on. After
        `end`, yield the rest at once, and stop."""
        reader = _Reader()
        self._readers.append(reader)
        try:
            while reader.num_chunks or not self._has_ended.is_set():
                await reader.has_news.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOGETHER_S):
                        await self._has_ended.wait()
                if reader.num_chunks:
                    event = DataDropped(reader.num_chunks, reader.first, reader.last, self._num_dropped)
                    reader.num_chunks = 0
                    reader.has_news.clear()
                    yield event
        finally:
            self._readers.remove(reader)
