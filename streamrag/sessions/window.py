"""The data of a session: a buffer of chunks that wait, and the window of chunks in the prompt."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from streamrag.core import Chunk
from streamrag.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Numbered:
    """A chunk and its number, counted from 1 in the order of appending."""

    number: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class WindowChunk:
    """The tokens of a chunk in the prompt."""

    number: int
    token_ids: tuple[int, ...]


def num_characters(chunk: Chunk) -> int:
    """Return the number of characters of a chunk's text, uri and title together."""
    return len(chunk.text) + len(chunk.uri) + len(chunk.title)


class Buffer:
    """A bounded queue of chunks that wait for the engine. When it is full, the oldest chunks are dropped.

    on_drop: called with the number of each dropped chunk, after it is counted.
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
        """Whether at least half of its chunks or of its characters are in use."""
        return 2 * len(self._waiting) >= self._max_chunks or 2 * self._num_characters >= self._max_characters

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise ConfigurationError if `chunks` alone exceed the buffer's limits. A single chunk always fits."""
        num = sum(map(num_characters, chunks))
        if len(chunks) > self._max_chunks or (len(chunks) > 1 and num > self._max_characters):
            raise ConfigurationError(
                f"{len(chunks):,} chunks of {num:,} characters are more than may wait at once, {self._max_chunks:,} of "
                f"{self._max_characters:,}: append them in parts"
            )

    def append(self, chunk: Chunk) -> int:
        """Append a chunk and return its number, dropping the oldest others while a limit is exceeded."""
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

    def skip_number(self) -> int:
        """Return the next number, so that no chunk gets it."""
        self.num_appended += 1
        return self.num_appended

    def take(self, max_chunks: int, to: int = 0) -> list[Numbered]:
        """Remove and return the oldest `max_chunks`, or all up to the number `to` if these are more, in order."""
        batch: list[Numbered] = []
        while self._waiting and (len(batch) < max_chunks or self._waiting[0].number <= to):
            batch.append(self._waiting.popleft())
        self._num_characters -= sum(num_characters(each.chunk) for each in batch)
        return batch


class Window:
    """A sliding window of the newest data, up to a number of tokens.

    It grows at its end. When it is full, it slides: a large share at its beginning is removed at once, and the rest
    must be computed again because its positions move. With a share s that is (1 - s) / s computed tokens for each new
    one: 1 with a half, 9 with a tenth. The content depends on the pieces only, not on how they are batched.

    slide_share: share of `max_tokens` that is free after a slide.
    end: tokens that a piece still ends with after it is cut, such as its line break.
    """

    def __init__(self, max_tokens: int, slide_share: float, end: tuple[int, ...] = ()) -> None:
        self.max_tokens = max_tokens
        self._end = end
        self._kept_tokens = max(int(max_tokens * (1 - slide_share)), 1)
        self._pieces: deque[WindowChunk] = deque()
        self._token_ids: list[int] = []
        self.num_slid = 0
        """Pieces that were removed by slides."""

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of all pieces, in order."""
        return tuple(self._token_ids)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest piece; None if there is none."""
        return self._pieces[0].number if self._pieces else None

    def newest(self, behind: int, most: int) -> list[WindowChunk]:
        """Return the last `most` pieces with numbers over `behind`, in order."""
        newer = takewhile(lambda piece: piece.number > behind, reversed(self._pieces))
        return list(islice(newer, most))[::-1]

    def add(self, pieces: Iterable[WindowChunk]) -> bool:
        """Add the pieces that have tokens, cut to what a slide keeps, and return whether the window has slid."""
        has_slid = False
        for piece in pieces:
            cut = WindowChunk(piece.number, self._cut(piece.token_ids))
            if cut.token_ids:  # pieces without tokens would never be pushed out
                self._pieces.append(cut)
                self._token_ids += cut.token_ids
            if len(self._token_ids) > self.max_tokens:
                self._slide()
                has_slid = True
        return has_slid

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens, or if they are more than a slide keeps, their beginning followed by `end` if that fits."""
        if len(token_ids) <= self._kept_tokens:
            return token_ids
        end = self._end if len(self._end) < self._kept_tokens else ()
        return token_ids[: self._kept_tokens - len(end)] + end

    def _slide(self) -> None:
        """Remove the oldest pieces, counting them in `num_slid`, until at most `_kept_tokens` tokens are left."""
        num_gone = 0
        while len(self._token_ids) - num_gone > self._kept_tokens:
            num_gone += len(self._pieces.popleft().token_ids)
            self.num_slid += 1
        del self._token_ids[:num_gone]
