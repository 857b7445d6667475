"""What an engine is told so that it prefills partial prompts in one way or the other."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.engine import make_policy
from streamrag.engine.eviction import EvictionMode, check_eviction
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

Strategy: TypeAlias = Literal["streaming", "warming"]
"""How partial prompts are prefilled: by streams into our scheduler, or by requests that fill vLLM's prefix cache."""

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
    """What costs less; "recompute" where vLLM may refuse our KV connector, as it does for some engines."""
    return "recompute" if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "cost"


def kv_transfer_config() -> "KVTransferConfig":
    """What vLLM must be told of our KV connector, which every `eviction` but "recompute" needs."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**KV_TRANSFER)


def scheduler_args(
    strategy: str, policy: str, can_partial_evict: bool | None, engine_args: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """What makes vLLM run our scheduler, merged with what `engine_args` say.

    `others` are further `SchedulerOptions`; None is the scheduler's default.

    :raises ConfigurationError: they exclude each other, or there is no such policy or eviction.
    """
    if strategy not in get_args(Strategy):
        raise ConfigurationError(f"strategy={strategy!r} must be one of {', '.join(map(repr, get_args(Strategy)))}")
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
    if (chosen := _checked_eviction(options, engine_args)) != "recompute":
        options["eviction"] = chosen
        args["kv_transfer_config"] = dict(KV_TRANSFER)
    return args | {"additional_config": {**theirs, KEY: options}}


def _checked_eviction(options: Mapping[str, Any], engine_args: Mapping[str, Any]) -> EvictionMode:
    """What is asked for; the default where it works."""
    reasons = []
    if engine_args.get("enable_prefix_caching", True) is False:
        reasons.append("enable_prefix_caching=False, and KV blocks are known by the hashes of the prefix cache")
    if engine_args.get("kv_transfer_config") is not None:
        reasons.append("a kv_transfer_config of its own, and vLLM takes one KV connector")
    given = options.get("eviction")
    if given is None:
        return "recompute" if reasons else default_eviction()  # those who ask hear of the reasons
    mode = check_eviction(given)
    if mode != "recompute" and reasons:
        raise ConfigurationError(
            f'eviction={mode!r} cannot be had: engine_args have {reasons[0]}. Leave that out, or set "recompute"'
        )
    return mode
