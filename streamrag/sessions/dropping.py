"""Telling of data that were dropped: some at a time, to whoever wants to know."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

TOGETHER_S = 0.25
"""What is dropped within that time is told of as one."""


@dataclass(frozen=True, slots=True)
class DataDropped:
    """Chunks that never came into the prompt: more came than the engine could take in."""

    num_chunks: int
    """How many, since a reader was told last."""
    from_version: int
    to_version: int
    """Those of the first and the last of them; some between may have been taken in."""
    num_dropped: int
    """All, since the session began."""


class _Reader:
    """What one reader has not been told of yet."""

    def __init__(self) -> None:
        self.num_chunks = self.first = self.last = 0
        self.has_news = asyncio.Event()


class Drops:
    """Those of one session."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []
        self._num_dropped = 0
        self._has_ended = asyncio.Event()

    def put(self, number: int, num_dropped: int) -> None:
        """Tell readers that the chunk of this number was dropped, one of so many."""
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
        """Yield what is dropped from now on, within some time each, up to the end."""
        reader = _Reader()
        self._readers.append(reader)
        try:
            while reader.num_chunks or not self._has_ended.is_set():
                await reader.has_news.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOGETHER_S):
                        await self._has_ended.wait()
                if reader.num_chunks:
                    told = DataDropped(reader.num_chunks, reader.first, reader.last, self._num_dropped)
                    reader.num_chunks = 0
                    reader.has_news.clear()
                    yield told
        finally:
            self._readers.remove(reader)
