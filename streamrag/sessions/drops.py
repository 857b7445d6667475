"""News of data that were dropped, for readers: the drops of some time as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

TOGETHER_S = 0.25
"""Drops within this time are told of as one."""


@dataclass(frozen=True, slots=True)
class DataDropped:
    """Chunks that never came into the prompt: more came than the engine could take in."""

    num_chunks: int
    """Chunks dropped since a reader was told last."""
    from_version: int
    to_version: int
    """Versions of the first and the last of them; some between may have been taken in."""
    num_dropped: int
    """All chunks dropped since the session began."""


@dataclass(eq=False)
class _Reader:
    """The drops that one reader has not been told of yet."""

    num_chunks: int = 0
    first: int = 0
    last: int = 0
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class Drops:
    """The drops of one session, and who reads of them."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []
        self._num_dropped = 0
        self._has_ended = asyncio.Event()

    def put(self, number: int, num_dropped: int) -> None:
        """Tell readers that the chunk of this number was dropped, the `num_dropped`-th of all."""
        self._num_dropped = num_dropped
        for reader in self._readers:
            reader.first = reader.first if reader.num_chunks else number
            reader.last = number
            reader.num_chunks += 1
            reader.has_news.set()

    def end(self) -> None:
        """Tell readers that there will be no more."""
        self._has_ended.set()
        for reader in self._readers:
            reader.has_news.set()

    async def read(self) -> AsyncGenerator[DataDropped, None]:
        """Yield drops from now on up to the end."""
        reader = _Reader()
        self._readers.append(reader)
        try:
            while reader.num_chunks or not self._has_ended.is_set():
                await reader.has_news.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOGETHER_S):
                        await self._has_ended.wait()
                if reader.num_chunks:
                    news = DataDropped(reader.num_chunks, reader.first, reader.last, self._num_dropped)
                    reader.num_chunks = 0
                    reader.has_news.clear()
                    yield news
        finally:
            self._readers.remove(reader)
