"""By which prices an engine chooses between recomputing and copying."""

import os
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from streamrag.backends.vllm.scheduler.options import SchedulerOptions
from streamrag.engine.costs import ModelShape, StepProfile
from streamrag.engine.price import Price
from streamrag.engine.profile_files import load_profile
from streamrag.engine.running_profile import check_fits, decoder_shape, default_profile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["make_price", "model_shape"]


def make_price(options: SchedulerOptions, config: "VllmConfig", block_bytes: int) -> Price | None:
    """None with eviction="swap", which compares nothing. `block_bytes` is the size of a KV block on one device.

    :raises ConfigurationError: there is no such profile, it does not say what copies take, or is of another engine.
    """
    if options.eviction == "swap":
        return None
    profile, budget = _profile(options, config, block_bytes), config.scheduler_config.max_num_batched_tokens
    return Price(profile, config.cache_config.block_size, budget)


def model_shape(config: "VllmConfig") -> ModelShape:
    """Of a dense transformer with a gated feed-forward part. For other models a guess, which their steps correct."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    return decoder_shape(
        model.model,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        num_heads=model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype_bytes=model.dtype.itemsize,
    )


def _profile(options: SchedulerOptions, config: "VllmConfig", block_bytes: int) -> StepProfile:
    block_size, num_ranks = config.cache_config.block_size, config.parallel_config.tensor_parallel_size
    is_cpu = current_platform.is_cpu()
    if options.profile is None:
        return default_profile(
            model_shape(config),
            device="cpu" if is_cpu else "cuda",
            device_name="" if is_cpu else current_platform.get_device_name(),
            num_cores=len(os.sched_getaffinity(0)) if is_cpu else 1,
            tensor_parallel_size=num_ranks,
            block_size=block_size,
            is_async=config.scheduler_config.async_scheduling,
        )
    profile = load_profile(options.profile)
    if options.num_host_blocks is None:  # else it is a simulated engine, on a host that has nothing to do with it
        check_fits(
            profile,
            block_size=block_size,
            tensor_parallel_size=num_ranks,
            block_bytes=block_bytes,
            is_overlapped=not is_cpu,
            model=config.model_config.model,
        )
    return profile
