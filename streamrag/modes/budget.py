"""Choose the chunks of a context that go into a prompt that has no room for all of them.

    | by arrival: whole chunks, at most a third of the budget each | late: the best of what there was no room for |
    |<----------------------- three quarters --------------------->|<---- a quarter, when retrieval has ended --->|

A ranked context is simply taken by rank. Nothing that is in a prompt ever leaves it for something better, so that KV
stays valid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamrag.core import Chunk
from streamrag.modes.bounds import CHARACTERS_PER_TOKEN

PAGE_SHARE = 1 / 3
"""Share of the budget for one chunk that arrives: the first must not leave out all that come later."""
MIN_PAGE_TOKENS = 512
"""A chunk is not shortened to fewer tokens while there is room: less hardly answers anything."""
MIN_LATE_TOKENS = 64
"""With room for fewer tokens, nothing more is looked for."""
NUM_TRIES = 8
"""Attempts to shorten a chunk: the number of tokens in a text is a guess, which each attempt improves."""


class Relevance(Protocol):
    """Judges what matters to the question."""

    def shorten(self, text: str, max_chars: int) -> tuple[str, str]:
        """The parts of `text` that matter most, at most `max_chars` of them, and the rest."""

    def scores(self, chunks: Sequence[Chunk]) -> Sequence[float]:
        """Return how much each chunk matters; larger is better."""


@dataclass(frozen=True, slots=True)
class Included:
    """A chunk in a prompt."""

    whole: Chunk
    """The chunk as it arrived."""
    part: Chunk
    """The part of it that is in the prompt."""
    rest: str = ""
    """The text of it that is not in the prompt."""


class Budget:
    """Chooses chunks for one query. `count(number, chunk)` gives the tokens of a chunk as the passage of that number.

    Without `relevance` every context is taken in its order.
    """

    def __init__(
        self, max_tokens: int, count: Callable[[int, Chunk], int], relevance: Relevance | None, late_share: float
    ) -> None:
        self._max_tokens = max_tokens
        self._count = count
        self._relevance = relevance
        self._late_share = late_share
        self._shortened: dict[tuple[int, Chunk, int], Included | None] = {}
        self._forget()

    def _forget(self) -> None:
        self._arrived: tuple[Chunk, ...] = ()
        self._taken: list[Included] = []
        self._waiting: list[Included] = []
        self._room = self._max_tokens - int(self._max_tokens * self._late_share)

    def by_rank(self, chunks: Sequence[Chunk]) -> list[Included]:
        """The chunks that fit as a whole; earlier ones go first."""
        taken: list[Included] = []
        room = self._max_tokens
        for chunk in chunks:
            num_tokens = self._count(len(taken) + 1, chunk)
            if num_tokens <= room:
                room -= num_tokens
                taken.append(Included(chunk, chunk))
        return taken

    def by_arrival(self, chunks: Sequence[Chunk], *, is_complete: bool) -> list[Included]:
        """The chunks that fit, as they arrived, larger ones shortened; and once all have come, the best of the rest."""
        if self._relevance is None:
            return self.by_rank(chunks)
        if tuple(chunks[: len(self._arrived)]) != self._arrived:
            self._forget()
        for chunk in chunks[len(self._arrived) :]:
            self._arrive(self._relevance, chunk)
        self._arrived = tuple(chunks)
        taken, late = self._taken, self._waiting
        return [*taken, *self._late(self._relevance, taken, late)] if is_complete and late else list(taken)

    def _arrive(self, relevance: Relevance, chunk: Chunk) -> None:
        """Take one more chunk, or let it wait. Earlier chunks are not looked at again."""
        number = len(self._taken) + 1
        short = self._shorten(relevance, number, chunk, max(int(self._max_tokens * PAGE_SHARE), MIN_PAGE_TOKENS))
        num_tokens = self._count(number, short.part) if short else 0
        if short is None or num_tokens > self._room:
            self._waiting.append(Included(chunk, chunk))
            return
        self._room -= num_tokens
        self._taken.append(short)
        if short.rest:
            self._waiting.append(Included(chunk, replace(chunk, text=short.rest)))

    def _late(self, relevance: Relevance, taken: Sequence[Included], late: Sequence[Included]) -> list[Included]:
        """Return what fits of `late` after `taken`: all in order, or the best, each with its share of the room."""
        room = self._max_tokens - sum(self._count(number, each.part) for number, each in enumerate(taken, 1))
        left = room
        for number, each in enumerate(late, len(taken) + 1):
            left -= self._count(number, each.part)
            if left < 0:  # what comes after it need not be tokenised under a new number
                break
        else:
            return list(late)
        max_passage = max(room // len(late), MIN_PAGE_TOKENS)
        scores = relevance.scores([each.part for each in late])
        found: list[Included] = []
        for i in sorted(range(len(late)), key=lambda i: -scores[i]):
            if room < MIN_LATE_TOKENS:
                break
            number = len(taken) + len(found) + 1
            short = self._shorten(relevance, number, late[i].part, min(max_passage, room))
            if short and short.part.text:
                room -= self._count(number, short.part)
                found.append(replace(short, whole=late[i].whole))
        return found

    def _shorten(self, relevance: Relevance, number: int, chunk: Chunk, max_tokens: int) -> Included | None:
        """The chunk, or its most relevant part if its passage has over `max_tokens`; None if none is small enough."""
        if self._count(number, chunk) <= max_tokens:
            return Included(chunk, chunk)
        key = (number, chunk, max_tokens)
        if key not in self._shortened:
            self._shortened[key] = self._shortened_to(relevance, number, chunk, max_tokens)
        return self._shortened[key]

    def _shortened_to(self, relevance: Relevance, number: int, chunk: Chunk, max_tokens: int) -> Included | None:
        num_heading = self._count(number, replace(chunk, text=""))
        room = max_tokens - num_heading
        num_tokens = self._count(number, chunk) - num_heading  # of a long text, only those of its beginning
        max_chars = min(len(chunk.text) * room / num_tokens, CHARACTERS_PER_TOKEN * room) if num_tokens > 0 else 0.0
        for _ in range(NUM_TRIES):
            if max_chars < 1:
                break
            text, rest = relevance.shorten(chunk.text, int(max_chars))
            short = Included(chunk, replace(chunk, text=text), rest)
            num_tokens = self._count(number, short.part) - num_heading
            if num_tokens <= room:
                return short if text else None
            max_chars = min(0.8 * max_chars, 0.95 * len(text) * room / num_tokens)
        return None
