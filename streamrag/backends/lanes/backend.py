"""A backend of prefill lanes, which compute prompts while these grow, and of decode lanes, which sample the answers.

    prompts        ──P1────P2──────P3 (complete)
    prefill lane     [P1, P2, P3 when they arrive]         one token ends the prompt, and is dropped
    NIXL                                          ══▶      KV, except blocks that the decode lane has
    decode lane                                      [───▶ AnswerChunk, AnswerChunk, ...

A query for which no decode lane has room waits with its prompt still open: its KV stays in the prefill lane, which may
evict it, and no lease runs. A lane that dies is not used again until the backend is restarted; on Ray, it is replaced.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from streamrag.backends.lanes.lane_choice import Lanes, LaneSeat, check_same
from streamrag.backends.ray.replica_streams import NewestPrompt, ReplicaLostError
from streamrag.backends.vllm.client.lane_engine import LEASE_S
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Progress, Prompt, SamplingParams
from streamrag.core.lifecycle import start_all, started_once
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError
from streamrag.query.answer_ahead import only
from streamrag.routing import make_router
from streamrag.support.clock import monotonic
from streamrag.support.messages import short_repr
from streamrag.support.tasks import cancel_and_wait, run_shielded
from streamrag.support.validation import Count, CountOrZero, Seconds, validated

log = logging.getLogger("streamrag.lanes")

if TYPE_CHECKING:
    from streamrag.backends.lanes.replica_engines import PrefillEnd

Answer: TypeAlias = Callable[["TokenStream | PrefillEnd"], AsyncGenerator[AnswerChunk, None]]
"""Answers a prompt whose prefill has ended."""

LATEST_S = LEASE_S / 2
"""Seconds after the end of a prefill in which its KV may be fetched: the decode lane must extend the lease in time."""

KV_PARAMS = "kv_transfer_params"

SEND = SamplingParams(max_tokens=1, extra={"extra_args": {KV_PARAMS: {"do_remote_decode": True}}})
"""Parameters of a prefill, which tell vLLM's connector that the KV will be fetched."""


