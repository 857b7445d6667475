"""The prompts that backends consume: token ids that grow and change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamrag.core.context import Hint


def common_prefix_len(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Return the number of leading items that `a` and `b` share (LCP), given that they share the first `start`.

    Both must be of the same type, list or tuple. Slices are compared in C: about 30 us for 7,000 tokens.

    >>> common_prefix_len((1, 2, 3, 4), (1, 2, 7, 4))
    2
    """
    shared, end = start, min(len(a), len(b))
    if a[shared:end] == b[shared:end]:
        return end
    # Invariant: the items in [0, shared) are equal, those in [0, end) are not.
    while end - shared > 1:
        middle = (shared + end) // 2
        if a[shared:middle] == b[shared:middle]:
            shared = middle
        else:
            end = middle
    return shared


RequestClass: TypeAlias = Literal["session", "pool", "stream"]
"""Urgency classes, the most urgent first: a session's question, any other query, and a session's data, for which no
caller waits. Source: arXiv 2605.13784, section 3.6, where watched questions are a class before all others."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids for the model. A prompt that is not `is_complete` is only prefilled; another prompt follows it."""

    token_ids: tuple[int, ...]
    num_shared: int
    """Leading tokens shared with the query's previous prompt (LCP); 0 for the first prompt."""
    is_complete: bool
    hint: Hint | None = None
    """The retriever's forecast of the chunks still to come."""
    source_name: str = ""
    """The `part_name` of the retriever. Retrievers of the same name are expected to behave alike."""
    request_class: RequestClass = "pool"
    """Urgency class of the request, for the engine's policy. That of the query's first prompt counts."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_shared <= len(self.token_ids)
