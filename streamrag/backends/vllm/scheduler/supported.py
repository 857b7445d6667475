"""Checks that the scheduler supports the engine and the model."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from streamrag.backends.vllm.scheduler_options import PROPOSER
from streamrag.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CHECKS: dict[str, Callable[["VllmConfig"], bool]] = {
    "pipeline parallelism": lambda c: c.parallel_config.pipeline_parallel_size > 1,
    "data parallelism": lambda c: c.parallel_config.data_parallel_size > 1,
    "context parallelism": lambda c: (
        c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
    ),
    "vLLM's speculative decoding (answer_ahead=True copies from prompts, as ngram does)": lambda c: (
        c.speculative_config is not None and c.speculative_config.model != PROPOSER
    ),
    "an encoder-decoder model": lambda c: c.model_config.is_encoder_decoder,
    "a pooling model": lambda c: c.model_config.runner_type == "pooling",
    "a diffusion model": lambda c: c.model_config.is_diffusion,
    "an encoder cache connector": lambda c: c.ec_transfer_config is not None,
    "vLLM's priority scheduling": lambda c: c.scheduler_config.policy != "fcfs",
    "a threshold for long prefills": lambda c: c.scheduler_config.long_prefill_token_threshold > 0,
    "prefill without chunks": lambda c: not c.scheduler_config.enable_chunked_prefill,
    "an interval between prefill steps": lambda c: c.scheduler_config.prefill_schedule_interval > 1,
    "auxiliary outputs, such as routed experts": lambda c: c.aux_output_config.enabled,
}


def has_their_connector(config: "VllmConfig") -> bool:
    """Whether the engine has a KV connector other than ours."""
    return config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector != "HostKVConnector"


def only_sends_kv(config: "VllmConfig") -> bool:
    """Whether the engine's KV connector never loads KV: NIXL's in an engine that computes prompts for others, unless it
    transfers in both directions. The role alone does not say it: LMCache may load as a producer too."""
    transfer = config.kv_transfer_config
    if transfer is None or (transfer.kv_connector, transfer.kv_role) != ("NixlConnector", "kv_producer"):
        return False
    return not transfer.get_from_extra_config("bidirectional_kv_xfer", False)


CHECKS_WITH_MAMBA: dict[str, Callable[["VllmConfig", set[int]], bool]] = {
    "KV blocks of several sizes": lambda c, sizes: len(sizes) > 1,
    "a `prefix_match_unit`": lambda c, sizes: c.cache_config.prefix_match_unit not in (None, *sizes),
    "steps of fewer tokens than a KV block": lambda c, sizes: c.scheduler_config.max_num_batched_tokens < max(sizes),
    "drafts of answers": lambda c, sizes: c.speculative_config is not None,
    "ReplaySSM": lambda c, sizes: c.cache_config.use_replayssm,
    "a KV connector other than ours": lambda c, sizes: has_their_connector(c),
}
"""Checks for models with Mamba layers, given the sizes of KV blocks between which vLLM keeps their states, if any."""


def check_supported(config: "VllmConfig", kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigurationError, with all their names, for features in use that streaming does not support."""
    unsupported = [name for name, is_used in CHECKS.items() if is_used(config)]
    if kv_cache_config.has_mamba_layers:
        specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
        kinds = {spec.mamba_type for spec in specs if isinstance(spec, MambaSpec)} - {MambaAttentionBackendEnum.MAMBA2}
        unsupported += [f"a model with Mamba layers of the kind {kind.name}" for kind in kinds]  # never compared
        sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
        sizes = sizes if config.cache_config.mamba_cache_mode == "align" else {1}
        checks = CHECKS_WITH_MAMBA.items()
        unsupported += [f"Mamba layers together with {name}" for name, is_used in checks if is_used(config, sizes)]
    has_replay = any(group.kv_cache_spec.prefix_replay_tokens > 0 for group in kv_cache_config.kv_cache_groups)
    if has_replay and has_their_connector(config):
        # vLLM's NixlConnector deletes the last prompt token of such a request: of a stream, that of its first chunk.
        unsupported.append("prefix replay together with a KV connector other than ours")
    if kv_cache_config.hisparse_host_num_blocks is not None:
        unsupported.append("HiSparse")
    if unsupported:
        raise ConfigurationError(
            f"streaming does not work with {', '.join(unsupported)}; switch that off, or use vLLM's own scheduler"
        )


def why_no_host_memory(config: KVCacheConfig) -> str | None:
    """Return why KV blocks cannot be copied to host memory; None if they can."""
    if len(config.kv_cache_groups) != 1:
        return f"{len(config.kv_cache_groups)} kinds of KV blocks"
    (group,) = config.kv_cache_groups
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for each in specs:
        # Subclasses of these free blocks early, or store tokens in them that are not the request's.
        if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"KV of the kind {type(each).__name__}"
    return "KV of mixed precision" if config.needs_kv_cache_zeroing else None
