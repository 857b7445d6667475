"""The arguments of an engine that prefills partial prompts in one way or the other."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.engine import make_policy
from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError
from streamrag.support.validation import validated

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

Strategy: TypeAlias = Literal["streaming", "warming"]
"""Ways to prefill partial prompts: streams into our scheduler, or requests that fill vLLM's prefix cache."""

SCHEDULER = "streamrag.backends.vllm.scheduler.hooks.streaming_scheduler"

KV_TRANSFER = {
    "kv_connector": "HostKVConnector",
    "kv_connector_module_path": "streamrag.backends.vllm.connector",
    # To a consumer vLLM gives freed blocks only after the steps in flight, for loads that do not wait for those. Ours
    # do, and the blocks of a victim are wanted at once.
    "kv_role": "kv_producer",
    "kv_load_failure_policy": "recompute",
}


def default_eviction() -> EvictionMode:
    """Return "cost", or "recompute" where vLLM may refuse our KV connector, as it does for some engines."""
    return "recompute" if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "cost"


def kv_transfer_config() -> "KVTransferConfig":
    """Return vLLM's configuration of our KV connector, which every `eviction` but "recompute" needs."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**KV_TRANSFER)


@validated
def scheduler_args(
    strategy: Strategy, policy: str, can_partial_evict: bool | None, engine_args: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Return the arguments that make vLLM run our scheduler, merged with what `engine_args` say.

    `others` are further `SchedulerOptions`; None is the scheduler's default.

    :raises ConfigurationError: they exclude each other, or there is no such policy or eviction.
    """
    named = {"can_partial_evict": can_partial_evict, **others}
    options: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if strategy == "warming":
        if policy != DEFAULT_POLICY:
            options["policy"] = policy
        if options:
            raise ConfigurationError(
                f'{options} is for strategy="streaming": with "warming", vLLM\'s own scheduler decides'
            )
        return {}
    if engine_args.get("scheduler_cls") is not None:
        raise ConfigurationError(
            'engine_args: scheduler_cls cannot be given with strategy="streaming", which brings its own scheduler. '
            'Leave it out, or use strategy="warming"'
        )
    theirs = engine_args.get("additional_config") or {}
    if not isinstance(theirs, dict):
        raise ConfigurationError(f'engine_args: additional_config={theirs!r} must be a dict with strategy="streaming"')
    options = {"policy": policy} | options | theirs.get(KEY, {})
    make_policy(SchedulerOptions.named(options).policy)
    args: dict[str, Any] = {"scheduler_cls": SCHEDULER}
    if (chosen := _eviction(options.get("eviction"), engine_args)) != "recompute":
        options["eviction"] = chosen
        args["kv_transfer_config"] = dict(KV_TRANSFER)
    return args | {"additional_config": {**theirs, KEY: options}}


def _eviction(given: EvictionMode | None, engine_args: Mapping[str, Any]) -> EvictionMode:
    """Return what is asked for, or the default where it works."""
    reason = None
    if engine_args.get("enable_prefix_caching", True) is False:
        reason = "enable_prefix_caching=False, and KV blocks are known by the hashes of the prefix cache"
    elif engine_args.get("kv_transfer_config") is not None:
        reason = "a kv_transfer_config of its own, and vLLM takes one KV connector"
    if given is None:
        return "recompute" if reason else default_eviction()  # those who ask hear of the reason
    if given != "recompute" and reason:
        raise ConfigurationError(
            f'eviction={given!r} cannot be had: engine_args have {reason}. Leave that out, or set "recompute"'
        )
    return given
