"""The options of a deployment of replicas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, Seconds, validated


@validated
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of a deployment: how many replicas, where they run, and what is expected of them.

    :raises ConfigurationError: values that cannot work.
    """

    number: Count = 2
    """Replicas to start with; with `max_number`, that changes with the load."""
    min_number: Count | None = None
    """Fewest replicas when there is little to do; None for `number`."""
    max_number: Count | None = None
    """Most replicas under load; None leaves the number as it is."""
    queued_tokens: Count = 8_192
    """Prompt tokens that wait in each replica: more ask for another one."""
    upscale_delay_s: Seconds = 10.0
    """Seconds for which too much must have waited before there is another one, which takes longer to start itself."""
    downscale_delay_s: float = 600.0
    """Seconds for which there must have been too little to do before there is one less."""
    max_open: Count = 64
    """Most queries in a replica at once. Further ones go to another replica, or wait with the caller."""
    num_cpus: float = 1.0
    """CPUs that a replica takes of its node's."""
    num_gpus: float = 0.0
    """GPUs that a replica takes."""
    accelerator: str | None = None
    """The kind of accelerator that its node must have, as Ray names it: "H100"."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Further resources of Ray's, by name, that it takes."""
    drain_s: Seconds = 600.0
    """Most seconds that a replica which is stopped goes on with the queries that it has."""
    health_s: Seconds = 2.0
    """Seconds between looks at whether its engine lives. Three that fail in a row restart it."""
    stats_s: Seconds = 0.5
    """Seconds between its reports to routers."""

    def __post_init__(self) -> None:
        low, high = self.min_number, self.max_number
        if high is None and low is not None:
            raise ConfigurationError(f"min_number={low} is for replicas that scale: set max_number too")
        if high is not None and not (low or 1) <= self.number <= high:
            raise ConfigurationError(f"number={self.number} must be from min_number={low} to max_number={high}")

    @property
    def for_actor(self) -> dict[str, Any]:
        """Ray's options of where a replica runs."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "resources": dict(self.resources)}
        if self.num_gpus:
            options["num_gpus"] = self.num_gpus
        if self.accelerator is not None:
            options["accelerator_type"] = self.accelerator
        return options
