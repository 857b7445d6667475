"""The connection to replicas through a handle of Ray Serve, with its errors translated."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from streamrag.backends.replicas.replica import ModelFacts
from streamrag.backends.replicas.replica_streams import ReplicaLostError
from streamrag.backends.replicas.wire import Delta, Open, WireEvent
from streamrag.errors import BackendError
from streamrag.support.messages import message_of


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
