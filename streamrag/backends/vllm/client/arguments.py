"""The arguments of an engine, for either strategy of prefilling partial prompts."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.scheduler_options import EngineOptions, SchedulerOptions, draft_config
from streamrag.engine import make_policy
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

Strategy: TypeAlias = Literal["streaming", "warming"]
"""Ways to prefill partial prompts: as streams into our scheduler, or by requests that warm vLLM's prefix cache."""

SCHEDULER = "streamrag.backends.vllm.scheduler.hooks.streaming_scheduler"

KV_TRANSFER = {
    "kv_connector": "HostKVConnector",
    "kv_connector_module_path": "streamrag.backends.vllm.connector",
    # vLLM gives a consumer freed blocks only after the steps in flight, for loads that do not wait for these steps.
    # Our loads wait, and a victim's blocks are needed at once.
    "kv_role": "kv_producer",
    "kv_load_failure_policy": "recompute",
}


NUM_DRAFT_TOKENS = 32
"""Most tokens of a draft that a step verifies per request. A draft that goes wrong costs the time of so many, once; at
its first token it costs nothing, since that is sampled before."""


def draft_args(strategy: Strategy, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which vLLM verifies drafts; raise ConfigurationError if the others exclude that."""
    if strategy == "warming":
        raise ConfigurationError('answer_ahead=True needs strategy="streaming": only our scheduler verifies drafts')
    if engine_args.get("speculative_config") is not None:
        raise ConfigurationError(
            "answer_ahead=True and speculative_config in engine_args exclude each other: leave one of them out"
        )
    return {"speculative_config": draft_config(NUM_DRAFT_TOKENS)}


def default_eviction() -> EvictionMode:
    """Return "cost", or "recompute" where vLLM refuses KV connectors, as with expandable CUDA memory segments."""
    return "recompute" if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "cost"


def kv_transfer_config() -> "KVTransferConfig":
    """Return vLLM's configuration of our KV connector, which every `eviction` except "recompute" needs."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**KV_TRANSFER)


def scheduler_args(
    strategy: Strategy, scheduler: SchedulerOptions, engine_args: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Return the arguments for our scheduler, and for our KV connector unless KV is recomputed.

    For "warming", which takes none of these options, they are {}.
    The user's `additional_config` is merged in. `others` are `EngineOptions`; None is the default.

    :raises ConfigurationError: arguments exclude each other, or an option has an invalid value.
    """
    options = scheduler.changed | {name: value for name, value in others.items() if value is not None}
    if strategy == "warming":
        if options:
            raise ConfigurationError(
                f'{options} is for strategy="streaming" only: with "warming", vLLM\'s own scheduler runs'
            )
        return {}
    if engine_args.get("scheduler_cls") is not None:
        raise ConfigurationError(
            'engine_args: scheduler_cls cannot be used with strategy="streaming", which has its own scheduler. '
            'Leave it out, or use strategy="warming"'
        )
    user_config = engine_args.get("additional_config") or {}
    if not isinstance(user_config, dict):
        raise ConfigurationError(
            f'engine_args: additional_config={user_config!r} must be a dict with strategy="streaming"'
        )
    options |= user_config.get(KEY, {})
    make_policy(EngineOptions.named(options).policy)
    args: dict[str, Any] = {"scheduler_cls": SCHEDULER}
    if (eviction := _eviction(options.get("eviction"), engine_args)) != "recompute":
        options["eviction"] = eviction
        args["kv_transfer_config"] = dict(KV_TRANSFER)
    return args | {"additional_config": {**user_config, KEY: options}}


def _eviction(given: EvictionMode | None, engine_args: Mapping[str, Any]) -> EvictionMode:
    """Return the given mode, else a default that `engine_args` allow; ConfigurationError if they exclude the given."""
    reason = None
    if engine_args.get("enable_prefix_caching", True) is False:
        reason = "enable_prefix_caching=False, but KV blocks are found by the hashes of the prefix cache"
    elif engine_args.get("kv_transfer_config") is not None:
        reason = "their own kv_transfer_config, but vLLM takes only one KV connector"
    if given is None:
        return "recompute" if reason else default_eviction()
    if given != "recompute" and reason:
        raise ConfigurationError(
            f'eviction={given!r} is not possible: engine_args have {reason}. Leave that out, or use "recompute"'
        )
    return given
