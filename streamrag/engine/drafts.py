"""Choose which tokens of a draft to verify next, while the answer is sampled.

    draft     the cat sat on the mat and slept
    answer    the cat sat in the hall . It sat on the      lost at "in", found again by "sat on the"
    next                                              mat and slept

Any tokens may be proposed for verification: what the model would not have sampled is rejected. A good choice only saves
steps.
"""

from collections.abc import Sequence

NUM_ANCHOR = 3
"""Tokens at the end of an answer by which its place in a draft is found again: with two, many are found wrongly."""

WEIGHT = 0.1
"""Weight of the newest answer in the share of drafted tokens that hold."""

LEAST_DEPTH = 4
"""Tokens to verify at once after the answer has left the draft; twice as many whenever all of them hold."""


class AnswerDraft:
    """A draft of one answer, and the place in it that the answer has reached.

    token_ids: the tokens that the answer may consist of.
    max_depth: the most tokens to verify in one step.
    """

    def __init__(self, token_ids: Sequence[int], max_depth: int) -> None:
        self._tokens = tuple(token_ids)
        self._depth = self._max_depth = max_depth
        self._place: int | None = 0  # of the token that the answer should have next; None while the answer is lost
        self._num_read = 0
        self._num_proposed = 0
        self._ends: dict[tuple[int, ...], list[int]] | None = None

    def next_tokens(self, answer: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow `answer`, which has grown since the last call, or begun anew."""
        num_before = self._num_read
        num_left = self._follow(answer)
        if num_left:
            self._depth = min(LEAST_DEPTH, self._max_depth)
        elif 0 < self._num_proposed < len(answer) - num_before:
            self._depth = min(2 * self._depth, self._max_depth)
        tokens = list(self.rest[: max(min(self._depth, most), 0)])
        self._num_proposed = len(tokens)
        return tokens

    def continue_from(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return `answer` and the rest of the draft behind the place that the answer has reached."""
        self._follow(answer)
        return (*answer, *self.rest)

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens of the draft behind the place that the answer has reached; empty while the answer is lost."""
        return () if self._place is None else self._tokens[self._place :]

    def _follow(self, answer: Sequence[int]) -> int:
        """Read the new tokens of `answer`. Return how often it left the draft."""
        if len(answer) < self._num_read:
            self._place, self._num_read, self._num_proposed = 0, 0, 0
        num_left = 0
        for end in range(self._num_read + 1, len(answer) + 1):
            place = self._place
            if place is not None and self._tokens[place : place + 1] == (answer[end - 1],):
                self._place = place + 1
                continue
            num_left += place is not None and place < len(self._tokens)
            self._place = self._find(tuple(answer[max(end - NUM_ANCHOR, 0) : end]), place or 0)
        self._num_read = len(answer)
        return num_left

    def _find(self, anchor: tuple[int, ...], place: int) -> int | None:
        """Return the place behind `anchor` in the draft, the first one after `place` if any; None without one."""
        if self._ends is None:
            self._ends = {}
            for end in range(NUM_ANCHOR, len(self._tokens) + 1):
                self._ends.setdefault(self._tokens[end - NUM_ANCHOR : end], []).append(end)
        ends = self._ends.get(anchor, [])
        return next((end for end in ends if end > place), ends[0] if ends else None)


class DraftSurvival:
    """The share of drafted tokens that answers take over, learned from the requests that end. One half at first."""

    def __init__(self) -> None:
        self._num_drafted, self._num_accepted = 32.0, 16.0

    def on_draft(self, num_tokens: int) -> None:
        """Record that a draft ended for which `num_tokens` were sampled."""
        self._num_drafted += num_tokens

    def on_answer(self, num_accepted: int) -> None:
        """Record that an answer ended that took over `num_accepted` tokens of its draft."""
        self._num_accepted = (1 - WEIGHT) * (self._num_accepted + num_accepted)
        self._num_drafted *= 1 - WEIGHT

    def __call__(self) -> float:
        return min(self._num_accepted / self._num_drafted, 1.0)
