"""A backend of engines in replicas on Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import anyio.to_thread
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from streamrag.backends.replicas.replica import ModelFacts
from streamrag.backends.replicas.replica_chooser import ReplicaChooser
from streamrag.backends.replicas.replica_streams import OutcomeCounts, ReplicaLostError, ReplicaStreams
from streamrag.backends.replicas.wire import Delta, Open, WireEvent
from streamrag.backends.vllm.client.lane_engine import NO_LANE
from streamrag.core import BackendEvent, ModelInfo, Progress, Prompt, SamplingParams, Tokenizer
from streamrag.errors import BackendError
from streamrag.routing import Router
from streamrag.support.clock import monotonic
from streamrag.support.messages import message_of
from streamrag.support.tasks import cancel_and_wait


class RayReplicas:
    """Implements `replica_streams.Replicas` with a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        """Prepare calls of the methods of `deployment.DeployedReplica`."""
        self._generate = handle.options(method_name="generate", stream=True)
        self._update = handle.options(method_name="forward_update")
        self._send_heartbeat = handle.options(method_name="forward_heartbeat")
        self._facts = handle.options(method_name="facts")

    async def facts(self) -> ModelFacts:
        """Return the facts of the model, once a replica can answer.

        :raises BackendError: no replica can.
        """
        with ray_errors_translated():
            facts: ModelFacts = await self._facts.remote()
            return facts

    async def open(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        """Yield the batches of a new stream, from a replica of its ticket's choice. Closing cancels the stream."""
        with ray_errors_translated():
            response: Any = self._generate.remote(call)
            try:
                async for batch in response:
                    yield batch
            finally:
                response.cancel()  # no effect after its end

    async def update(self, replica_id: str, stream_id: str, delta: Delta) -> bool:
        with ray_errors_translated():
            return bool(await self._update.remote(replica_id, stream_id, delta))

    async def send_heartbeat(self, replica_id: str, caller_id: str) -> None:
        with ray_errors_translated():
            await self._send_heartbeat.remote(replica_id, caller_id)


@contextmanager
def ray_errors_translated() -> Iterator[None]:
    """Translate errors of Ray in the block.

    :raises ReplicaLostError: the replica has died, or is being stopped.
    :raises BackendError: Ray raised another error.
    """
    try:
        yield
    except (RayActorError, NodeDiedError, ObjectLostError, TaskCancelledError) as error:
        raise ReplicaLostError(_first_line(error)) from None
    except (RayError, RayServeException) as error:
        raise BackendError(f"a replica failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in message_of(error).splitlines() if line.strip()), type(error).__name__)


class ReplicaCluster(Protocol):
    """A cluster that has replicas, or starts them: `cluster.Cluster` or `ExistingReplicas`."""

    async def start(self, progress: Progress) -> DeploymentHandle:
        """Return a handle of the replicas, once they can answer."""

    async def aclose(self) -> None:
        """Free what `start` has taken."""


class ExistingReplicas:
    """Replicas that something else has deployed, and that run on after `aclose`."""

    def __init__(self, handle: DeploymentHandle | None = None) -> None:
        self.handle = handle

    async def start(self, progress: Progress) -> DeploymentHandle:
        """Return the handle of the replicas, which run already."""
        return self.handle

    async def aclose(self) -> None:
        """Leave the replicas running."""


@asynccontextmanager
async def close_on_failure(cluster: ReplicaCluster) -> AsyncIterator[None]:
    """Close the cluster if the block raises, and raise the error again; BackendError if a replica was lost."""
    try:
        yield
    except BaseException as error:
        await cluster.aclose()
        if isinstance(error, ReplicaLostError):
            raise BackendError(f"a replica was lost during its start: {error}") from None
        raise


class RayBackend:
    """A backend of engines in replicas. Each query is routed to one of them when it opens; see docs/ray.md.

    cluster: starts the replicas, or has them.
    make_tokenizer: creates the model's tokenizer, in a thread of this process.
    router: chooses the replica of a query.
    max_replays: most times that a query without output is opened again because its replica was lost.
    """

    def __init__(
        self,
        cluster: ReplicaCluster,
        *,
        make_tokenizer: Callable[[], Tokenizer],
        router: Router,
        max_replays: int = 3,
    ) -> None:
        self._cluster = cluster
        self._make_tokenizer = make_tokenizer
        self._chooser = ReplicaChooser(router, clock=monotonic)
        self._max_replays = max_replays
        self.lane_facts = NO_LANE  # of the engines, if they are lanes
        self._streams: ReplicaStreams | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None

    @property
    def model(self) -> ModelInfo:
        """The model that all replicas serve; raises BackendError before the start."""
        if self._info is None:
            raise BackendError("the replicas have not been started: await backend.start(print) first")
        return self._info

    @property
    def counts(self) -> OutcomeCounts:
        """Counts of the outcomes of queries since the start."""
        return self.streams.counts

    async def start(self, progress: Progress) -> None:
        """Start the replicas, or connect to them, get the facts of the model, and start the heartbeats. Sets `model`.

        If that fails, the cluster is closed again.

        :raises ConfigurationError: there is no such cluster, or the tokenizer cannot be created.
        :raises BackendError: an engine cannot be started.
        """
        replicas = RayReplicas(await self._cluster.start(progress))
        async with close_on_failure(self._cluster):
            facts = await replicas.facts()
            tokenizer = await anyio.to_thread.run_sync(self._make_tokenizer)
        self._info = ModelInfo(
            facts.model_name,
            tokenizer,
            facts.max_model_len,
            is_exact=facts.is_exact,
            breaks_look_alikes=facts.breaks_look_alikes,
            verifies_drafts=facts.verifies_drafts,
            min_head_len=None,
        )
        self.lane_facts = facts.lane_facts
        self._streams = ReplicaStreams(replicas, self._chooser, max_replays=self._max_replays)
        heartbeats = self._streams.send_heartbeats_forever()
        self._heartbeats = asyncio.create_task(heartbeats, name="streamrag heartbeats to replicas")

    async def aclose(self) -> None:
        """Stop the replicas, or disconnect from them. Does nothing if the backend is not started."""
        heartbeats, self._heartbeats, self._streams = self._heartbeats, None, None
        if heartbeats is not None:
            await cancel_and_wait([heartbeats])
            await self._cluster.aclose()

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, in one of the replicas, and answer the complete one.

        :raises BackendError: the replica was lost after the first output, or too many were lost before.
        :raises StreamRagError: as the engine's own backend does.
        """
        return self.streams.generate(prompts, params)

    @property
    def streams(self) -> ReplicaStreams:
        """Streams in the running replicas; raises BackendError before the start."""
        if self._streams is None:
            raise BackendError("the replicas are not running: they were closed, or not started")
        return self._streams
