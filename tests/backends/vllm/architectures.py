"""Small models of random weights, of the architectures that people run. Each is made in seconds, from no download."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1_000
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4_096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2}
HEADS = {"head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """`config` is the name of a configuration in transformers."""

    config: str
    options: dict[str, Any]
    has_host_memory: bool = True
    """Whether its KV is copied to host memory; of several kinds of KV blocks it is not."""
    has_mamba: bool = False
    """Whether it has Mamba layers, and so more than one kind of KV blocks."""
    is_refused: bool = False
    """Whether its Mamba layers are of a kind that was never compared, as vLLM's CPU build cannot run it in float32."""
    why_untested: str = ""
    """Why vLLM cannot run it on a CPU."""


ARCHITECTURES: dict[str, Architecture] = {
    "Llama": Architecture("LlamaConfig", GROUPED),
    "Qwen3": Architecture("Qwen3Config", {**GROUPED, **HEADS}),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", {**GROUPED, **HEADS, **EXPERTS, "num_experts": 4}),
    "Mixtral": Architecture("MixtralConfig", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek (MLA)": Architecture(
        "DeepseekV2Config",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
        why_untested="vLLM prefills its prompts in one piece on CPUs",
    ),
    "Gemma 3": Architecture(
        "Gemma3TextConfig",
        {
            **GROUPED,
            **HEADS,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        has_host_memory=False,
    ),
    "Phi-3": Architecture("Phi3Config", GROUPED),
    "OLMo 2": Architecture("Olmo2Config", GROUPED),
    "Jamba": Architecture(
        "JambaConfig",
        {
            **GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
        has_host_memory=False,
        is_refused=True,
    ),
    "Granite 4": Architecture(
        "GraniteMoeHybridConfig",
        {
            **GROUPED,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
        has_host_memory=False,
        has_mamba=True,
    ),
    "Nemotron-H": Architecture(
        "NemotronHConfig",
        {
            **GROUPED,
            **HEADS,
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
        has_host_memory=False,
        has_mamba=True,
    ),
    "Qwen3-Next": Architecture(
        "Qwen3NextConfig",
        {
            **GROUPED,
            **HEADS,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
        has_host_memory=False,
        is_refused=True,
    ),
}


def make_model(name: str, folder: Path) -> Path:
    """Write a model of this architecture; a folder without tokenizer."""
    import transformers

    architecture = ARCHITECTURES[name]
    make_config: Callable[..., Any] = getattr(transformers, architecture.config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(**{**COMMON, **architecture.options}))
    model.float().save_pretrained(folder)
    return folder
