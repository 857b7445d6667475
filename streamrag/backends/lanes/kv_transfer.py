"""The transfer of a prompt's KV from a prefill lane to a decode lane: how it is asked for, and in which time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamrag.backends.vllm.client.lane_engine import LEASE_S
from streamrag.core import AnswerChunk, SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.support.messages import short_repr

MAX_KV_AGE_S = LEASE_S / 2
"""Most seconds since the end of a prefill for its KV to be fetched. The rest of the lease is for the decode lane, which
must have the request in time to extend it."""

KV_TRANSFER_KEY = "kv_transfer_params"  # key in vLLM's `extra_args` of the parameters for its KV connector

PREFILL_PARAMS = SamplingParams(max_tokens=1, extra={"extra_args": {KV_TRANSFER_KEY: {"do_remote_decode": True}}})
"""Parameters with which a prefill lane computes a prompt, and keeps the KV until it is fetched."""


@dataclass(frozen=True, slots=True)
class PrefillEnd(AnswerChunk):
    """The end of a prefill in a replica, with no tokens."""

    kv_transfer: dict[str, Any] = field(default_factory=dict)  # parameters with which another engine fetches the KV


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """A prompt that passed from a prefill lane to a decode lane."""

    prefill_lane: str
    decode_lane: str
    num_tokens: int
    num_blocks: int  # KV blocks in the prefill lane; the decode lane fetches those that it does not have
    seconds: float  # from the end of the prefill to the first output of the decode lane


def extra_args_of(params: SamplingParams) -> Mapping[str, Any]:
    """Return the arguments for vLLM's connectors and plugins; raise ConfigurationError if they are not a mapping."""
    extra_args = params.extra.get("extra_args") or {}
    if not isinstance(extra_args, Mapping):
        raise ConfigurationError(f"SamplingParams.extra: extra_args={short_repr(extra_args)} must be a mapping")
    return extra_args


def with_kv_transfer(params: SamplingParams, kv_transfer: dict[str, Any]) -> SamplingParams:
    """Return the parameters with those of the KV connector, by which vLLM fetches the KV of the prompt."""
    extra_args = {**extra_args_of(params), KV_TRANSFER_KEY: kv_transfer}
    return replace(params, extra={**params.extra, "extra_args": extra_args})
