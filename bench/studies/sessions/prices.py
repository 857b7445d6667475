"""What studies of sessions ask about: samples of prices and six questions, as in arXiv 2605.13784, section 4."""

import random
import re
from collections.abc import Sequence

from streamrag.core import Turn, plain_chat

NUM_FIRST, NUM_MORE = 100, 55
"""Samples before the first cycle, and in each."""
QUESTIONS = (
    "Is the price rising?",
    "Is volatility rising?",
    "What was the highest price of the last ten samples?",
    "Is volume above its mean?",
    "Did the last sample close below its open?",
    "What is the trend over all samples?",
)


def samples(num: int) -> list[str]:
    """Prices: number, open, high, low, close, volume."""
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
