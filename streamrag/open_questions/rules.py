"""Rules that say how long a partial question must last before it is worth a retrieval."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from streamrag.core.text import STOP_WORDS, words
from streamrag.support.validation import SecondsOrZero, validated

QuestionRule: TypeAlias = Callable[[str, str], float | None]
"""A function of the question so far, and of the one that was last retrieved for or "". It returns the seconds for which
the question must not change before its own retrieval begins, or None for never."""


def content_words(text: str) -> frozenset[str]:
    """Return the words that name something, in lower case.

    >>> sorted(content_words("How do I cancel a task"))
    ['cancel', 'task']
    """
    return frozenset(words(text)) - STOP_WORDS


@validated
@dataclass(frozen=True, slots=True)
class WaitForWords:
    """A rule that waits for twice as many content words, or for a pause.

    A question of n words has about log2(n) retrievals while it grows, and one at each pause.

    settle_s: seconds for which a question must last that has twice as many content words as the last one, at least
        two, or other ones.
    pause_s: seconds for which any other question must last.

    >>> rule = WaitForWords(settle_s=0.3, pause_s=1.0)
    >>> rule("how do I", ""), rule("how do I cancel", ""), rule("how do I cancel a task", "how do I cancel")
    (None, 1.0, 0.3)
    >>> rule("how do I cancel a task gr", "how do I cancel a task"), rule("tasks", "tasks")
    (1.0, None)
    """

    settle_s: SecondsOrZero = 0.3
    pause_s: SecondsOrZero = 1.0

    def __call__(self, text: str, retrieved: str) -> float | None:
        words, before = content_words(text), content_words(retrieved)
        if not words or text == retrieved:
            return None
        has_others = any(not any(word.startswith(old) for word in words) for old in before)
        return self.settle_s if has_others or len(words) >= max(2, 2 * len(before)) else self.pause_s
