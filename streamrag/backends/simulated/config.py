"""A configuration of vLLM for an engine that loads no model."""

import copy
import json
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.scheduler_options import draft_config


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The limits of a simulated engine."""

    num_blocks: int  # KV blocks for requests. Must hold at least one request of `max_model_len`.
    block_size: int = 16  # tokens per block
    max_model_len: int = 32_768
    max_num_batched_tokens: int = 2_048
    max_num_seqs: int = 128
    is_async: bool = False  # whether one step is scheduled while another computes, as in vLLM on GPUs
    has_prefix_cache: bool = True
    must_fit_whole: bool = True  # vLLM's `scheduler_reserve_full_isl`: admit a request only if its whole prompt fits
    watermark: float = 0.0
    num_draft_tokens: int = 0  # most tokens of a draft that one step verifies; 0 for an engine without drafts
    sliding_window: int | None = None
    """If set, half of the layers attend to this many tokens only: a second group of KV blocks, from the same pool."""
    has_mamba: bool = False
    """Whether half of the layers are Mamba layers: their states are a second group, kept between blocks if cached."""
    streamrag: dict[str, Any] = field(default_factory=dict)  # the options in `additional_config["streamrag"]`


@cache
def _base_config(num_draft_tokens: int) -> VllmConfig:
    """Return a configuration for a tiny Llama without weights, with vLLM's drafts if there are draft tokens."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 1_000,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "float32",
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=1 << 20,
            enforce_eager=True,
            speculative_config=draft_config(num_draft_tokens) if num_draft_tokens else None,
        ).create_engine_config()


def vllm_config(shape: EngineShape) -> VllmConfig:
    """Return the configuration of an engine of this shape. The first call takes about a second, further ones copy."""
    config = copy.copy(_base_config(shape.num_draft_tokens))
    config.model_config = copy.copy(config.model_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.cache_config = copy.copy(config.cache_config)
    config.model_config.max_model_len = shape.max_model_len
    scheduler = config.scheduler_config
    scheduler.max_model_len = shape.max_model_len
    scheduler.max_num_batched_tokens = shape.max_num_batched_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.max_num_seqs = shape.max_num_seqs
    scheduler.async_scheduling = shape.is_async
    scheduler.scheduler_reserve_full_isl = shape.must_fit_whole
    scheduler.watermark = shape.watermark
    config.cache_config.block_size = shape.block_size
    config.cache_config.enable_prefix_caching = shape.has_prefix_cache
    config.cache_config.num_gpu_blocks = shape.num_blocks + 1
    config.cache_config.mamba_cache_mode = "align" if shape.has_mamba and shape.has_prefix_cache else "none"
    config.additional_config = {KEY: dict(shape.streamrag)}
    if shape.streamrag.get("eviction", "recompute") != "recompute":
        config.kv_transfer_config = kv_transfer_config()
    return config


def kv_cache_config(shape: EngineShape) -> KVCacheConfig:
    """Return a group of KV blocks for full attention, and one for each other kind of layer that the shape has. There is
    one block more than in the shape, because vLLM reserves a null block."""
    common = {"block_size": shape.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**common))]
    if shape.sliding_window is not None:
        spec = SlidingWindowSpec(**common, sliding_window=shape.sliding_window)
        groups.append(KVCacheGroupSpec(["sliding"], spec))
    if shape.has_mamba:
        spec = MambaSpec(
            block_size=shape.block_size if shape.has_prefix_cache else shape.max_model_len,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align" if shape.has_prefix_cache else "none",
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=1,
        )
        groups.append(KVCacheGroupSpec(["mamba"], spec))
    # As by default in vLLM: only the last state of each prompt is kept.
    retained = {"prefix_cache_retention_interval": 0} if shape.has_mamba else {}
    return KVCacheConfig(shape.num_blocks + 1, [], groups, **retained)
