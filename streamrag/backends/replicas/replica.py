"""A replica: an engine, its open streams, and its reports."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from streamrag.backends.replicas.wire import Delta, Failed, Open, Opened, Refused, WireEvent
from streamrag.backends.vllm.client.lane_engine import NO_LANE, LaneFacts
from streamrag.core import AnswerChunk, Backend, BackendEvent, Prefilled, Prompt, Startable
from streamrag.errors import EngineDeadError, StreamRagError
from streamrag.routing import Report
from streamrag.routing.soonest import Speed
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_and_wait

MakeBackend: TypeAlias = Callable[[], Backend]

CALLER_TIMEOUT_S = 10.0
"""Seconds without a heartbeat after which a caller counts as killed or unreachable, and its streams are ended."""

HIT_RATE_DECAY = 0.9  # weight of all earlier queries in the average of the cache hit rate


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model behind a replica that callers need. Callers have their own tokenizer."""

    model_name: str
    max_model_len: int
    is_exact: bool
    breaks_look_alikes: bool
    verifies_drafts: bool
    lane_facts: LaneFacts  # of a lane's engine; else `NO_LANE`


class PromptFeed:
    """The newest of a stream's prompts, as the caller sends them. Prompts that are replaced unread are skipped."""

    def __init__(self, first: Delta) -> None:
        self._newest = first.apply_to(())
        self._number = first.number
        self._num_shared = 0  # tokens that the newest prompt shares with the one that was read last
        self._is_new = asyncio.Event()
        self._is_new.set()

    @property
    def num_tokens(self) -> int:
        return len(self._newest.token_ids)

    def accept(self, delta: Delta) -> None:
        """Make the next prompt the newest. Idempotent: a prompt with a number that is not higher changes nothing."""
        if delta.number <= self._number:
            return
        is_read = not self._is_new.is_set()  # else this prompt shares at most what the unread one shared
        self._newest = delta.apply_to(self._newest.token_ids)
        self._number = delta.number
        self._num_shared = delta.num_shared if is_read else min(self._num_shared, delta.num_shared)
        self._is_new.set()

    async def prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield the newest prompt whenever there is a new one, up to the complete one. `num_shared` counts the tokens
        shared with the prompt that was yielded before."""
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
    is_draft: bool = False
    num_prefilled: int = 0
    waited_s: float = 0.0  # the stream's share of the time in which prompts waited
    has_output: bool = False
    is_abandoned: bool = False
    has_more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_queued_tokens(self) -> int:
        return 0 if self.is_draft else max(self.feed.num_tokens - self.num_prefilled, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether more than the last token is left to compute. Engines compute that one with the answer."""
        return self.num_queued_tokens > 1

    def abandon(self) -> None:
        self.is_abandoned = True
        self.has_more.set()


