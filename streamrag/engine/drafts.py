"""Choose which tokens to verify next while an answer is sampled: those of a draft, or of the prompt that it quotes.

    draft     the cat sat on the mat and slept
    answer    the cat sat in the hall . It sat on the      lost at "in", found again by "sat on the"
    next                                              mat and slept

Any tokens may be proposed for verification: what the model would not have sampled is rejected. A good choice only saves
steps.
"""

from collections.abc import Sequence
from typing import Any

NUM_ANCHOR = 3
"""Tokens at the end of an answer by which its place in a text is found again: with two, many are found wrongly."""

WEIGHT = 0.1
"""Weight of the newest answer in the share of drafted tokens that hold."""

LEAST_DEPTH = 4
"""Tokens to verify at once after the answer has left a text; twice as many whenever all of them hold."""

_TOKEN_BITS = 21  # three token ids fit into a key of 64 bits; no vocabulary has two million tokens


class AnswerDraft:
    """A draft of one answer, the prompt that the answer may quote, and the place in them that the answer has reached.

    token_ids: the tokens that the answer may consist of.
    max_depth: the most tokens to verify in one step.
    prompt: the tokens to search where the answer does not follow the draft. Read only, and never copied as a list.
    """

    def __init__(self, token_ids: Sequence[int], max_depth: int, prompt: Sequence[int] = ()) -> None:
        self._depth = self._max_depth = max_depth
        self._draft, self._prompt = _Text(token_ids), _Text(prompt)
        self._text: _Text | None = self._draft  # that the answer follows; None while the answer is lost
        self._num_read = 0
        self._num_proposed = 0

    def next_tokens(self, answer: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens to verify next: few once `answer` left a text, more if all hold, none if lost."""
        num_before = self._num_read
        num_left = self._follow(answer)
        if num_left:
            self._depth = min(LEAST_DEPTH, self._max_depth)
        elif 0 < self._num_proposed < len(answer) - num_before:
            self._depth = min(2 * self._depth, self._max_depth)
        tokens = [] if self._text is None else self._text.next_tokens(max(min(self._depth, most), 0))
        self._num_proposed = len(tokens)
        return tokens

    @property
    def is_empty(self) -> bool:
        """Whether there is only the prompt to copy from."""
        return not self._draft.rest and not self._draft.place

    @property
    def is_copying(self) -> bool:
        """Whether the last tokens to verify were those of the prompt."""
        return self._text is self._prompt

    def continue_from(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return `answer` and the rest of the draft behind the place that the answer has reached."""
        self._follow(answer)
        return (*answer, *(self._draft.rest if self._text is self._draft else ()))

    def _follow(self, answer: Sequence[int]) -> int:
        """Follow `answer`'s new tokens, or all of a shorter one; find lost places; return how often it got lost."""
        if len(answer) < self._num_read:
            self._text, self._num_read, self._num_proposed = self._draft, 0, 0
            self._draft.place = self._prompt.place = 0
        num_left = 0
        for end in range(self._num_read + 1, len(answer) + 1):
            if self._text is None or not self._text.follow(answer[end - 1]):
                num_left += self._text is not None
                anchor = answer[max(end - NUM_ANCHOR, 0) : end]
                self._text = next((text for text in (self._draft, self._prompt) if text.find(anchor)), None)
        self._num_read = len(answer)
        return num_left


class _Text:
    """A text that an answer may repeat. `place` is that of the token which the answer should have next."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.place = 0
        self._tokens = token_ids
        self._keys: Any = None  # of all runs of `NUM_ANCHOR` tokens, sorted
        self._ends: Any = None  # of these runs in the text

    @property
    def rest(self) -> Sequence[int]:
        return self._tokens[self.place :]

    def next_tokens(self, most: int) -> list[int]:
        return list(self._tokens[self.place : self.place + most])

    def follow(self, token: int) -> bool:
        """Move by one token, if that is the next one in the text. Return False if it is not."""
        is_next = self.place < len(self._tokens) and self._tokens[self.place] == token
        self.place += is_next
        return is_next

    def find(self, anchor: Sequence[int]) -> bool:
        """Move behind the next run of the `NUM_ANCHOR` tokens `anchor`, or else behind the first run.

        Return False, and stay, if there is none, or if `anchor` is shorter, as at the beginning of an answer. A search
        takes microseconds in a text of any length; the first one sorts the text's runs of tokens.
        """
        if len(anchor) < NUM_ANCHOR or len(self._tokens) < NUM_ANCHOR:
            return False
        if self._keys is None:
            self._sort()
        key = _key(*anchor)
        first = int(self._keys.searchsorted(key))
        if first == len(self._keys) or int(self._keys[first]) != key:
            return False
        ends = self._ends[first : int(self._keys.searchsorted(key, "right"))]  # in the order of the text
        nearest = int(ends.searchsorted(self.place, "right"))
        self.place = int(ends[nearest if nearest < len(ends) else 0])
        return True

    def _sort(self) -> None:
        """Compute the sorted keys of all runs of `NUM_ANCHOR` tokens, and where in the text each run ends."""
        import numpy as np

        tokens = np.asarray(self._tokens, dtype=np.int64)
        keys = _key(tokens[:-2], tokens[1:-1], tokens[2:])
        order = np.argsort(keys, kind="stable")
        self._keys, self._ends = keys[order], order + NUM_ANCHOR


def _key(first: Any, second: Any, third: Any) -> Any:
    """Return a number that no other run of three tokens has."""
    return first << 2 * _TOKEN_BITS | second << _TOKEN_BITS | third


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
        return min(self._num_accepted / max(self._num_drafted, 1.0), 1.0)
