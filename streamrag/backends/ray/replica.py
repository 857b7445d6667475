"""A replica: an engine, the streams that are open in it, and its reports."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from streamrag.backends.ray.wire import Delta, Failed, Open, Opened, Refused, WireEvent
from streamrag.core import AnswerChunk, Backend, BackendEvent, Prefilled, Prompt, Startable
from streamrag.errors import EngineDeadError, StreamRagError
from streamrag.routing import Report
from streamrag.routing.speed import Speed
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_regardless

MakeBackend: TypeAlias = Callable[[], Backend]

SILENT_S = 10.0
"""Seconds after which streams of a silent caller are ended: it was killed, or is out of reach."""

KEPT = 0.9
"""Weight of an earlier query in an average beside the next one."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that callers must know of the model behind a replica. They have a tokenizer of their own."""

    model_name: str
    max_model_len: int
    is_exact: bool
    breaks_look_alikes: bool


class PromptFeed:
    """A stream's prompts as the caller sends them. Holds the newest only: a prompt that is overtaken is left out."""

    def __init__(self, first: Delta) -> None:
        self._newest = first.after(())
        self._number = first.number
        self._num_shared = 0
        """Number of tokens that the newest prompt shares with the one that was pulled last."""
        self._is_new = asyncio.Event()
        self._is_new.set()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the newest prompt."""
        return len(self._newest.token_ids)

    def take(self, delta: Delta) -> None:
        """Take the next prompt. One that was taken before changes nothing."""
        if delta.number <= self._number:
            return
        has_pulled = not self._is_new.is_set()
        self._newest = delta.after(self._newest.token_ids)
        self._number = delta.number
        self._num_shared = delta.num_shared if has_pulled else min(self._num_shared, delta.num_shared)
        self._is_new.set()

    async def prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield each prompt as soon as it is there, up to the complete one."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            prompt, num_shared = self._newest, self._num_shared
            yield replace(prompt, num_shared=num_shared)
            if prompt.is_complete:
                return


@dataclass(slots=True, eq=False)
class _Stream:
    feed: PromptFeed
    caller_id: str
    num_prefilled: int = 0
    waited_s: float = 0.0
    """The stream's share of the time for which prompts have waited."""
    has_shown: bool = False
    is_abandoned: bool = False
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_queued_tokens(self) -> int:
        return max(self.feed.num_tokens - self.num_prefilled, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether more than the last token is to be computed, which engines leave to the answer."""
        return self.num_queued_tokens > 1

    def abandon(self) -> None:
        self.is_abandoned = True
        self.has_more.set()


class EngineReplica:
    """An engine that answers the streams that callers open in it.

    make_backend: makes the engine.
    max_open: most streams at once; it refuses more.
    """

    def __init__(self, make_backend: MakeBackend, *, max_open: int, replica_id: str, clock: Clock = monotonic) -> None:
        self._backend = make_backend()
        self._max_open = max_open
        self._replica_id = replica_id
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._heard_s: dict[str, float] = {}
        """When each caller that has streams here was heard of last."""
        self._hit_rate = 0.0
        self._speed = Speed()
        self._why_dead: str | None = None

    async def start(self) -> None:
        """Start the engine of this replica.

        :raises StreamRagError: it cannot be started.
        """
        if isinstance(self._backend, Startable):
            await self._backend.start(lambda line: None)

    async def aclose(self) -> None:
        """Stop the engine of this replica."""
        if isinstance(self._backend, Startable):
            await self._backend.aclose()

    def check_health(self) -> None:
        """Look at whether the engine lives.

        :raises EngineDeadError: it has died.
        """
        if self._why_dead is not None:
            raise EngineDeadError(self._why_dead)
        check = getattr(self._backend, "check_health", None)
        if check is not None:
            check()

    async def generate(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        """Yield the events of a stream, as many at a time as there are. Closing the generator aborts the stream."""
        if len(self._streams) >= self._max_open:
            yield (Refused(),)
            return
        stream = _Stream(PromptFeed(call.first), call.caller_id)
        self._streams[call.stream_id] = stream
        self._note_queue()
        self.touch(call.caller_id)
        try:
            yield (Opened(self._replica_id),)
            async with (
                aclosing(stream.feed.prompts()) as prompts,
                aclosing(self._backend.generate(prompts, call.params)) as events,  # type: ignore[type-var]
                aclosing(batched(self._noted(stream, events), stream)) as batches,
            ):
                async for batch in batches:
                    yield batch
        except StreamRagError as error:
            if isinstance(error, EngineDeadError):
                self._why_dead = str(error)
            yield (Failed.of(error),)
        finally:
            del self._streams[call.stream_id]
            self._note_queue()

    def update(self, stream_id: str, delta: Delta) -> bool:
        """Take a stream's next prompt. Return whether that stream is here."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return False
        stream.feed.take(delta)
        stream.num_prefilled = min(stream.num_prefilled, delta.num_shared)
        self._note_queue()
        return True

    def touch(self, caller_id: str) -> None:
        """Note that the caller lives."""
        self._heard_s[caller_id] = self._clock()

    def end_abandoned(self) -> None:
        """End the streams of callers that have not been heard of for `SILENT_S`."""
        before_s = self._clock() - SILENT_S
        for stream in self._streams.values():
            if self._heard_s[stream.caller_id] < before_s:
                stream.abandon()
        there = {stream.caller_id for stream in self._streams.values()}
        self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if name in there}

    async def _noted(self, stream: _Stream, events: AsyncIterator[BackendEvent]) -> AsyncGenerator[BackendEvent, None]:
        async for event in events:
            if isinstance(event, Prefilled):
                stream.num_prefilled = event.num_tokens
                self._note_computed(stream)
            else:
                self._note_answer(stream, event)
            yield event

    def _note_answer(self, stream: _Stream, event: AnswerChunk) -> None:
        if not stream.has_shown:
            stream.has_shown = True
            stream.num_prefilled = stream.feed.num_tokens
            self._note_computed(stream)
        record = event.record
        if record is not None and record.num_prompt_tokens:
            found = record.num_from_cache / record.num_prompt_tokens
            self._hit_rate = KEPT * self._hit_rate + (1 - KEPT) * found
            self._speed.add(record.num_computed, stream.waited_s, self._clock())

    def _note_computed(self, stream: _Stream) -> None:
        if not stream.is_waiting:
            stream.waited_s += self._speed.computed(self._clock())
        self._note_queue()

    def _note_queue(self) -> None:
        self._speed.waiting(any(stream.is_waiting for stream in self._streams.values()), self._clock())

    def facts(self) -> ModelFacts:
        """Return the facts of its model."""
        model = self._backend.model
        return ModelFacts(model.name, model.max_model_len, model.is_exact, model.breaks_look_alikes)

    @property
    def num_open(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    @property
    def num_queued_tokens(self) -> int:
        """Number of tokens of prompts that are not known to be computed."""
        return sum(each.num_queued_tokens for each in self._streams.values())

    def report(self) -> Report:
        """Return the report for routers, sent about every half second."""
        use = getattr(self._backend, "kv_use", None)
        held = 0 if use is None else sum(each.num_tokens for each in use.by_state.values())
        num_kv_tokens = 0 if use is None else use.num_capacity
        return Report(
            max_open=self._max_open,
            kv_usage=min(held / num_kv_tokens, 1.0) if num_kv_tokens else 0.0,
            cache_hit_rate=self._hit_rate,
            queued_tokens=self.num_queued_tokens,
            num_kv_tokens=num_kv_tokens,
            tokens_per_s=self._speed.tokens_per_s(self._clock()),
        )

    def stats(self) -> dict[str, Any]:
        """Return `report` in plain values, with `told_s`, which is new each time."""
        return {**asdict(self.report()), "told_s": self._clock()}


async def batched(
    events: AsyncIterator[BackendEvent], stream: _Stream
) -> AsyncGenerator[tuple[BackendEvent, ...], None]:
    """Yield all events that have come since the last were taken; of several Prefilled in a row only the last."""
    waiting: list[BackendEvent] = []

    async def pull() -> None:
        async for event in events:
            if waiting and isinstance(event, Prefilled) and isinstance(waiting[-1], Prefilled):
                waiting.pop()
            waiting.append(event)
            stream.has_more.set()

    pulling = asyncio.create_task(pull(), name="pull events")
    pulling.add_done_callback(lambda task: stream.has_more.set())
    try:
        is_last = False
        while not is_last:
            await stream.has_more.wait()
            stream.has_more.clear()
            if stream.is_abandoned:
                return
            is_last = pulling.done()
            if waiting:
                batch = tuple(waiting)
                waiting.clear()
                yield batch
        await pulling
    finally:
        await cancel_regardless([pulling])
