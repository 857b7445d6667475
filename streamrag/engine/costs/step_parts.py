"""The parts of a step, and their attention."""

from collections.abc import Sequence
from typing import TypeAlias

StepPart: TypeAlias = tuple[int, int]
"""The share of one request in a step: its new tokens, and the tokens before them whose KV exists already."""


def context_pairs(parts: Sequence[StepPart]) -> float:
    """Return the number of pairs of a new token and a token before the step that it attends to."""
    return sum(num_new * num_context for num_new, num_context in parts)


def own_pairs(parts: Sequence[StepPart]) -> float:
    """Return the number of pairs of two new tokens of the same request."""
    return sum(num_new * num_new / 2 for num_new, _ in parts)
