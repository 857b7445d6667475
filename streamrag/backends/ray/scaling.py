"""How many replicas there should be, by the prompt tokens that wait in them."""

from math import ceil
from typing import Any

QUEUED_TOKENS = "queued_tokens"
"""What replicas tell the autoscaler, by name."""


def wanted_replicas(queued_tokens: float, *, target: int, current: int, num_told: int) -> int:
    """So many that each has at most `target` tokens waiting, when they are shared alike.

    Those that have not told yet are taken to be like the others.

    >>> wanted_replicas(30_000, target=8_192, current=2, num_told=2)
    4
    """
    if not num_told:
        return current
    return max(ceil(queued_tokens * max(current / num_told, 1.0) / target), 1)


class QueuedTokensPolicy:
    """A policy of Ray Serve's: it bounds what this wants by the fewest and most replicas, and by its delays."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas that is wanted, and what to remember: nothing."""
        told = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        wanted = wanted_replicas(
            sum(told.values()), target=self._target, current=context.current_num_replicas, num_told=len(told)
        )
        return wanted, {}