class LaneLostError(Exception):
    """A lane has died. Not visible outside this package."""


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A prompt that passed from a prefill lane to a decode lane."""

    prefill_lane: str
    decode_lane: str
    num_tokens: int
    num_blocks: int  # KV blocks in the prefill lane; the decode lane fetches those that it does not have
    seconds: float  # from the end of the prefill to the first output of the decode lane


class LanesBackend:
    """Engines that compute prompts, and others that sample the answers. KV moves between them over NIXL.

    All lanes must have the same model, `max_model_len`, dtype and block size. Drafts of answers are not verified.

    prefill: backends made with `VllmBackend(lane="prefill")`.
    decode: backends made with `VllmBackend(lane="decode")`.
    router: how a lane is chosen: "soonest", "round_robin" or "consistent_hash".
    max_open: most queries in a decode lane at a time, up to its engine's `max_num_seqs`. Further ones wait in their
        prefill lanes, as do those whose prompts do not fit into the lane's KV cache beside the others'.
    max_fetch_s: most seconds until a decode lane begins an answer whose KV it reads. Then it computes the prompt.
    max_replays: most times that a query without output is computed again because a lane died.

    :raises ConfigurationError: there are not both kinds of lanes, or a backend is not of its kind.
    """

    @validated
    def __init__(
        self,
        prefill: Sequence[Any],
        decode: Sequence[Any],
        *,
        router: str = "soonest",
        max_open: Count = 64,
        max_fetch_s: Seconds = 60.0,
        max_replays: CountOrZero = 3,
    ) -> None:
        make_router(router)  # raises for a name that does not exist
        self._backends: dict[str, Any] = {}
        for kind, backends in (("prefill", prefill), ("decode", decode)):
            if not backends or any(getattr(backend, "lane", None) != kind for backend in backends):
                raise ConfigurationError(f'{kind}={backends!r} must be one or more VllmBackend(lane="{kind}")')
            self._backends |= {f"{kind}-{number}": backend for number, backend in enumerate(backends)}
        self._router = router
        self._max_open = max_open
        self._max_fetch_s = max_fetch_s
        self._max_replays = max_replays
        self.on_transfer: Callable[[KvTransfer], None] = lambda transfer: None  # called when a decode lane begins
        self._started: Any = None
        self._prefill: Lanes | None = None
        self._decode: Lanes | None = None

    @property
    def model(self) -> ModelInfo:
        """The model of all lanes; raises BackendError before the start."""
        model: ModelInfo = self._backends["prefill-0"].model
        return model

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the engines of all lanes. If one fails, close the others.

        :raises ConfigurationError: the lanes differ in what they must have in common.
        :raises StreamRagError: as `VllmBackend.start`.
        """
        self._started = await start_all(self._backends.values(), progress)
        try:
            check_same({name: backend.lane_facts.common for name, backend in self._backends.items()})
        except ConfigurationError:
            await self.aclose()
            raise
        self._prefill = self._make_lanes("prefill", None)
        self._decode = self._make_lanes("decode", self._max_open)

    def _make_lanes(self, kind: str, max_open: int | None) -> Lanes:
        lanes = {name: backend for name, backend in self._backends.items() if name.startswith(kind)}
        return Lanes(lanes, make_router(self._router), max_open=max_open)

    async def aclose(self) -> None:
        """Stop all engines. Does nothing if the backend is not started."""
        started, self._started, self._prefill, self._decode = self._started, None, None, None
        self.is_started = False
        if started is not None:
            await run_shielded(started.aclose(), "lanes close")

    def check_health(self) -> None:
        """Check that a lane of each kind runs.

        :raises EngineDeadError: all lanes of a kind are dead.
        :raises BackendError: the backend was not started, or was closed.
        """
        for lanes in self._started_lanes():
            lanes.alive()

    def _started_lanes(self) -> tuple[Lanes, Lanes]:
        if self._prefill is None or self._decode is None:
            raise BackendError("the lanes are not running: they were closed, or not started")
        return self._prefill, self._decode

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, in one prefill lane, and answer the complete one in a decode lane.

        :raises BackendError: a lane died after the first output, too many died before, or none of its kind is left.
        :raises ConfigurationError: `params` say which KV to transfer, or as `VllmBackend.generate` does.
        :raises StreamRagError: as `VllmBackend.generate` does.
        """
        prefill, decode = self._started_lanes()
        self._backends[decode.alive()[0]].check_params(params)
        if KV_PARAMS in _extra_args_of(params):  # it could name another query's KV, or another host
            raise ConfigurationError(f"SamplingParams.extra: extra_args[{KV_PARAMS!r}] is reserved for lanes")
        num_shown = num_lost = 0
        async with aclosing(NewestPrompt(prompts)) as newest:
            while True:
                attempt = _Attempt(prefill, decode, newest, params, self._compute, self.on_transfer, self._max_fetch_s)
                try:
                    async with aclosing(_read_ahead(attempt.events())) as events:
                        async for event in events:
                            if isinstance(event, AnswerChunk):
                                num_shown += max(len(event.token_ids), bool(event.text))
                            yield event
                    return
                except LaneLostError as error:
                    num_lost += 1
                    if num_shown:
                        raise BackendError(f"{error}, after {num_shown} tokens were shown: ask again") from None
                    if num_lost > self._max_replays:
                        raise BackendError(f"{num_lost} lanes were lost, one after another: {error}") from None

    def _compute(
        self, lane: Any, first: Prompt, prompts: AsyncIterator[Prompt], params: SamplingParams, answer: Answer
    ) -> AsyncGenerator[BackendEvent, None]:
        """Compute prompts in a prefill lane, and yield how far the newest is prefilled, then the answer.

        first: the query's first prompt, which may be known before `prompts` yields it.
        params: those of the answer.
        """
        return stream_then_generate(prompts, lane.streams, SEND, answer)


class _Attempt:
    """An attempt to answer a query, in one prefill lane and one decode lane."""

    def __init__(
        self,
        prefill: Lanes,
        decode: Lanes,
        newest: NewestPrompt,
        params: SamplingParams,
        compute: Callable[..., AsyncGenerator[BackendEvent, None]],
        on_transfer: Callable[[KvTransfer], None],
        max_fetch_s: float,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._newest = newest
        self._params = params
        self._compute = compute
        self._on_transfer = on_transfer
        self._max_fetch_s = max_fetch_s
        self._prefill_seat: LaneSeat | None = None
        self._decode_seat: LaneSeat | None = None

    async def events(self) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of the answer; raise LaneLostError if a lane dies, and else as its backend does."""
        try:
            async with aclosing(self._prompts()) as prompts:
                # vLLM computes all of a prompt for its log-probabilities, so its KV would be fetched in vain.
                is_alone = self._params.extra.get("prompt_logprobs") is not None
                async with aclosing((self._answer_alone if is_alone else self._answer_both)(prompts)) as events:
                    async for event in events:
                        yield event
        finally:
            self._leave_prefill()
            if self._decode_seat is not None:
                self._decode.leave(self._decode_seat)

    def _leave_prefill(self) -> None:
        if self._prefill_seat is not None:
            self._prefill.leave(self._prefill_seat)

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield the newest prompt whenever there is a new one. Yield the complete one when a decode lane has room for
        it, and until then as a partial prompt."""
        number = 0
        while True:
            prompt = replace(await self._newest.after(number), num_shared=0)  # prompts may have been skipped
            number = self._newest.number
            if prompt.is_complete:
                self._decode_seat = self._decode.take_now(prompt, self._params.n)
                if self._decode_seat is None:
                    yield replace(prompt, is_complete=False)
                    self._decode_seat = await self._decode.take(prompt, self._params.n)
                yield prompt
                return
            yield prompt

    async def _answer_both(self, prompts: AsyncIterator[Prompt]) -> AsyncGenerator[BackendEvent, None]:
        """Compute the prompts in a prefill lane, and answer the complete one in a decode lane."""
        first = await self._newest.after(0)
        self._prefill_seat = seat = await self._prefill.take(first)
        try:
            answer = partial(self._answer, seat)
            async with aclosing(self._compute(seat.backend, first, prompts, self._params, answer)) as events:
                async for event in events:
                    if isinstance(event, Prefilled):
                        self._record_prefill(seat, event.num_tokens)
                    yield event
        except (EngineDeadError, ReplicaLostError) as error:
            raise LaneLostError(f"{seat.lane} was lost: {error}") from None

    def _record_prefill(self, seat: LaneSeat, num_tokens: int) -> None:
        """Record a session's data as cached in the lane, for its questions, if all but one token are computed."""
        prompt = self._newest.prompt
        if prompt is not None and prompt.request_class == "stream" and num_tokens >= len(prompt.token_ids) - 1:
            self._prefill.computed(seat, replace(prompt, is_complete=False))

    async def _answer_alone(self, prompts: AsyncIterator[Prompt]) -> AsyncGenerator[BackendEvent, None]:
        """Answer the complete prompt in a decode lane, which computes it too."""
        async for prompt in prompts:
            if prompt.is_complete:
                async with aclosing(self._decoded(prompt, self._params)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _answer(self, prefill: LaneSeat, stream: "TokenStream | PrefillEnd") -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer to a computed prompt from the decode lane, which fetches its KV, or computes the prompt too
        if the KV may be gone soon or does not come. Raise LaneLostError if the decode lane dies."""
        assert stream.record is not None
        prompt = Prompt(stream.token_ids, 0, is_complete=True)
        self._prefill.computed(prefill, prompt)
        params, ended_s = self._params, stream.record.finished_s
        # KV can be fetched once, and each answer is a request: several find it in the prefix cache.
        is_for_cache = params.n > 1
        is_fetched = False
        # This process may have been held up. Both clocks are this host's.
        if monotonic() - ended_s <= LATEST_S:
            fetching = _fetching(SamplingParams(max_tokens=1) if is_for_cache else params, stream.kv_transfer)
            async with aclosing(self._fetched(prompt, fetching)) as chunks:
                async for chunk in chunks:
                    if not is_fetched:
                        is_fetched = True
                        self._report(prefill, stream, monotonic() - ended_s)
                    if not is_for_cache:
                        yield chunk
        if is_for_cache or not is_fetched:
            async with aclosing(self._decoded(prompt, params)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _fetched(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
        """Yield as `_decoded` does, with parameters that have the KV fetched; nothing if that takes `max_fetch_s`.

        A transfer that hangs is not told from a decode lane that is slow. Ending its request ends the heartbeats, and
        so frees the KV in the prefill lane. The decode lane keeps its blocks until the transfer ends, if it does.
        """
        async with aclosing(self._decoded(prompt, params)) as chunks:
            try:
                async with asyncio.timeout(self._max_fetch_s):
                    first = await anext(chunks)
            except TimeoutError:
                assert self._decode_seat is not None
                text = "no first token %g s after the KV transfer was requested: %s computes the prompt"
                log.warning(text, self._max_fetch_s, self._decode_seat.lane)
                return
            yield first
            async for chunk in chunks:
                yield chunk

    async def _decoded(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer to a complete prompt from the decode lane; raise LaneLostError if that dies."""
        seat = self._decode_seat
        assert seat is not None
        is_first = True
        try:
            async with aclosing(only(prompt)) as prompts, aclosing(seat.backend.generate(prompts, params)) as events:
                async for event in events:
                    if isinstance(event, AnswerChunk):
                        if is_first:
                            is_first = False
                            self._decode.computed(seat, prompt)
                            self._leave_prefill()
                        yield event
        except (EngineDeadError, ReplicaLostError) as error:
            raise LaneLostError(f"{seat.lane} was lost: {error}") from None

    def _report(self, prefill: LaneSeat, stream: "TokenStream | PrefillEnd", seconds: float) -> None:
        assert self._decode_seat is not None
        num_blocks = sum(len(group) for group in stream.kv_transfer.get("remote_block_ids", ()))
        self._on_transfer(KvTransfer(prefill.lane, self._decode_seat.lane, len(stream.token_ids), num_blocks, seconds))


async def _read_ahead(events: AsyncGenerator[BackendEvent, None]) -> AsyncGenerator[BackendEvent, None]:
    """Yield events that a task reads as they come: a reader that pauses holds no seat, and lets no lease end."""
    send, receive = anyio.create_memory_object_stream[BackendEvent](math.inf)

    async def read() -> None:
        with send:
            async with aclosing(events):
                async for event in events:
                    send.send_nowait(event)

    reading = asyncio.create_task(read(), name="read the events of lanes")
    with receive:
        try:
            async for event in receive:
                yield event
            await reading
        finally:
            await cancel_and_wait([reading])


def _extra_args_of(params: SamplingParams) -> Mapping[str, Any]:
    """Return what the parameters have for vLLM's connectors and plugins; raise ConfigurationError for no mapping."""
    extra_args = params.extra.get("extra_args") or {}
    if not isinstance(extra_args, Mapping):
        raise ConfigurationError(f"SamplingParams.extra: extra_args={short_repr(extra_args)} must be a mapping")
    return extra_args


def _fetching(params: SamplingParams, transfer: dict[str, Any]) -> SamplingParams:
    """Return the parameters with those of the KV connector, by which vLLM fetches the KV of the prompt."""
    extra_args = {**_extra_args_of(params), KV_PARAMS: transfer}
    return replace(params, extra={**params.extra, "extra_args": extra_args})
