"""Data that was appended and is not in the window yet."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamrag.core import Chunk
from streamrag.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Numbered:
    """The chunk that was appended as the so-manieth, from 1."""

    number: int
    chunk: Chunk


def num_characters(chunk: Chunk) -> int:
    """Of all its texts, which are what it takes."""
    return len(chunk.text) + len(chunk.uri) + len(chunk.title)


class Buffer:
    """Holds at most so many chunks and characters. What is oldest is dropped for what is new, and counted.

    on_drop: called with the number of each that is dropped, once it is counted.
    """

    def __init__(
        self, max_chunks: int, max_characters: int, on_drop: Callable[[int], None] = lambda number: None
    ) -> None:
        self._on_drop = on_drop
        self._max_chunks = max_chunks
        self._max_characters = max_characters
        self._waiting: deque[Numbered] = deque()
        self._num_characters = 0
        self.num_appended = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_half_full(self) -> bool:
        """Whether half of what may wait does."""
        return 2 * len(self._waiting) >= self._max_chunks or 2 * self._num_characters >= self._max_characters

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Whether so much may wait at once: one chunk may, whatever its length.

        :raises ConfigurationError: some would be dropped for others of them.
        """
        num = sum(map(num_characters, chunks))
        if len(chunks) > self._max_chunks or (len(chunks) > 1 and num > self._max_characters):
            raise ConfigurationError(
                f"{len(chunks):,} chunks of {num:,} characters are more than may wait at once, {self._max_chunks:,} of "
                f"{self._max_characters:,}: append them in parts"
            )

    def append(self, chunk: Chunk) -> int:
        """Its number."""
        self.num_appended += 1
        self._waiting.append(Numbered(self.num_appended, chunk))
        self._num_characters += num_characters(chunk)
        while len(self._waiting) > 1 and (
            len(self._waiting) > self._max_chunks or self._num_characters > self._max_characters
        ):
            dropped = self._waiting.popleft()
            self._num_characters -= num_characters(dropped.chunk)
            self.num_dropped += 1
            self._on_drop(dropped.number)
        return self.num_appended

    def skip(self) -> int:
        """A number that is no chunk's."""
        self.num_appended += 1
        return self.num_appended

    def take(self, max_chunks: int, to: int = 0) -> list[Numbered]:
        """The oldest, in order, so many or all up to this number, if these are more; they are no longer here."""
        taken: list[Numbered] = []
        while self._waiting and (len(taken) < max_chunks or self._waiting[0].number <= to):
            taken.append(self._waiting.popleft())
        self._num_characters -= sum(num_characters(each.chunk) for each in taken)
        return taken
