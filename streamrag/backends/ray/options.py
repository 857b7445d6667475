"""The options of a deployment of replicas, and the policy by which their number follows the load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, Seconds, validated

QUEUED_TOKENS = "queued_tokens"  # name of the metric that replicas report to the autoscaler


@validated
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of a deployment: the number of replicas, their resources, and their limits.

    :raises ConfigurationError: an option has an invalid value.
    """

    number: Count = 2  # number of replicas at first, and under low load
    max_number: Count | None = None  # most replicas under load; None for a constant number
    queued_tokens: Count | None = 8_192
    """Waiting prompt tokens per replica above which replicas are added. None: added above half of `max_open`."""
    upscale_delay_s: Seconds = 10.0  # seconds of overload before a replica is added, which takes longer to start itself
    downscale_delay_s: float = 600.0  # seconds of low load before a replica is removed
    max_open: Count = 64
    """Most concurrent queries in a replica. Further ones go to another replica, or wait with the caller."""
    num_cpus: float = 1.0  # CPUs of each replica
    num_gpus: float = 0.0  # GPUs of each replica
    resources: Mapping[str, float] = field(default_factory=dict)  # further resources of each replica, by Ray's names
    drain_s: Seconds = 600.0  # most seconds for a stopped replica to finish its queries (drain)
    health_s: Seconds = 2.0
    """Seconds between health checks of the engine. After three failures in a row the replica is restarted."""

    def __post_init__(self) -> None:
        if self.max_number is not None and self.max_number < self.number:
            raise ConfigurationError(f"max_number={self.max_number} must be at least number={self.number}")

    @property
    def actor_options(self) -> dict[str, Any]:
        """The resources of a replica, as Ray's actor options; GPUs only if the replica needs them."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "resources": dict(self.resources)}
        if self.num_gpus:
            options["num_gpus"] = self.num_gpus
        return options


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
