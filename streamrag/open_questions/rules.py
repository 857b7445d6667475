"""Say when a partial question is worth a retrieval."""

from collections.abc import Callable
from typing import TypeAlias

from streamrag.query.relevance import STOP_WORDS, WORD

QuestionRule: TypeAlias = Callable[[str, str], bool]
"""A function of the question so far, and of the one that was last retrieved for or "": is it worth a retrieval?"""


def content_words(text: str) -> frozenset[str]:
    """Return the words that name something, in lower case.

    >>> sorted(content_words("How do I cancel a task"))
    ['cancel', 'task']
    """
    return frozenset(word.casefold() for word in WORD.findall(text)) - STOP_WORDS


def has_new_words(text: str, retrieved: str) -> bool:
    """Whether the content words of `text` are others than those of the question that was last retrieved for.

    >>> has_new_words("how do I", ""), has_new_words("how do I cancel a", "")
    (False, True)
    """
    words = content_words(text)
    return bool(words) and words != content_words(retrieved)
