"""A source in its own replicas, which scale independently of the engines: retrieval needs no accelerator."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from streamrag.backends.ray.backend import ReplicaCluster, close_on_failure, ray_errors_translated
from streamrag.backends.replicas.replica_streams import ReplicaLostError
from streamrag.backends.replicas.wire import Failed
from streamrag.core import Append, Chunk, Progress, SourceEvent, Update
from streamrag.errors import BackendError, SourceError
from streamrag.modes.context import Context, UpdateMode

MAX_LOST_REPLICAS = 3  # most replicas that one query may lose; with the last one the query fails


class RaySource:
    """A source that retrieves in replicas of another source.

    cluster: starts the replicas, or has them: the application of `deployment.sources`.
    """

    def __init__(self, cluster: ReplicaCluster) -> None:
        self.name = type(self).__name__
        self._cluster = cluster
        self._handle: DeploymentHandle | None = None

    async def start(self, progress: Progress) -> None:
        """Start the replicas, or connect to them, and get the `name` of their source.

        :raises ConfigurationError: there is no such cluster.
        :raises BackendError: no source can be started. The connection is closed again.
        """
        handle = await self._cluster.start(progress)
        async with close_on_failure(self._cluster):
            with ray_errors_translated():
                self.name = await handle.name.remote()
        self._handle = handle.options(method_name="stream", stream=True)

    async def aclose(self) -> None:
        """Stop the replicas, or disconnect from them. Does nothing if not started."""
        if self._handle is not None:
            self._handle = None
            await self._cluster.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of a replica's source. If the replica is lost, another one retrieves from the start.

        The answer begins only after retrieval, so it never contains text that becomes wrong. Events that the second
        replica repeats are skipped; from the first difference on, each event replaces the whole context.

        :raises SourceError: retrieval failed, or `MAX_LOST_REPLICAS` replicas were lost.
        """
        if self._handle is None:
            raise SourceError("the source's replicas are not running: they were closed, or not started")
        sent: list[SourceEvent] = []
        for num_lost in range(1, MAX_LOST_REPLICAS + 1):
            events = self._retrieve(self._handle, query)
            try:
                async with aclosing(_without_repeats(sent, events) if sent else events) as new_events:
                    async for event in new_events:
                        sent.append(event)
                        yield event
                return
            except ReplicaLostError as error:
                if num_lost == MAX_LOST_REPLICAS:
                    raise SourceError(f"{num_lost} replicas that retrieved were lost: ask again ({error})") from None

    async def _retrieve(self, handle: DeploymentHandle, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of one replica; raise the source's error, ReplicaLostError, or SourceError for Ray's own."""
        response: Any = None
        try:
            with ray_errors_translated():
                response = handle.remote(query)
                async for event in response:
                    if isinstance(event, Failed):
                        raise event.to_error()
                    yield event
        except BackendError as error:
            raise SourceError(str(error)) from error
        finally:
            if response is not None:
                response.cancel()  # no effect after its end


async def _without_repeats(
    sent: Sequence[SourceEvent], events: AsyncGenerator[SourceEvent, None]
) -> AsyncGenerator[SourceEvent, None]:
    """Skip `events` while they repeat the `sent` ones, hints aside, and yield those behind all of these as they are.
    After a difference, or an early end, yield Updates of the whole context, and other events only if not sent yet."""
    before = [_without_hint(event) for event in sent]
    shown, context = _context_of(sent), Context()
    num_same: int | None = 0  # number of events so far that equal the sent ones; None after the first difference
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Append | Update):
                context = context.with_chunks(UpdateMode().fold(context, event))
            if num_same is not None and num_same < len(before) and _without_hint(event) == before[num_same]:
                num_same += 1
            elif num_same == len(before):
                yield event
            else:
                num_same = None
                if isinstance(event, Append | Update):
                    shown = context
                    yield Update(tuple(context), event.hint)
                elif _without_hint(event) not in before:
                    yield event
    if num_same != len(before) and context != shown:  # it has ended with fewer events
        yield Update(tuple(context))


def _without_hint(event: SourceEvent) -> object:
    return replace(event, hint=None) if isinstance(event, Append | Update) else event


def _context_of(events: Sequence[SourceEvent]) -> tuple[Chunk, ...]:
    """Return the chunks of the context after these events."""
    context = Context()
    for event in events:
        if isinstance(event, Append | Update):
            context = context.with_chunks(UpdateMode().fold(context, event))
    return context
