"""A query's stream in one of several replicas. If the replica is lost before the first token, it is opened in another.

    prompts   ──P1───P2──────────────P3 (complete)
    replica a   [open P1, delta P2   ✗ lost
    replica b                        [open P2, delta P3 ─▶ AnswerChunk ...      ✗ lost now: BackendError

Does not depend on Ray: tests have replicas in their own process.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from streamrag.backends.replicas.newest_prompt import NewestPrompt
from streamrag.backends.replicas.replica_chooser import DraftTicket, ReplicaChooser, Ticket
from streamrag.backends.replicas.wire import Delta, Failed, Open, Opened, Refused, WireEvent
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, EngineDeadError
from streamrag.support.messages import type_name
from streamrag.support.tasks import cancel_and_wait

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.025, 0.5
"""Seconds before a query that all replicas refused is opened again, at first and at most; doubled each time."""

HEARTBEAT_S = 2.0  # seconds between heartbeats to each replica in use. A replica ends the streams of a silent caller.


class ReplicaLostError(Exception):
    """The replica has died, or has dropped the stream. Not visible outside the packages of replicas and of lanes."""


class QueryLostError(ReplicaLostError, BackendError):
    """All replicas that have computed a query were lost, before its first token."""


class Replicas(Protocol):
    """The connection to the replicas."""

    def open(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        """Open a stream in the replica that `call.ticket` chooses. Closing the generator aborts the stream.

        :raises ReplicaLostError: the replica has died.
        """

    async def update(self, replica_id: str, stream_id: str, delta: Delta) -> bool:
        """Send a stream's next prompt. Return whether the stream still exists.

        :raises ReplicaLostError: the replica has died.
        """

    async def send_heartbeat(self, replica_id: str, caller_id: str) -> None:
        """Send a heartbeat of the caller to a replica.

        :raises ReplicaLostError: the replica has died.
        """


@dataclass(slots=True)
class OutcomeCounts:
    """Counts of the outcomes of queries."""

    num_asked: int = 0
    num_answered: int = 0
    num_replayed: int = 0
    """Number of times that a query was opened again because its replica was lost."""
    num_lost: int = 0
    """Number of queries that failed because their replica was lost."""


class QueryReplica:
    """The replica that opened a query's stream last, to which the drafts of the query go."""

    def __init__(self) -> None:
        self.id = ""
        self.has_opened = asyncio.Event()


