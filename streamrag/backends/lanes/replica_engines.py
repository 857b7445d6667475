"""The engines of lanes in replicas, such as those on Ray Serve.

prefill replica   PrefillEngine ──▶ PrefillEnd with `kv_transfer`, and in that the time of the end
service           puts `kv_transfer` into the parameters of the answer
decode replica    DecodeEngine ──▶ fetches the KV, or computes the prompt if the KV may be gone soon
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from streamrag.backends.lanes.kv_transfer import KV_TRANSFER_KEY, MAX_KV_AGE_S, PREFILL_PARAMS, PrefillEnd
from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client.lane_engine import MAX_READ_S, READ_BY_KEY
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.core import AnswerChunk, BackendEvent, Prompt, SamplingParams
from streamrag.support.clock import monotonic, seconds_since_boot

log = logging.getLogger("streamrag.lanes")

ENDED_AT = "streamrag_ended_at"
"""Key in `kv_transfer` of the Unix time at which the prefill ended: lanes on different nodes share no other clock."""

MAX_CLOCK_SKEW_S = 1.0  # most seconds that the clock of a prefill lane's node may be ahead of the decode lane's


class PrefillEngine(VllmBackend):
    """The engine of a prefill lane in a replica."""

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives, and end with a `PrefillEnd`. `params` are those of the answer: they are
        checked before anything is computed. Raises as `VllmBackend.generate` does."""
        self.check_params(params)
        return stream_then_generate(prompts, self.streams, PREFILL_PARAMS, _end_prefill)


async def _end_prefill(stream: TokenStream) -> AsyncGenerator[AnswerChunk, None]:
    assert stream.record is not None
    ended_at = time.time() - (monotonic() - stream.record.finished_s)
    yield PrefillEnd("", (), "length", kv_transfer={**stream.kv_transfer, ENDED_AT: ended_at})


class DecodeEngine(VllmBackend):
    """The engine of a decode lane in a replica."""

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        """Answer a complete prompt, with its KV fetched if that is recent. Raises as `VllmBackend.generate` does."""
        return super().generate(prompts, without_old_kv(params))


def without_old_kv(params: SamplingParams) -> SamplingParams:
    """Return the parameters without `ENDED_AT`, and without those of the KV connector if the KV is older than
    `MAX_KV_AGE_S`, because the query waited for a replica, or comes from the future, because clocks disagree."""
    extra_args = dict(params.extra.get("extra_args") or {})
    kv_transfer = dict(extra_args.pop(KV_TRANSFER_KEY, {}))
    if not kv_transfer:
        return params
    now_s = seconds_since_boot()  # first, as in `DisaggregatedBackend`
    age_s = time.time() - kv_transfer.pop(ENDED_AT)
    if -MAX_CLOCK_SKEW_S <= age_s <= MAX_KV_AGE_S:
        extra_args[KV_TRANSFER_KEY] = {**kv_transfer, READ_BY_KEY: now_s + MAX_READ_S - age_s}
    elif age_s < -MAX_CLOCK_SKEW_S:
        log.warning("the clock of a prefill lane's node is %.1f s ahead: its KV is not read", -age_s)
    return replace(params, extra={**params.extra, "extra_args": extra_args})
