"""Lanes on Ray Serve, which places, restarts and scales the two kinds independently. Here, each kind is one lane.

RayDisaggregatedBackend ──▶ RayLane "prefill" ──▶ the replica that the router chooses for the prompts of a query
               └──▶ RayLane "decode"  ──▶ the replica that the router chooses for its answer
"""

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from ray.serve.handle import DeploymentHandle

from streamrag.backends.lanes.backend import Answerer, DisaggregatedBackend
from streamrag.backends.lanes.kv_transfer import PrefillEnd
from streamrag.backends.ray.backend import ExistingReplicas, RayBackend, ReplicaCluster, close_on_failure
from streamrag.backends.replicas.newest_prompt import NewestPrompt
from streamrag.backends.replicas.replica_streams import QueryReplica, ReplicaLostError
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import BackendEvent, Progress, Prompt, SamplingParams, Tokenizer
from streamrag.routing import make_router
from streamrag.support.clock import monotonic


class RayLane(RayBackend):
    """The replicas of one kind of lanes, as one lane."""

    def __init__(self, lane: str, make_tokenizer: Callable[[], Tokenizer], router: str) -> None:
        self.lane = lane
        self.replicas = ExistingReplicas()
        super().__init__(self.replicas, make_tokenizer=make_tokenizer, router=make_router(router), max_replays=0)

    async def start(self, progress: Progress) -> None:
        """Connect to the replicas. Raises as `RayBackend.start` does."""
        await super().start(progress)
        # The replica of a query is not known when room is reserved. In it, vLLM has requests wait for KV blocks.
        self.lane_facts = replace(self.lane_facts, num_blocks=sys.maxsize)

    @property
    def num_replicas(self) -> int:
        """Number of replicas when a query was last routed; 1 before the first."""
        return max(self._chooser.num_replicas, 1)

    def check_health(self) -> None:
        """Do nothing: Ray checks the replicas, and starts them again."""

    def check_params(self, params: SamplingParams) -> None:
        """Do nothing: a replica checks them."""


class RayDisaggregatedBackend(DisaggregatedBackend):
    """Prefill and decode lanes in replicas on Ray Serve.

    cluster: starts the replicas, or has them: the application of `deployment.lane_engines`.
    make_tokenizer: creates the model's tokenizer, in a thread of this process.
    router: how the replica of a query is chosen, of either kind.
    max_open: most queries in a decode replica at a time. Further ones wait in their prefill replicas.
    max_replays: most times that a query without output is computed again because a replica was lost.
    """

    def __init__(
        self,
        cluster: ReplicaCluster,
        *,
        make_tokenizer: Callable[[], Tokenizer],
        router: str,
        max_open: int = 64,
        max_replays: int = 3,
    ) -> None:
        self._cluster = cluster
        # The model is that of the prefill lane, so the decode lane's tokenizer is not used.
        prefill, decode = RayLane("prefill", make_tokenizer, router), RayLane("decode", CodePointTokenizer, router)
        super().__init__([prefill], [decode], router="round_robin", max_open=max_open, max_replays=max_replays)

    async def start(self, progress: Progress) -> None:
        """Start the replicas of both kinds, or connect to them. If that fails, the cluster is closed again.

        :raises ConfigurationError: there is no such cluster, or the lanes differ in what they must have in common.
        :raises BackendError: an engine cannot be started.
        """
        handle = await self._cluster.start(progress)
        async with close_on_failure(self._cluster):
            for lane in self._backends.values():
                lane.replicas.handle = DeploymentHandle(lane.lane, handle.app_name)
            await super().start(progress)

    async def aclose(self) -> None:
        """Stop the replicas, or disconnect from them. Does nothing if the backend is not started."""
        await super().aclose()
        await self._cluster.aclose()

    async def _prefill_then_answer(
        self, lane: RayLane, first: Prompt, prompts: AsyncIterator[Prompt], params: SamplingParams, answer: Answerer
    ) -> AsyncGenerator[BackendEvent, None]:
        async def prompts_once_open() -> AsyncGenerator[Prompt, None]:
            yield replace(first, num_shared=0, is_complete=False)
            # `prompts` reserve room in the decode lane. A query that has it must not wait for a prefill replica:
            # queries that are open there may wait for room in the decode lane.
            await replica.has_opened.wait()
            async for prompt in prompts:
                yield prompt

        end: PrefillEnd | None = None
        replica = QueryReplica()
        async with (
            aclosing(NewestPrompt(prompts_once_open())) as newest,
            aclosing(lane.streams.attempt(newest, params, replica)) as events,
        ):
            async for event in events:
                if isinstance(event, PrefillEnd):
                    end = event
                else:
                    yield event
        if end is None or end.record is None or newest.prompt is None:
            raise ReplicaLostError("its stream ended without the end of the prefill")
        # The KV's age counts from now, by this host's clock. `DecodeEngine` checks the age by the clocks of the nodes.
        record = replace(end.record, finished_s=monotonic())
        async with aclosing(answer(replace(end, token_ids=newest.prompt.token_ids, record=record))) as chunks:
            async for chunk in chunks:
                yield replace(chunk, record=end.record) if chunk.finish_reason else chunk
