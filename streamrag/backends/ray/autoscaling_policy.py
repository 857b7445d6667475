"""The number of replicas that is wanted, by the prompt tokens that wait in them."""

from math import ceil
from typing import Any

QUEUED_TOKENS = "queued_tokens"
"""Name of the metric that replicas send to the autoscaler."""


class QueuedTokensPolicy:
    """A policy of Ray Serve's, which bounds the result by the fewest and most replicas, and by its delays."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that is wanted, and what to remember: nothing."""
        queued = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        current = context.current_num_replicas
        return wanted_replicas(sum(queued.values()), target=self._target, current=current, num_told=len(queued)), {}


def wanted_replicas(queued_tokens: float, *, target: int, current: int, num_told: int) -> int:
    """Return how many replicas there must be for each to have at most `target` tokens waiting, shared alike.

    Replicas that have not told yet are taken to be like the others.

    >>> wanted_replicas(30_000, target=8_192, current=2, num_told=2)
    4
    """
    if not num_told:
        return current
    return max(ceil(queued_tokens * max(current / num_told, 1.0) / target), 1)
