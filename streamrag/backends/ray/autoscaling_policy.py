"""Autoscaling by the number of prompt tokens that wait in the replicas."""

from math import ceil
from typing import Any

QUEUED_TOKENS = "queued_tokens"  # name of the metric that replicas report to the autoscaler


class QueuedTokensPolicy:
    """A policy for Ray Serve, which keeps the result between the fewest and most replicas, and delays changes."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and the policy's state, which is empty."""
        queued = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        current, num_reports = context.current_num_replicas, len(queued)
        return wanted_replicas(sum(queued.values()), target=self._target, current=current, num_reports=num_reports), {}


def wanted_replicas(queued_tokens: float, *, target: int, current: int, num_reports: int) -> int:
    """Return the number of replicas with which at most `target` tokens wait in each, if they are shared equally.

    `queued_tokens` is the sum of `num_reports` replicas; the other replicas are assumed to have as many each. Without
    reports, returns `current`.

    >>> wanted_replicas(30_000, target=8_192, current=2, num_reports=2)
    4
    """
    if not num_reports:
        return current
    return max(ceil(queued_tokens * max(current / num_reports, 1.0) / target), 1)
