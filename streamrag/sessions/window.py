"""The data that a session's prompt holds: the newest, up to so many tokens."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of data as it stands in the prompt."""

    number: int
    token_ids: tuple[int, ...]


class Window:
    """Grows at its end. When it is full, its oldest part goes in one large step.

    All positions behind what goes move, so all that stays has to be computed anew: with a share s of the window going
    at a time, (1 - s) / s tokens for each that comes. Half of it going is one token for each, a tenth nine.

    What it holds follows from the pieces alone, not from how many come at once.

    max_tokens: of the data.
    slide_share: share of `max_tokens` that is free after a step.
    end: what a piece that is cut ends with all the same, such as its line break.
    """

    def __init__(self, max_tokens: int, slide_share: float, end: tuple[int, ...] = ()) -> None:
        self.max_tokens = max_tokens
        self._end = end
        self._kept_tokens = max(int(max_tokens * (1 - slide_share)), 1)
        self._pieces: deque[Piece] = deque()
        self._token_ids: list[int] = []
        self.num_slid = 0
        """Pieces that have gone."""

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, pieces: Iterable[Piece]) -> bool:
        """Whether the oldest had to go for them. Of a piece that is longer than what is kept, its end goes."""
        has_slid = False
        for piece in pieces:
            cut = Piece(piece.number, self._cut(piece.token_ids))
            if cut.token_ids:  # of those without, nothing would ever push any out
                self._pieces.append(cut)
                self._token_ids += cut.token_ids
            if len(self._token_ids) > self.max_tokens:
                self._slide()
                has_slid = True
        return has_slid

    def _cut(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if len(token_ids) <= self._kept_tokens:
            return token_ids
        end = self._end if len(self._end) < self._kept_tokens else ()
        return token_ids[: self._kept_tokens - len(end)] + end

    def _slide(self) -> None:
        num_gone = 0
        while len(self._token_ids) - num_gone > self._kept_tokens:
            num_gone += len(self._pieces.popleft().token_ids)
            self.num_slid += 1
        del self._token_ids[:num_gone]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of all pieces, in order."""
        return tuple(self._token_ids)

    def newest(self, behind: int, most: int) -> list[Piece]:
        """Pieces behind the one of this number, in order; the last of them, if there are more."""
        newer = takewhile(lambda piece: piece.number > behind, reversed(self._pieces))
        return list(islice(newer, most))[::-1]

    @property
    def oldest(self) -> int | None:
        """Number of the oldest piece."""
        return self._pieces[0].number if self._pieces else None
