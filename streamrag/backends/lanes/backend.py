"""A backend of prefill lanes, which compute prompts while these grow, and of decode lanes, which sample the answers.

    prompts        ──P1────P2──────P3 (complete)
    prefill lane     [P1, P2, P3 when they arrive]         one token ends the prompt, and is dropped
    NIXL                                          ══▶      KV, except blocks that the decode lane has
    decode lane                                      [───▶ AnswerChunk, AnswerChunk, ...

A query for which no decode lane has room waits with its prompt still partial: the prefill lane may evict its KV, and no
lease runs. A lane that dies is not used again until the backend is restarted; on Ray, it is replaced.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from streamrag.backends.lanes.kv_transfer import (
    KV_TRANSFER_KEY,
    MAX_KV_AGE_S,
    PREFILL_PARAMS,
    KvTransfer,
    PrefillEnd,
    extra_args_of,
    with_kv_transfer,
)
from streamrag.backends.lanes.lane_choice import LaneReservation, Lanes, check_common
from streamrag.backends.replicas.newest_prompt import NewestPrompt
from streamrag.backends.replicas.replica_streams import ReplicaLostError
from streamrag.backends.vllm.client.lane_engine import MAX_READ_S, READ_BY_KEY
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Progress, Prompt, SamplingParams, only
from streamrag.core.lifecycle import start_all, started_once
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError
from streamrag.routing import make_router
from streamrag.support.clock import monotonic, seconds_since_boot
from streamrag.support.tasks import cancel_and_wait, run_shielded
from streamrag.support.validation import Count, CountOrZero, validated

log = logging.getLogger("streamrag.lanes")

MAX_FETCH_S = 60.0  # until a decode lane begins an answer whose KV it fetches; then it computes the prompt

Answerer: TypeAlias = Callable[[TokenStream | PrefillEnd], AsyncGenerator[AnswerChunk, None]]
"""Yields the answer to a prompt whose prefill has ended."""


class LaneLostError(Exception):
    """A lane has died. Not visible outside this package."""


def engine_options(options: Mapping[str, Any], kind: str, number: int, num_engines: int) -> dict[str, Any]:
    """Return the options of the engine of this number: with its part of the devices in `engine_args["device_ids"]`, if
    there are any, and for a decode engine none of our scheduler.

    :raises ConfigurationError: the devices cannot be divided among the engines.
    """
    engine_args = dict(options.get("engine_args") or {})
    if device_ids := engine_args.get("device_ids"):
        num_each, rest = divmod(len(device_ids), num_engines)
        if rest:
            raise ConfigurationError(f"device_ids={device_ids} cannot be divided among {num_engines} lanes")
        engine_args["device_ids"] = device_ids[number * num_each : (number + 1) * num_each]
    of_scheduler = {"scheduler", "host_kv_bytes"} if kind == "decode" else set()
    return {name: value for name, value in options.items() if name not in of_scheduler} | {"engine_args": engine_args}


class DisaggregatedBackend:
    """Engines that compute prompts, and others that sample the answers. KV moves between them over NIXL.

    All lanes must have the same model, `max_model_len`, dtype and block size. Drafts of answers are not verified.

    prefill: backends made with `VllmBackend(lane="prefill")`.
    decode: backends made with `VllmBackend(lane="decode")`.
    router: how a lane is chosen: "soonest", "round_robin" or "consistent_hash".
    max_open: most queries in a decode lane at a time, up to its engine's `max_num_seqs`. Further ones wait in their
        prefill lanes, as do those whose prompts do not fit into the lane's KV cache beside the others'.
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
        self._max_replays = max_replays
        self.on_transfer: Callable[[KvTransfer], None] = lambda transfer: None  # called when a decode lane begins
        self._engines: AsyncExitStack | None = None
        self._prefill_lanes: Lanes | None = None
        self._decode_lanes: Lanes | None = None

    @classmethod
    def of(cls, model: str, *, prefill: int = 1, decode: int = 1, **options: Any) -> "DisaggregatedBackend":
        """Return a backend with so many engines of each kind, which it makes with these options of `VllmBackend`.

        The devices in `engine_args["device_ids"]`, if there are any, are divided among the engines in this order.

        :raises ConfigurationError: the devices cannot be divided, or an option has an invalid value.
        """
        from streamrag.backends.vllm import VllmBackend

        kinds = ["prefill"] * prefill + ["decode"] * decode
        made = [
            VllmBackend(model, lane=kind, **engine_options(options, kind, number, len(kinds)))  # type: ignore[arg-type]
            for number, kind in enumerate(kinds)
        ]
        return cls(made[:prefill], made[prefill:])

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
        self._engines = await start_all(self._backends.values(), progress)
        try:
            check_common({name: backend.lane_facts.common for name, backend in self._backends.items()})
        except ConfigurationError:
            await self.aclose()
            raise
        self._prefill_lanes = self._make_lanes("prefill", None)
        self._decode_lanes = self._make_lanes("decode", self._max_open)

    def _make_lanes(self, kind: str, max_open: int | None) -> Lanes:
        lanes = {name: backend for name, backend in self._backends.items() if name.startswith(kind)}
        return Lanes(lanes, make_router(self._router), max_open=max_open)

    async def aclose(self) -> None:
        """Stop all engines. Does nothing if the backend is not started."""
        engines, self._engines, self._prefill_lanes, self._decode_lanes = self._engines, None, None, None
        self.is_started = False
        if engines is not None:
            await run_shielded(engines.aclose(), "lanes close")

    def check_health(self) -> None:
        """Check that a lane of each kind runs.

        :raises EngineDeadError: all lanes of a kind are dead.
        :raises BackendError: the backend was not started, or was closed.
        """
        for lanes in self._started_lanes():
            lanes.find_alive()

    def _started_lanes(self) -> tuple[Lanes, Lanes]:
        if self._prefill_lanes is None or self._decode_lanes is None:
            raise BackendError("the lanes are not running: they were closed, or not started")
        return self._prefill_lanes, self._decode_lanes

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, in one prefill lane, and answer the complete one in a decode lane.

        :raises BackendError: a lane died after the first output, too many died before, or none of its kind is left.
        :raises ConfigurationError: `params` say which KV to transfer, or as `VllmBackend.generate` does.
        :raises StreamRagError: as `VllmBackend.generate` does.
        """
        prefill_lanes, decode_lanes = self._started_lanes()
        self._backends[decode_lanes.find_alive()[0]].check_params(params)
        if KV_TRANSFER_KEY in extra_args_of(params):  # they could name another query's KV, or another host
            raise ConfigurationError(f"SamplingParams.extra: extra_args[{KV_TRANSFER_KEY!r}] is reserved for lanes")
        num_shown = num_lost = 0
        async with aclosing(NewestPrompt(prompts)) as newest:
            while True:
                attempt = _Attempt(
                    prefill_lanes,
                    decode_lanes,
                    newest,
                    params,
                    prefill_then_answer=self._prefill_then_answer,
                    on_transfer=self.on_transfer,
                )
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

    def _prefill_then_answer(
        self, lane: Any, first: Prompt, prompts: AsyncIterator[Prompt], params: SamplingParams, answer: Answerer
    ) -> AsyncGenerator[BackendEvent, None]:
        """Compute prompts in a prefill lane, and yield how far the newest is prefilled, then the chunks of `answer`.

        first: the query's first prompt, known before `prompts` yields it.
        params: parameters of the answer.
        """
        return stream_then_generate(prompts, lane.streams, PREFILL_PARAMS, answer)


@dataclass(eq=False)
class _Attempt:
    """An attempt to answer a query, in one prefill lane and one decode lane."""

    prefill_lanes: Lanes
    decode_lanes: Lanes
    newest: NewestPrompt
    params: SamplingParams
    prefill_then_answer: Callable[..., AsyncGenerator[BackendEvent, None]]  # that of the backend
    on_transfer: Callable[[KvTransfer], None]
    _prefill_room: LaneReservation | None = None
    _decode_room: LaneReservation | None = None

    async def events(self) -> AsyncGenerator[BackendEvent, None]:
        """Yield the events of the answer; raise LaneLostError if a lane dies, and other errors of its backend."""
        try:
            async with aclosing(self._prompts()) as prompts:
                # For log-probabilities of a prompt, vLLM computes all of it, so fetched KV would not be used.
                is_alone = self.params.extra.get("prompt_logprobs") is not None
                answer = self._decode_alone if is_alone else self._prefill_and_decode
                async with aclosing(answer(prompts)) as events:
                    async for event in events:
                        yield event
        finally:
            self._release_prefill()
            if self._decode_room is not None:
                self.decode_lanes.release(self._decode_room)

    def _release_prefill(self) -> None:
        if self._prefill_room is not None:
            self.prefill_lanes.release(self._prefill_room)

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        """Yield the newest prompt whenever there is a new one. Yield the complete one once room in a decode lane is
        reserved for it; if the query must wait for that, yield it as a partial prompt before."""
        number = 0
        while True:
            prompt = replace(await self.newest.wait_for_newer(number), num_shared=0)  # prompts may have been skipped
            number = self.newest.number
            if prompt.is_complete:
                self._decode_room = self.decode_lanes.try_reserve(prompt, self.params.n)
                if self._decode_room is None:
                    yield replace(prompt, is_complete=False)
                    self._decode_room = await self.decode_lanes.reserve(prompt, self.params.n)
                yield prompt
                return
            yield prompt

    async def _prefill_and_decode(self, prompts: AsyncIterator[Prompt]) -> AsyncGenerator[BackendEvent, None]:
        """Compute the prompts in a prefill lane, and answer the complete one in a decode lane."""
        first = await self.newest.wait_for_newer(0)
        self._prefill_room = room = await self.prefill_lanes.reserve(first)
        answering = self.prefill_then_answer(room.backend, first, prompts, self.params, self._decode_prefilled)
        try:
            async with aclosing(answering) as events:
                async for event in events:
                    if isinstance(event, Prefilled) and (data := self.newest.find_prefilled_data(event.num_tokens)):
                        self.prefill_lanes.record_computed(room, replace(data, is_complete=False))
                    yield event
        except (EngineDeadError, ReplicaLostError) as error:
            raise LaneLostError(f"{room.lane} was lost: {error}") from None

    async def _decode_alone(self, prompts: AsyncIterator[Prompt]) -> AsyncGenerator[BackendEvent, None]:
        """Answer the complete prompt in a decode lane, which computes it too."""
        async for prompt in prompts:
            if prompt.is_complete:
                async with aclosing(self._decode(prompt, self.params)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _decode_prefilled(self, stream: TokenStream | PrefillEnd) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer to a computed prompt from the decode lane, which fetches its KV, or computes the prompt too
        if the KV may be gone soon or does not come. Raise LaneLostError if the decode lane dies."""
        assert stream.record is not None
        assert self._prefill_room is not None
        assert self.newest.prompt is not None
        conversation_id = self.newest.prompt.conversation_id
        prompt = Prompt(stream.token_ids, is_complete=True, conversation_id=conversation_id)
        self.prefill_lanes.record_computed(self._prefill_room, prompt)
        params, ended_s = self.params, stream.record.finished_s
        # Each of several answers is a request, and KV can be fetched once. So a request of one token, which is dropped,
        # fetches it, and those of the answers find it in the prefix cache.
        is_for_cache = params.n > 1
        is_fetched = False
        # The KV is old if this process was held up. Both times are by this host's clock.
        if monotonic() - ended_s <= MAX_KV_AGE_S:
            fetch_params = SamplingParams(max_tokens=1) if is_for_cache else params
            # The boot clock is read first: should this process stop in between, the time is too early, not too late.
            read_by_s = seconds_since_boot() + MAX_READ_S - (monotonic() - ended_s)
            fetch_params = with_kv_transfer(fetch_params, {**stream.kv_transfer, READ_BY_KEY: read_by_s})
            async with aclosing(self._decode_with_kv(prompt, fetch_params)) as chunks:
                async for chunk in chunks:
                    if not is_fetched:
                        is_fetched = True
                        self._report_transfer(stream, monotonic() - ended_s)
                    if not is_for_cache:
                        yield chunk
        if is_for_cache or not is_fetched:
            async with aclosing(self._decode(prompt, params)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _decode_with_kv(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
        """Yield as `_decode` does, with `params` of `with_kv_transfer`; nothing without a token within `MAX_FETCH_S`.

        A transfer that hangs cannot be told from a decode lane that is slow. With the request, its heartbeats end, and
        so does the lease in the prefill lane. The decode lane keeps its blocks until the transfer ends, if it does.
        """
        async with aclosing(self._decode(prompt, params)) as chunks:
            try:
                async with asyncio.timeout(MAX_FETCH_S):
                    first = await anext(chunks)
            except TimeoutError:
                assert self._decode_room is not None
                text = "no first token %g s after the KV transfer was requested: %s computes the prompt"
                log.warning(text, MAX_FETCH_S, self._decode_room.lane)
                return
            yield first
            async for chunk in chunks:
                yield chunk

    async def _decode(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[AnswerChunk, None]:
        """Yield the answer to a complete prompt from the decode lane; raise LaneLostError if that lane dies."""
        room = self._decode_room
        assert room is not None
        is_first = True
        try:
            async with aclosing(only(prompt)) as prompts, aclosing(room.backend.generate(prompts, params)) as events:
                async for event in events:
                    if isinstance(event, AnswerChunk):
                        if is_first:
                            is_first = False
                            self.decode_lanes.record_computed(room, prompt)
                            self._release_prefill()
                        yield event
        except (EngineDeadError, ReplicaLostError) as error:
            raise LaneLostError(f"{room.lane} was lost: {error}") from None

    def _report_transfer(self, stream: TokenStream | PrefillEnd, seconds: float) -> None:
        prefill, decode, num_tokens = self._prefill_room, self._decode_room, len(stream.token_ids)
        assert prefill is not None
        assert decode is not None
        num_blocks = sum(len(group) for group in stream.kv_transfer.get("remote_block_ids", ()))
        self.on_transfer(KvTransfer(prefill.lane, decode.lane, num_tokens, num_blocks, seconds))


async def _read_ahead(events: AsyncGenerator[BackendEvent, None]) -> AsyncGenerator[BackendEvent, None]:
    """Yield events that a task reads as they come, so that a caller that pauses neither keeps a lane's room reserved,
    nor lets a lease end."""
    # Unbounded, as a bound would stop the reader: an answer has `max_tokens` chunks at most.
    read: asyncio.Queue[BackendEvent | None] = asyncio.Queue()

    async def read_all() -> None:
        async with aclosing(events):
            async for event in events:
                read.put_nowait(event)

    reading = asyncio.create_task(read_all(), name="read the events of lanes")
    reading.add_done_callback(lambda _: read.put_nowait(None))
    try:
        while (event := await read.get()) is not None:
            yield event
        await reading
    finally:
        await cancel_and_wait([reading])
