"""How an answer changes with its context: a model of how good drafts are, for simulations.

    before    a a a a a b b b b c c c
    after     a a a a a x x b b b y y      a revision: the blocks that both have, as shares of their lengths

Each new context revises the answer to the one before, by a revision drawn at random, and stretched to the length of the
simulated answers. Tokens outside of the blocks are new ones. Revisions are recorded from a real model by
`record_revisions.py`, or made by the figures of an earlier recording, or always keep the whole answer.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

NUM_IN_VOCABULARY = 1_000
"""Of the simulated engine."""
LEAST_BLOCK = 3
"""Tokens that a block has at least: drafts find no shorter one again."""
RECORDED = Path(__file__).parent / "results" / "answer_revisions.json"

FIGURES = {"appended": (0.38, 0.52), "ranked": (0.42, 0.59)}
"""Share of answers that stay the same, and of tokens up to the first difference, when the last passage is appended, and
at the last stage of a search. With all that is found again, an answer took .50 and .39 steps a token."""

Retrieval: TypeAlias = Literal["appended", "ranked"]
"""Whether passages are appended, or a search replaces them by better ones."""


class Block(NamedTuple):
    """Tokens that two answers have in common, the first of them at different places."""

    before: int
    after: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Revision:
    """The change from the answer to one context to the answer to the next."""

    num_before: int
    num_after: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, before: Sequence[int], after: Sequence[int]) -> "Revision":
        """Return the revision from one answer to the next."""
        found = SequenceMatcher(None, list(before), list(after), autojunk=False).get_matching_blocks()
        blocks = [Block(*block) for block in found if block.size >= LEAST_BLOCK or (block.a == block.b == 0)]
        return cls(len(before), len(after), tuple(block for block in blocks if block.num_tokens))

    @property
    def is_whole(self) -> bool:
        """Whether the answer stays the same."""
        return self.prefix == 1.0

    @property
    def prefix(self) -> float:
        """Share of the new answer's tokens up to the first difference."""
        shared = next((block.num_tokens for block in self.blocks if block.before == block.after == 0), 0)
        return shared / self.num_after

    def apply(self, answer: Sequence[int], rng: random.Random) -> list[int]:
        """Return the revised answer, which is as long as before."""
        num = len(answer)
        if self.is_whole:
            return list(answer)
        revised = rng.choices(range(2, NUM_IN_VOCABULARY), k=num)
        for block in self.blocks:
            source, place = round(block.before / self.num_before * num), round(block.after / self.num_after * num)
            copied = answer[source : source + round(block.num_tokens / self.num_after * num)]
            revised[place : place + len(copied)] = copied[: num - place]
        return revised


KEPT = Revision(1, 1, (Block(0, 0, 1),))
"""The answer stays as it was."""


def recorded(retrieval: Retrieval, path: Path = RECORDED) -> list[Revision]:
    """Return the revisions recorded from a real model."""
    rows = json.loads(path.read_text())["revisions"][retrieval]
    return [Revision(row["before"], row["after"], tuple(Block(*block) for block in row["blocks"])) for row in rows]


def by_figures(retrieval: Retrieval, num: int = 200) -> list[Revision]:
    """Return revisions with the means of an earlier recording: 24 questions, the demo's model, 28 tokens an answer.

    The first difference is near the beginning more often than near the end. One block of the rest is found again.
    """
    (whole, prefix), made = FIGURES[retrieval], [KEPT] * round(FIGURES[retrieval][0] * num)
    power = (1 - whole) / (prefix - whole) - 1  # the mean of a random number to this power is what is wanted
    num_changed = num - len(made)
    for index in range(num_changed):
        share = round(1_000 * ((index + 0.5) / num_changed) ** power)
        rest = 1_000 - share
        again = Block(share + rest // 2, share + rest // 2, rest // 6)
        made.append(Revision(1_000, 1_000, (*([Block(0, 0, share)] if share else []), again)))
    return made


class Answers:
    """The answers that a simulated model gives to the contexts of one query, in order. The query's id is the seed."""

    def __init__(self, query_id: str, num_tokens: int, revisions: Sequence[Revision]) -> None:
        self._rng = random.Random(f"answers {query_id}")
        self._revisions = revisions
        self._answer: list[int] = []
        self._num_tokens = num_tokens

    def next(self) -> list[int]:
        """Return the answer to the next context."""
        if self._answer:
            self._answer = self._rng.choice(self._revisions).apply(self._answer, self._rng)
        else:
            self._answer = self._rng.choices(range(2, NUM_IN_VOCABULARY), k=self._num_tokens)
        return self._answer
