"""Replicas in the test's own process, and a router that fills them in order."""

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from streamrag.backends.replicas.replica import EngineReplica
from streamrag.backends.replicas.replica_chooser import ReplicaCandidate, ReplicaChooser
from streamrag.backends.replicas.replica_streams import ReplicaLostError, ReplicaStreams
from streamrag.backends.replicas.wire import Delta, Open, Refused, WireEvent
from streamrag.core import AnswerChunk, Backend, BackendEvent, Prompt, SamplingParams
from streamrag.routing import Opening, ReplicaState
from streamrag.support import clock


class Fewest:
    """Where the fewest queries are open; of those the first by name. Keeps what it is told."""

    def __init__(self) -> None:
        self.computed: list[tuple[tuple[int, ...], str]] = []
        self.gone: list[str] = []

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        return [state.id for state in sorted(replicas, key=lambda state: (state.num_open, state.id))]

    def routed(self, opening: Opening, replica_id: str) -> int:
        return len(opening.token_ids)

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        self.computed.append((tuple(token_ids), replica_id))

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Nothing is kept of it."""

    def lost(self, replica_id: str) -> None:
        self.gone.append(replica_id)


class InProcess:
    """Replicas by name. What is sent is packed and unpacked, as on a journey."""

    def __init__(self, backends: Mapping[str, Backend], *, max_open: int = 8) -> None:
        self._max_open = max_open
        self.replicas = {
            name: EngineReplica(lambda backend=backend: backend, max_open=max_open, replica_id=name)  # type: ignore[misc]
            for name, backend in backends.items()
        }
        self._killed = {name: asyncio.Event() for name in backends}

    def kill(self, name: str) -> None:
        del self.replicas[name]
        self._killed[name].set()

    async def open(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        there = [ReplicaCandidate(name, self._max_open, replica.stats()) for name, replica in self.replicas.items()]
        ranked = call.ticket.rank(there)
        if not ranked:
            yield (Refused(),)
            return
        killed = asyncio.create_task(self._killed[ranked[0]].wait())
        async with aclosing(self.replicas[ranked[0]].generate(pickle.loads(pickle.dumps(call)))) as batches:
            try:
                while True:
                    next_one: asyncio.Task[Any] = asyncio.create_task(anext(batches, None))  # type: ignore[arg-type]
                    try:
                        await asyncio.wait([killed, next_one], return_when=asyncio.FIRST_COMPLETED)
                        if killed.done():
                            raise ReplicaLostError(f"{ranked[0]} was killed")
                        if next_one.result() is None:
                            return
                        yield next_one.result()
                    finally:
                        next_one.cancel()
                        await asyncio.wait([next_one])
            finally:
                killed.cancel()

    async def update(self, replica_id: str, stream_id: str, delta: Delta) -> bool:
        if replica_id not in self.replicas:
            raise ReplicaLostError(f"{replica_id} was killed")
        return self.replicas[replica_id].update(stream_id, pickle.loads(pickle.dumps(delta)))

    async def send_heartbeat(self, replica_id: str, caller_id: str) -> None:
        if replica_id not in self.replicas:
            raise ReplicaLostError(f"{replica_id} was killed")
        self.replicas[replica_id].record_heartbeat(caller_id)


def replica_streams(replicas: InProcess, router: Fewest | None = None, *, max_replays: int = 3) -> ReplicaStreams:
    return ReplicaStreams(replicas, ReplicaChooser(router or Fewest(), clock=clock.monotonic), max_replays=max_replays)


def growing(*texts: str) -> list[Prompt]:
    """Prompts with these texts, one character a token; the last is complete."""
    prompts: list[Prompt] = []
    before: tuple[int, ...] = ()
    for number, text in enumerate(texts, start=1):
        ids = tuple(map(ord, text))
        num_shared = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), None)
        shared = min(len(before), len(ids)) if num_shared is None else num_shared
        prompts.append(Prompt(ids, shared, number == len(texts)))
        before = ids
    return prompts


async def after(prompts: Sequence[Prompt], *events: asyncio.Event) -> AsyncIterator[Prompt]:
    """`prompts`; each but the first waits for the next of `events`, if there is one."""
    for number, prompt in enumerate(prompts):
        if 0 < number <= len(events):
            await events[number - 1].wait()
        yield prompt


async def answer(
    streams: ReplicaStreams, prompts: AsyncIterator[Prompt], seen: list[BackendEvent] | None = None
) -> str:
    text = ""
    async with aclosing(streams.generate(prompts, SamplingParams())) as events:
        async for event in events:
            if seen is not None:
                seen.append(event)
            text += event.text if isinstance(event, AnswerChunk) else ""
    return text
