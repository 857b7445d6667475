"""What a step consists of, and how much attention that is."""

from collections.abc import Sequence
from typing import TypeAlias

Part: TypeAlias = tuple[int, int]
"""The share of one request in a step: its new tokens, and the tokens before them whose KV is there already."""


def context_pairs(parts: Sequence[Part]) -> float:
    """Pairs of a new token and one before the step that it attends to, in all parts."""
    return sum(num_new * num_context for num_new, num_context in parts)


def own_pairs(parts: Sequence[Part]) -> float:
    """Pairs of two new tokens, of which the later attends to the earlier, in all parts."""
    return sum(num_new * num_new / 2 for num_new, _ in parts)
