"""Find the hardware profile of an engine, and make the price of recomputing and copying KV from it."""

from typing import TYPE_CHECKING

from streamrag.backends.vllm.facts import EngineFacts, engine_facts
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine.costs.default_profile import check_fits, decoder_shape, default_profile
from streamrag.engine.costs.price import Price
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import ModelShape, StepProfile

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_price_of_engine(options: EngineOptions, config: "VllmConfig", block_bytes: int) -> Price | None:
    """Return the expected costs of KV on an engine; None with eviction="swap", which compares none.

    :raises ConfigurationError: the profile does not exist, lacks copy times, or belongs to another engine.
    """
    if options.eviction == "swap":
        return None
    profile, budget = _find_profile(options, config, block_bytes), config.scheduler_config.max_num_batched_tokens
    return Price(profile, config.cache_config.block_size, budget)


def _assume_model_shape(facts: EngineFacts, config: "VllmConfig") -> ModelShape:
    """Return the shape of a dense transformer with a gated feed-forward part: for other models a first estimate."""
    model, text = config.model_config, config.model_config.hf_text_config
    return decoder_shape(
        facts.model,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", 4 * text.hidden_size),
        vocab_size=text.vocab_size,
        num_layers=facts.num_layers,
        num_heads=model.get_num_attention_heads(config.parallel_config) * facts.tensor_parallel_size,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=facts.head_dim,
        dtype_bytes=model.dtype.itemsize,
    )


def _find_profile(options: EngineOptions, config: "VllmConfig", block_bytes: int) -> StepProfile:
    """Return the profile that the options name or, without a name, one from data sheets.

    Raises ConfigurationError if the named one does not exist or, except for simulated engines, does not fit.
    """
    facts = engine_facts(config)
    if options.profile is None:
        return default_profile(
            _assume_model_shape(facts, config),
            device="cuda" if facts.is_cuda else "cpu",
            device_name=facts.device if facts.is_cuda else "",
            num_cores=facts.num_cores,
            tensor_parallel_size=facts.tensor_parallel_size,
            block_size=facts.block_size,
            is_async=config.scheduler_config.async_scheduling,
        )
    profile = load_profile(options.profile)
    if options.num_host_blocks is None:  # set only for simulated engines, whose profile is of another host
        check_fits(
            profile,
            block_size=facts.block_size,
            tensor_parallel_size=facts.tensor_parallel_size,
            block_bytes=block_bytes,
            is_overlapped=facts.is_cuda,
            model=facts.model,
        )
    return profile
