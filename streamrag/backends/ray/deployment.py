"""The deployment that Ray Serve makes replicas of."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.ray.replica import EngineReplica, MakeBackend
from streamrag.backends.ray.request_router import CALLS_PER_STREAM
from streamrag.backends.ray.scaling import QUEUED_TOKENS

ENGINES = "engines"
"""The deployment's name."""

PACKAGE = "streamrag.backends.ray"

START_S = 1_200.0
"""Longest that an engine may take to start: a large model is loaded, or even downloaded first."""


class DeployedReplica(EngineReplica):
    """A replica that Ray Serve has made, and calls."""

    async def __init__(self, make_backend: MakeBackend, max_open: int) -> None:  # type: ignore[misc]
        super().__init__(make_backend, max_open=max_open, replica_id=serve.get_replica_context().replica_id.unique_id)
        await self.start()

    async def deliver(self, replica_id: str, stream_id: str, delta: Any) -> bool:
        """As `update`; of another replica than this, no stream is here."""
        return self.update(stream_id, delta)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Ray Serve's controller passes on to all routers."""
        return self.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy of `scaling` is told."""
        return {QUEUED_TOKENS: float(self.num_queued_tokens)}

    async def __del__(self) -> None:
        await self.aclose()


def deployment_of(make_backend: MakeBackend, options: ReplicaOptions) -> Any:
    """The application, for `serve.run`, or to be bound into a larger one."""
    number: dict[str, Any] = {"num_replicas": options.number}
    if options.max_number is not None:
        policy = AutoscalingPolicy(
            policy_function=f"{PACKAGE}.scaling:QueuedTokensPolicy", policy_kwargs={"target": options.queued_tokens}
        )
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.min_number or options.number,
                initial_replicas=options.number,
                max_replicas=options.max_number,
                policy=policy,
            )
        }
    deployed = serve.deployment(
        name=ENGINES,
        max_ongoing_requests=CALLS_PER_STREAM * options.max_open,
        ray_actor_options=options.for_actor,
        health_check_period_s=options.health_s,
        graceful_shutdown_timeout_s=options.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{PACKAGE}.request_router.StreamRouter",
            request_routing_stats_period_s=options.stats_s,
        ),
        **number,
    )(DeployedReplica)
    return deployed.bind(make_backend, options.max_open)