class EngineReplica:
    """An engine that answers the streams that callers open.

    make_backend: creates the engine's backend; the constructor calls it.
    max_open: most concurrent streams; further ones are refused.
    """

    def __init__(self, make_backend: MakeBackend, *, max_open: int, replica_id: str, clock: Clock = monotonic) -> None:
        self._backend = make_backend()
        self._max_open = max_open
        self._replica_id = replica_id
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._heartbeat_s: dict[str, float] = {}  # time of the last heartbeat of each caller that has streams here
        self._hit_rate = 0.0
        self._speed = Speed()
        self._why_dead: str | None = None

    async def start(self) -> None:
        """Start the engine, if its backend has to be started.

        :raises StreamRagError: the engine cannot be started.
        """
        if isinstance(self._backend, Startable):
            await self._backend.start(lambda line: None)

    async def aclose(self) -> None:
        if isinstance(self._backend, Startable):
            await self._backend.aclose()

    def check_health(self) -> None:
        """Check that no stream has found the engine dead, and call the backend's `check_health`, if it has one.

        :raises EngineDeadError: the engine has died.
        """
        if self._why_dead is not None:
            raise EngineDeadError(self._why_dead)
        check = getattr(self._backend, "check_health", None)
        if check is not None:
            check()

    async def generate(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        """Yield the events of a stream in batches of all available ones. Closing the generator aborts the stream.
        The first batch is Opened, or only Refused if `max_open` are open. A StreamRagError is yielded last, as Failed.

        Drafts do not count as open, and are not in reports: they take little time from other streams.
        """
        is_draft = call.first.options.request_class == "draft"
        if self.num_open >= self._max_open and not is_draft:
            yield (Refused(),)
            return
        stream = _Stream(PromptFeed(call.first), call.caller_id, is_draft)
        self._streams[call.stream_id] = stream
        self._update_queue()
        self.record_heartbeat(call.caller_id)
        try:
            yield (Opened(self._replica_id),)
            async with (
                aclosing(stream.feed.prompts()) as prompts,
                aclosing(self._backend.generate(prompts, call.params)) as events,  # type: ignore[type-var]
                aclosing(batch_events(events if is_draft else self._track(stream, events), stream)) as batches,
            ):
                async for batch in batches:
                    yield batch
        except StreamRagError as error:
            if isinstance(error, EngineDeadError):
                self._why_dead = str(error)
            yield (Failed.of(error),)
        finally:
            del self._streams[call.stream_id]
            self._update_queue()

    def update(self, stream_id: str, delta: Delta) -> bool:
        """Accept a stream's next prompt, whose tokens after the shared prefix count as not computed, and return True.

        Does nothing and returns False if no such stream is open.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            return False
        stream.feed.accept(delta)
        stream.num_prefilled = min(stream.num_prefilled, delta.num_shared)
        self._update_queue()
        return True

    def record_heartbeat(self, caller_id: str) -> None:
        self._heartbeat_s[caller_id] = self._clock()

    def end_abandoned(self) -> None:
        """End the streams of callers without a heartbeat for `CALLER_TIMEOUT_S`. Forget callers without streams."""
        deadline_s = self._clock() - CALLER_TIMEOUT_S
        for stream in self._streams.values():
            if self._heartbeat_s[stream.caller_id] < deadline_s:
                stream.abandon()
        callers = {stream.caller_id for stream in self._streams.values()}
        self._heartbeat_s = {name: at_s for name, at_s in self._heartbeat_s.items() if name in callers}

    async def _track(self, stream: _Stream, events: AsyncIterator[BackendEvent]) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events unchanged, after recording each for the reports."""
        async for event in events:
            if isinstance(event, Prefilled):
                stream.num_prefilled = event.num_tokens
                self._record_prefill(stream)
            else:
                self._record_answer(stream, event)
            yield event

    def _record_answer(self, stream: _Stream, event: AnswerChunk) -> None:
        """Count the prompt as computed at the first output, and add a record to the hit rate and the speed."""
        if not stream.has_output:
            stream.has_output = True
            stream.num_prefilled = stream.feed.num_tokens
            self._record_prefill(stream)
        record = event.record
        if record is not None and record.num_prompt_tokens:
            hit_rate = record.num_from_cache / record.num_prompt_tokens
            self._hit_rate = HIT_RATE_DECAY * self._hit_rate + (1 - HIT_RATE_DECAY) * hit_rate
            self._speed.add(record.num_computed, stream.waited_s, self._clock())

    def _record_prefill(self, stream: _Stream) -> None:
        if not stream.is_waiting:
            stream.waited_s += self._speed.computed(self._clock())
        self._update_queue()

    def _update_queue(self) -> None:
        self._speed.waiting(any(stream.is_waiting for stream in self._streams.values()), self._clock())

    def facts(self) -> ModelFacts:
        """Return the facts about the backend's model."""
        model = self._backend.model
        of_model = model.name, model.max_model_len, model.is_exact, model.breaks_look_alikes, model.verifies_drafts
        return ModelFacts(*of_model, getattr(self._backend, "lane_facts", NO_LANE))

    @property
    def num_open(self) -> int:
        """Number of open streams, without drafts."""
        return sum(not stream.is_draft for stream in self._streams.values())

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens that are not known to be computed."""
        return sum(each.num_queued_tokens for each in self._streams.values())

    def report(self) -> Report:
        """Return the report for routers. KV usage and capacity are 0 for a backend that does not have `kv_use`."""
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
        """Return `report` as plain values, with `reported_s`, which differs each time."""
        return {**asdict(self.report()), "reported_s": self._clock()}


async def batch_events(
    events: AsyncIterator[BackendEvent], stream: _Stream
) -> AsyncGenerator[tuple[BackendEvent, ...], None]:
    """Yield batches of all events since the last batch; of several Prefilled in a row only the last. Stop early if the
    stream is abandoned; raise an error of `events` after the last batch."""
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
        await cancel_and_wait([pulling])
