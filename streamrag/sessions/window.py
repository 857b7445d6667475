"""The data that a session's prompt holds: the newest, up to so many tokens."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of data as it stands in the prompt."""

    number: int
    token_ids: tuple[int, ...]


class Window:
    """Grows at its end. When it is full, its oldest part goes in one large step.

    All positions behind what goes move, so all that stays has to be computed anew: with a share s of the window going
    at a time, (1 - s) / s tokens for each that comes. Half of it going is one token for each, a tenth nine.

    max_tokens: of the data.
    slide_share: share of `max_tokens` that is free after a step.
    """

    def __init__(self, max_tokens: int, slide_share: float) -> None:
        self.max_tokens = max_tokens
        self._kept_tokens = max(int(max_tokens * (1 - slide_share)), 1)
        self._pieces: deque[Piece] = deque()
        self._token_ids: list[int] = []
        self.num_slid = 0
        """Pieces that have gone."""

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, pieces: Iterable[Piece]) -> bool:
        """Whether the oldest had to go for them. Of a piece that is longer than what is kept, its end goes."""
        for piece in pieces:
            cut = Piece(piece.number, piece.token_ids[: self._kept_tokens])
            if cut.token_ids:  # of those without, nothing would ever push any out
                self._pieces.append(cut)
                self._token_ids += cut.token_ids
        if len(self._token_ids) <= self.max_tokens:
            return False
        num_gone = 0
        while len(self._token_ids) - num_gone > self._kept_tokens:
            num_gone += len(self._pieces.popleft().token_ids)
            self.num_slid += 1
        del self._token_ids[:num_gone]
        return True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of all pieces, in order."""
        return tuple(self._token_ids)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest piece."""
        return self._pieces[0].number if self._pieces else None
