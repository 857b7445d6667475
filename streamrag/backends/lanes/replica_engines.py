"""The engines of lanes in replicas, such as those on Ray Serve: they pass on in messages how KV is read.

prefill replica   PrefillEngine ──▶ PrefillEnd with `kv_transfer` and its age
service           puts `kv_transfer` into the parameters of the answer
decode replica    DecodeEngine ──▶ reads the KV, or computes the prompt if the KV may be gone soon
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from streamrag.backends.lanes.backend import LATEST_S, SEND
from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.core import AnswerChunk, BackendEvent, Prompt, SamplingParams
from streamrag.support.clock import monotonic

log = logging.getLogger("streamrag.lanes")

ENDED_AT = "streamrag_ended_at"
"""Key in `kv_transfer` of the time at which the prefill ended, by the wall clock: lanes may be on different nodes."""


@dataclass(frozen=True, slots=True)
class PrefillEnd(AnswerChunk):
    """The end of a prefill in a replica, with no tokens."""

    kv_transfer: dict[str, Any] = field(default_factory=dict)  # with which another engine reads the KV


class PrefillEngine(VllmBackend):
    """The engine of a prefill lane in a replica."""

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, and end with a `PrefillEnd`. `params` are those of the answer: they are
        checked before anything is computed. Raises as `VllmBackend.generate` does."""
        self.check_params(params)
        async with aclosing(stream_then_generate(prompts, self.streams, SEND, _end)) as events:
            async for event in events:
                yield event


async def _end(stream: TokenStream) -> AsyncGenerator[AnswerChunk, None]:
    assert stream.record is not None
    ended_at = time.time() - (monotonic() - stream.record.finished_s)
    yield PrefillEnd("", (), "length", kv_transfer={**stream.kv_transfer, ENDED_AT: ended_at})


class DecodeEngine(VllmBackend):
    """The engine of a decode lane in a replica."""

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Answer a complete prompt, with its KV if that is recent. Raises as `VllmBackend.generate` does."""
        async with aclosing(super().generate(prompts, without_old_kv(params))) as events:
            async for event in events:
                yield event


def without_old_kv(params: SamplingParams) -> SamplingParams:
    """Return the parameters without `kv_transfer_params` if the prefill ended more than `LATEST_S` ago, because the
    query waited for a replica, or more than a second from now, because the clocks of the nodes disagree."""
    extra_args = dict(params.extra.get("extra_args") or {})
    transfer = dict(extra_args.pop("kv_transfer_params", {}))
    if not transfer:
        return params
    age_s = time.time() - transfer.pop(ENDED_AT)
    if -1 <= age_s <= LATEST_S:
        extra_args["kv_transfer_params"] = transfer
    elif age_s < -1:
        log.warning("the clock of a prefill lane's node is %.1f s ahead: its KV is not read", -age_s)
    return replace(params, extra={**params.extra, "extra_args": extra_args})
