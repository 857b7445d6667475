"""Telling of data that were dropped: some at a time, to whoever wants to know."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class DropReader:
    """What one reader has not been told of yet."""

    def __init__(self) -> None:
        self._num_chunks = self._first = self._last = self._num_dropped = 0
        self._has_news = asyncio.Event()
        self._has_ended = asyncio.Event()

    def put(self, number: int, num_dropped: int) -> None:
        """The chunk of this number was dropped."""
        if not self._num_chunks:
            self._first = number
            self._has_news.set()
        self._num_chunks += 1
        self._last, self._num_dropped = number, num_dropped

    def end(self) -> None:
        """There will be no more."""
        self._has_ended.set()
        self._has_news.set()

    async def next(self) -> DataDropped | None:
        """What was dropped, within some time; None at the end."""
        await self._has_news.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(TOGETHER_S):
                await self._has_ended.wait()
        if not self._num_chunks:
            return None
        told = DataDropped(self._num_chunks, self._first, self._last, self._num_dropped)
        self._num_chunks = 0
        if not self._has_ended.is_set():
            self._has_news.clear()
        return told


class Drops:
    """Those of one session."""

    def __init__(self) -> None:
        self._readers: list[DropReader] = []
        self._has_ended = False

    def put(self, number: int, num_dropped: int) -> None:
        """The chunk of this number was dropped, one of so many."""
        for reader in self._readers:
            reader.put(number, num_dropped)

    def end(self) -> None:
        """There will be no more."""
        self._has_ended = True
        for reader in self._readers:
            reader.end()

    @contextmanager
    def reading(self) -> Iterator[DropReader]:
        """A reader of those that come from now on."""
        reader = DropReader()
        self._readers.append(reader)
        if self._has_ended:
            reader.end()
        try:
            yield reader
        finally:
            self._readers.remove(reader)
