"""What the study of sessions asks about: samples of prices and six questions, as in arXiv 2605.13784, section 4."""

import random
import re
from collections.abc import Sequence

from streamrag.core import Chunk, ModelInfo, Turn, plain_chat
from streamrag.sessions.prompts import SESSION_TEMPLATE, SessionPrompts
from streamrag.sessions.window import Numbered

QUESTIONS = (
    "Is the price rising?",
    "Is volatility rising?",
    "What was the highest price of the last ten samples?",
    "Is volume above its mean?",
    "Did the last sample close below its open?",
    "What is the trend over all samples?",
)


def samples(num: int) -> list[str]:
    """Return lines of prices: number, open, high, low, close, volume."""
    rng = random.Random(0)
    price, lines = 100.0, []
    for i in range(num):
        opened, price = price, price * (1 + rng.gauss(0, 0.002))
        high, low = max(opened, price) * 1.001, min(opened, price) * 0.999
        lines.append(f"{i} {opened:.1f} {high:.1f} {low:.1f} {price:.1f} {rng.randrange(1000, 9000)}")
    return lines


class ShortPieces:
    """A tokenizer for simulations: pieces of up to three letters or digits, so that a sample has about 16 tokens, as
    published. The ids mean nothing, and answers have no text."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return [self._ids.setdefault(piece, len(self._ids) + 2) for piece in re.findall(r"\s?\w{1,3}|\W", text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return plain_chat(turns)


class PromptText:
    """The very prompts that a session has."""

    def __init__(self, model: ModelInfo) -> None:
        self._prompts = SessionPrompts(model, SESSION_TEMPLATE)
        self._num_pieces = 0
        self.token_ids = self._prompts.head

    def add(self, lines: Sequence[str]) -> tuple[int, ...]:
        """Return what is new of the prompt; the first time with its head."""
        before = len(self.token_ids) if self._num_pieces else 0
        numbered = [Numbered(self._num_pieces + i + 1, Chunk(line, "")) for i, line in enumerate(lines)]
        self._num_pieces += len(lines)
        for piece in self._prompts.pieces(numbered):
            self.token_ids += piece.token_ids
        return self.token_ids[before:]

    def complete(self, question: str) -> tuple[int, ...]:
        """Return the prompt for a question."""
        return self._prompts.complete(self.token_ids, question)
