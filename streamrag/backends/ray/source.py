"""A source in replicas of its own, which scale on their own: retrieval needs no accelerator."""

from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from streamrag.backends.ray.backend import Connects, left_on_failure
from streamrag.backends.ray.connection import translated
from streamrag.backends.ray.replaying import ReplicaLostError
from streamrag.backends.ray.wire import Failed
from streamrag.core import Progress, SourceEvent
from streamrag.errors import BackendError, SourceError


class RaySource:
    """Retrieves in replicas, with the source that each of them has.

    cluster: the replicas, as of `deployment.sources`.
    """

    def __init__(self, cluster: Connects) -> None:
        self.name = type(self).__name__
        self._cluster = cluster
        self._handle: DeploymentHandle | None = None

    async def start(self, progress: Progress) -> None:
        """Start the replicas, or find them.

        :raises ConfigurationError: there is no such cluster.
        :raises BackendError: no source can be started.
        """
        handle = await self._cluster.start(progress)
        async with left_on_failure(self._cluster):
            with translated():
                self.name = await handle.name.remote()
        self._handle = handle.options(method_name="stream", stream=True)

    async def aclose(self) -> None:
        """End the replicas, or let go of them. Does nothing when not started."""
        if self._handle is not None:
            self._handle = None
            await self._cluster.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """As the replica's source yields them. A replica that is lost before its first event is replaced once.

        :raises SourceError: retrieval failed, or its replica was lost.
        """
        if self._handle is None:
            raise SourceError("the source's replicas are not running: they were closed, or not started")
        num_events = 0
        for is_last in (False, True):
            response: Any = None
            try:
                with translated():
                    response = self._handle.remote(query)
                    async for event in response:
                        if isinstance(event, Failed):
                            raise event.error()
                        num_events += 1
                        yield event
                return
            except ReplicaLostError as error:
                if is_last or num_events:
                    raise SourceError(f"the replica that retrieved was lost: ask again ({error})") from None
            except BackendError as error:
                raise SourceError(str(error)) from error
            finally:
                if response is not None:
                    response.cancel()  # does nothing to one that has ended
