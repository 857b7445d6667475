"""The applications that Ray Serve replicates: engines, and sources in their own pool."""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeAlias

from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.util import get_node_ip_address

from streamrag.backends.ray.options import QUEUED_TOKENS, ReplicaOptions
from streamrag.backends.ray.request_router import CALLS_PER_STREAM, StreamRouter
from streamrag.backends.replicas.replica import EngineReplica, MakeBackend
from streamrag.backends.replicas.wire import Failed
from streamrag.backends.vllm.client.lane_engine import HOST
from streamrag.core import Source, SourceEvent, Startable, part_name
from streamrag.core.retrieval import closing
from streamrag.errors import StreamRagError

ENGINES, SOURCES, PREFILL, DECODE = "engines", "sources", "prefill", "decode"  # names of the deployments

MakeSource: TypeAlias = Callable[[], Source | None]

MAX_METRICS_INTERVAL_S = 10.0  # seconds between reports to the autoscaler: Ray's default, and less for short delays
STATS_S = 0.5  # seconds between a replica's reports to routers
MAX_LOOK_BACK_S = 30.0  # seconds of which the autoscaler averages the reports: likewise

MAX_QUERIES_PER_SOURCE = 16  # most concurrent queries in a source's replica; further ones wait


def bind_to_node_address() -> None:
    """Make this replica's gRPC server listen on its node's address only. Call it during the replica's construction.

    Ray Serve 2.60 binds the server to all interfaces, even on a single machine, and has no option for that.
    """

    def bind(server: Any, address: str) -> int:
        port: int = add_port_to_grpc_server(server, address.replace("[::]", get_node_ip_address()))
        return port

    replica.add_port_to_grpc_server = bind


class DeployedReplica(EngineReplica):
    """A replica as Ray Serve constructs and calls it."""

    async def __init__(self, make_backend: MakeBackend, max_open: int, *others: Any) -> None:  # type: ignore[misc]
        """Start the engine. `others` are not used: they belong to the application because they are bound to it."""
        bind_to_node_address()
        os.environ.setdefault(HOST, get_node_ip_address())  # at which decode lanes on other nodes reach a prefill lane
        super().__init__(make_backend, max_open=max_open, replica_id=serve.get_replica_context().replica_id.unique_id)
        await self.start()

    async def forward_update(self, replica_id: str, stream_id: str, delta: Any) -> bool:
        """Forward a stream's next prompt to `update`. `replica_id` is for the router, as in `forward_heartbeat`."""
        return self.update(stream_id, delta)

    async def forward_heartbeat(self, replica_id: str, caller_id: str) -> None:
        """Forward a caller's heartbeat to `record_heartbeat`."""
        self.record_heartbeat(caller_id)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report that Ray Serve's controller sends to all routers. Called about every half second."""
        self.end_abandoned()
        return self.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `QueuedTokensPolicy`."""
        return {QUEUED_TOKENS: float(self.num_queued_tokens)}

    async def __del__(self) -> None:
        """Stop the engine, when Ray Serve gives up a replica that has no more queries."""
        await self.aclose()


def engines(
    make_backend: MakeBackend, options: ReplicaOptions, *, name: str = ENGINES, other_deployments: Sequence[Any] = ()
) -> Any:
    """Return the application of engines, for `serve.run` or for binding into a larger application. With
    `options.max_number`, their number follows the load; without, it is constant.

    other_deployments: further deployments of the application, which are deployed with it.
    """
    deployed = serve.deployment(
        name=name,
        max_ongoing_requests=CALLS_PER_STREAM * options.max_open,
        ray_actor_options=options.actor_options,
        health_check_period_s=options.health_s,
        graceful_shutdown_timeout_s=options.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(
            request_router_class=StreamRouter,
            request_routing_stats_period_s=STATS_S,
        ),
        **_scaling(options),
    )(DeployedReplica)
    return deployed.bind(make_backend, options.max_open, *other_deployments)


def _scaling(options: ReplicaOptions) -> dict[str, Any]:
    """Return the arguments of `serve.deployment` for the number of replicas."""
    if options.max_number is None:
        return {"num_replicas": options.number}
    load: dict[str, Any] = {"target_ongoing_requests": options.max_open / 2}
    if options.queued_tokens is not None:
        function = "streamrag.backends.ray.options:QueuedTokensPolicy"
        load = {"policy": AutoscalingPolicy(policy_function=function, policy_kwargs={"target": options.queued_tokens})}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.number,
            initial_replicas=options.number,
            max_replicas=options.max_number,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            metrics_interval_s=min(MAX_METRICS_INTERVAL_S, options.upscale_delay_s),
            look_back_period_s=min(MAX_LOOK_BACK_S, 3 * options.upscale_delay_s),
            **load,
        )
    }


def lane_engines(
    make_prefill: MakeBackend, make_decode: MakeBackend, prefill: ReplicaOptions, decode: ReplicaOptions
) -> Any:
    """Return the application of prefill and decode lanes. Each kind has its own options."""
    decode_lanes = engines(make_decode, decode, name=DECODE)
    return engines(make_prefill, prefill, name=PREFILL, other_deployments=[decode_lanes])


class DeployedSource:
    """A source in a replica without an accelerator."""

    async def __init__(self, make_source: MakeSource) -> None:  # type: ignore[misc]
        bind_to_node_address()
        source = make_source()
        assert source is not None, "no source is set"
        self._source = source
        if isinstance(self._source, Startable):
            await self._source.start(lambda line: None)

    def name(self) -> str:
        return part_name(self._source)

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent | Failed, None]:
        """Yield the source's events. A StreamRagError is not raised, but yielded as a last event, `Failed`."""
        try:
            async with closing(self._source.stream(query)) as events:
                async for event in events:
                    yield event
        except StreamRagError as error:
            yield Failed.of(error)

    async def __del__(self) -> None:
        """Stop the source, when Ray Serve gives up a replica that has no more queries."""
        if isinstance(self._source, Startable):
            await self._source.aclose()


def sources(make_source: MakeSource, number: int) -> Any:
    """Return the application of `number` sources. They reserve no CPUs, because on a single machine they run beside
    engines that have taken all CPUs: with Ray's default of 1 they would wait forever there."""
    deployed = serve.deployment(
        name=SOURCES,
        max_ongoing_requests=MAX_QUERIES_PER_SOURCE,
        ray_actor_options={"num_cpus": 0.0},
        num_replicas=number,
    )(DeployedSource)
    return deployed.bind(make_source)