class ReplicaStreams:
    """Streams in replicas, which are opened again if a replica is lost.

    max_replays: most times that a query is opened again because its replica was lost.
    """

    def __init__(self, replicas: Replicas, chooser: ReplicaChooser, *, max_replays: int = 3) -> None:
        self.replicas = replicas
        self.chooser = chooser
        self.counts = OutcomeCounts()
        self.caller_id = uuid.uuid4().hex
        self._max_replays = max_replays
        self._replica_of_query: WeakValueDictionary[str, QueryReplica] = WeakValueDictionary()

    async def send_heartbeats(self) -> None:
        """Send a heartbeat to all replicas in use at the same time, and wait at most `HEARTBEAT_S`, so that a replica
        that hangs does not delay the next round. Ignore errors: the reader of a stream notices a lost replica."""
        calls = [
            asyncio.wait_for(self.replicas.send_heartbeat(replica_id, self.caller_id), HEARTBEAT_S)
            for replica_id in self.chooser.in_use()
        ]
        await asyncio.gather(*calls, return_exceptions=True)

    async def send_heartbeats_forever(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send_heartbeats()

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of an answer, as `Backend.generate` does. A query's drafts are made in that query's replica.

        :raises QueryLostError: too many replicas were lost before the first token.
        :raises BackendError: a replica was lost with a draft or after the first token; or as the engine's backend.
        """
        async with aclosing(NewestPrompt(prompts)) as newest:
            first = await newest.wait_for_newer(0)
            if first.request_class == "draft" and (replica := self._replica_of_query.get(first.query_id)):
                answering = self._draft(newest, params, replica)
            else:
                self._replica_of_query[first.query_id] = replica = QueryReplica()
                answering = self._answer(newest, params, replica)
            async with aclosing(answering) as events:
                async for event in events:
                    yield event

    async def _draft(
        self, newest: NewestPrompt, params: SamplingParams, query_replica: QueryReplica
    ) -> AsyncGenerator[BackendEvent, None]:
        """Wait until the query is open in a replica, and yield the events of its draft from there. A draft is never
        replayed: if the replica is lost, raise BackendError."""
        await query_replica.has_opened.wait()
        stream = _Stream(self, newest, params, QueryReplica(), DraftTicket(query_replica.id))
        try:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event
        except ReplicaLostError as error:
            raise BackendError(f"the replica that drafted an answer was lost: {error}") from None

    async def _answer(
        self, newest: NewestPrompt, params: SamplingParams, replica: QueryReplica
    ) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of an answer, and count its outcome. If a replica is lost, or its stream ends, before the
        answer's end, open the query again; raise BackendError after the first output, or after `max_replays` times."""
        self.counts.num_asked += 1
        num_replays = num_shown = 0
        is_finished = False
        while True:
            try:
                async with aclosing(self.attempt(newest, params, replica)) as events:
                    async for event in events:
                        if isinstance(event, AnswerChunk):
                            num_shown += max(len(event.token_ids), bool(event.text))
                            if event.finish_reason is not None:
                                is_finished = True
                                self.counts.num_answered += 1
                        yield event
                if not is_finished:
                    raise ReplicaLostError("its stream ended without the end of an answer")
                return
            except ReplicaLostError as error:
                if is_finished:
                    return
                if num_shown:
                    self.counts.num_lost += 1
                    raise BackendError(
                        f"the replica that answered was lost after {num_shown} tokens of the answer were shown: "
                        f"ask again ({error})"
                    ) from None
                num_replays += 1
                if num_replays > self._max_replays:
                    self.counts.num_lost += 1
                    raise QueryLostError(f"{num_replays} replicas were lost, one after another: {error}") from None
                self.counts.num_replayed += 1

    async def attempt(
        self, newest: NewestPrompt, params: SamplingParams, replica: QueryReplica
    ) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of one stream; set `replica` when it has opened. While replicas refuse it, open another
        after a pause, which doubles each time up to `LONGEST_PAUSE_S`, and ends early when the complete prompt comes.
        Raise ReplicaLostError if the replica is lost."""
        pause_s = FIRST_PAUSE_S
        while True:
            stream = _Stream(self, newest, params, replica)
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event
            if not stream.is_refused:
                return
            await newest.pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Stream:
    """An attempt to answer a query, or with `draft_ticket` to draft the answer: one stream in one replica."""

    def __init__(
        self,
        streams: ReplicaStreams,
        newest: NewestPrompt,
        params: SamplingParams,
        replica: QueryReplica,
        draft_ticket: DraftTicket | None = None,
    ) -> None:
        self._replicas = streams.replicas
        self._chooser = streams.chooser
        self._caller_id = streams.caller_id
        self._newest = newest
        self._params = params
        self._replica = replica
        self._draft_ticket = draft_ticket
        self._id = uuid.uuid4().hex
        self._replica_id: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_refused = False
        self._has_shown = False

    async def events(self) -> AsyncGenerator[BackendEvent, None]:
        """Open the stream, send it each newer prompt, and yield its events to their end; none if `is_refused`. Raises
        errors of `_follow` and of the connection, and meanwhile of `_push` and of reading prompts."""
        first, number = await self._newest.wait_for_newer(0), self._newest.number
        ticket = self._draft_ticket or self._chooser.ticket(self._id, first)
        call = Open(self._id, Delta.of(first, number=number, num_shared=0), self._params, self._caller_id, ticket)
        pushing = asyncio.create_task(self._push(first, number), name="push prompts")
        others: set[asyncio.Task[Any]] = {pushing, self._newest.pulling}
        reading: asyncio.Task[tuple[WireEvent, ...] | None] | None = None
        async with aclosing(self._replicas.open(call)) as batches:
            try:
                while not self.is_refused:
                    reading = asyncio.create_task(anext(batches, None), name="read events")
                    while not reading.done():
                        await asyncio.wait({reading, *others}, return_when=asyncio.FIRST_COMPLETED)
                        for done in [task for task in others if task.done() and not reading.done()]:
                            others.remove(done)
                            done.result()
                    batch = reading.result()
                    if batch is None:
                        return
                    for event in batch if isinstance(batch, tuple) else (batch,):
                        for shown in self._follow(event, ticket):
                            yield shown
            finally:
                self._chooser.record_ended(self._id)  # first: the next line raises on a cancellation
                await cancel_and_wait([pushing] if reading is None else [pushing, reading])

    def _follow(self, event: WireEvent, ticket: Ticket | DraftTicket) -> tuple[BackendEvent, ...]:
        """Record an event, and return a tuple of the AnswerChunk or Prefilled, else an empty one. Raise the error of
        Failed, ReplicaLostError if the engine died in an opened stream, and BackendError for an unexpected event."""
        match event:
            case Opened(replica_id) if not self._replica_id.done():
                ticket.record_opened(replica_id)
                self._replica_id.set_result(replica_id)
                self._replica.id = replica_id
                self._replica.has_opened.set()
            case Refused():
                self.is_refused = True
            case Failed():
                error = event.to_error()
                if isinstance(error, EngineDeadError) and self._replica_id.done():
                    self._chooser.record_dead(self._replica_id.result())
                    raise ReplicaLostError(str(error))
                raise error
            case AnswerChunk() if self._replica_id.done():
                if not self._has_shown and self._newest.prompt is not None and isinstance(ticket, Ticket):
                    self._has_shown = True
                    self._chooser.record_computed(self._id, self._newest.prompt.token_ids, self._replica_id.result())
                return (event,)
            case Prefilled(num_tokens) if self._replica_id.done():
                if data := self._newest.find_prefilled_data(num_tokens):
                    replica_id = self._replica_id.result()
                    self._chooser.record_computed(self._id, data.token_ids, replica_id, is_complete=False)
                return (event,)
            case _:
                raise BackendError(
                    f"a replica sent an unexpected {type_name(event)}: do all nodes have the same version of streamrag?"
                )
        return ()

    async def _push(self, sent: Prompt, number: int) -> None:
        """Once a replica has opened the stream, send it the newest prompt whenever there is a new one, up to the
        complete one. Raise ReplicaLostError if the replica has no such stream."""
        while not sent.is_complete:
            replica_id = await asyncio.shield(self._replica_id)
            prompt = await self._newest.wait_for_newer(number)
            number = self._newest.number
            num_shared = common_prefix_len(sent.token_ids, prompt.token_ids)
            delta = Delta.of(prompt, number=number, num_shared=num_shared)
            if not await self._replicas.update(replica_id, self._id, delta):
                raise ReplicaLostError(f"replica {replica_id} has dropped the stream")
            sent = prompt
