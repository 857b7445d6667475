"""Choose the chunks of a context that fit into the token budget of a prompt.

    | by arrival: whole chunks, at most a third of the budget each | late: the best of the chunks that did not fit |
    |<----------------------- three quarters --------------------->|<----- a quarter, when retrieval has ended --->|

A ranked context is taken by rank. A chunk in a prompt is never replaced by a better one, so that its KV stays valid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamrag.core import Chunk
from streamrag.modes.bounds import CHARACTERS_PER_TOKEN

PAGE_SHARE = 1 / 3  # most of the budget that one arriving chunk may take, to leave room for later ones
MIN_PAGE_TOKENS = 512  # least tokens to which a chunk is shortened while there is room: fewer rarely answer a question
MIN_LATE_TOKENS = 64  # least room for another late chunk
NUM_TRIES = 8  # attempts to shorten a chunk: each one improves the estimate of tokens per character


class RelevanceJudge(Protocol):
    """A judge of what is relevant to the question."""

    def shorten(self, text: str, max_chars: int) -> tuple[str, str]:
        """Split `text` into its most relevant parts, at most `max_chars` characters, and the rest."""

    def scores(self, chunks: Sequence[Chunk]) -> Sequence[float]:
        """Return the relevance of each chunk; larger is better."""


@dataclass(frozen=True, slots=True)
class Included:
    """A chunk in a prompt."""

    whole: Chunk
    """The chunk as it arrived."""
    part: Chunk
    """The chunk with the text that is in the prompt."""
    rest: str = ""
    """The text that is not in the prompt."""


class PassageBudget:
    """A token budget that chooses the chunks for one query.

    count: a function of a passage number and a chunk that returns its tokens.
    relevance: chooses among the chunks of an unranked context. Without it, every context is taken in order.
    reserve_fraction: share of the budget that is reserved for late chunks.
    """

    def __init__(
        self,
        max_tokens: int,
        count: Callable[[int, Chunk], int],
        relevance: RelevanceJudge | None,
        reserve_fraction: float,
    ) -> None:
        self._max_tokens = max_tokens
        self._count = count
        self._relevance = relevance
        self._late_share = reserve_fraction
        self._shortened: dict[tuple[int, Chunk, int], Included | None] = {}
        self._reset()

    def _reset(self) -> None:
        """Forget which chunks arrived, were taken and are late; set the room to the budget less the reserved share."""
        self._arrived: tuple[Chunk, ...] = ()
        self._taken: list[Included] = []
        self._waiting: list[Included] = []
        self._room = self._max_tokens - int(self._max_tokens * self._late_share)

    def by_rank(self, chunks: Sequence[Chunk]) -> list[Included]:
        """Return the chunks that fit as a whole, in order of rank. Smaller ones may follow one that does not."""
        taken: list[Included] = []
        room = self._max_tokens
        for chunk in chunks:
            num_tokens = self._count(len(taken) + 1, chunk)
            if num_tokens <= room:
                room -= num_tokens
                taken.append(Included(chunk, chunk))
        return taken

    def by_arrival(self, chunks: Sequence[Chunk], *, is_complete: bool) -> list[Included]:
        """Return the chunks that fit, in order of arrival and shortened if large; if complete, also the best others.

        What was chosen stays if `chunks` begins with those of the last call. Without a judge, return `by_rank`.
        """
        if self._relevance is None:
            return self.by_rank(chunks)
        if tuple(chunks[: len(self._arrived)]) != self._arrived:
            self._reset()
        for chunk in chunks[len(self._arrived) :]:
            self._arrive(self._relevance, chunk)
        self._arrived = tuple(chunks)
        return [*self._taken, *(self._late(self._relevance) if is_complete and self._waiting else ())]

    def _arrive(self, relevance: RelevanceJudge, chunk: Chunk) -> None:
        """Take one more chunk, shortened to `PAGE_SHARE`, and queue its rest as late; queue all if it does not fit."""
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

    def _late(self, relevance: RelevanceJudge) -> list[Included]:
        """Return all late chunks in order if they fit, else the most relevant, each shortened to an equal share."""
        taken, late = self._taken, self._waiting
        room = self._max_tokens - sum(self._count(number, each.part) for number, each in enumerate(taken, 1))
        left = room
        for number, each in enumerate(late, len(taken) + 1):
            left -= self._count(number, each.part)
            if left < 0:  # saves tokenising the others
                break
        else:
            return list(late)
        max_passage = max(room // len(late), MIN_PAGE_TOKENS)
        scores = relevance.scores([each.part for each in late])
        chosen: list[Included] = []
        for i in sorted(range(len(late)), key=lambda i: -scores[i]):
            if room < MIN_LATE_TOKENS:
                break
            number = len(taken) + len(chosen) + 1
            short = self._shorten(relevance, number, late[i].part, min(max_passage, room))
            if short and short.part.text:
                room -= self._count(number, short.part)
                chosen.append(replace(short, whole=late[i].whole))
        return chosen

    def _shorten(self, relevance: RelevanceJudge, number: int, chunk: Chunk, max_tokens: int) -> Included | None:
        """Return the chunk if it has at most `max_tokens`, else its most relevant part that does, cached; or None."""
        if self._count(number, chunk) <= max_tokens:
            return Included(chunk, chunk)
        key = (number, chunk, max_tokens)
        if key not in self._shortened:
            self._shortened[key] = self._shorten_text(relevance, number, chunk, max_tokens)
        return self._shortened[key]

    def _shorten_text(self, relevance: RelevanceJudge, number: int, chunk: Chunk, max_tokens: int) -> Included | None:
        """Return the chunk's most relevant part that fits, trying ever fewer characters `NUM_TRIES` times, or None."""
        num_heading = self._count(number, replace(chunk, text=""))
        room = max_tokens - num_heading
        num_tokens = self._count(number, chunk) - num_heading  # of a long text, a lower bound
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
