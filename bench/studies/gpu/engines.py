"""The models and the engine's arguments of each device: `cuda` measures, `cpu` checks that the programs run."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streamrag.testing import make_tiny_llama

Device = Literal["cuda", "cpu"]

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B. Its weights are not needed: the time of a step does not depend on them."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile what ranks log-probabilities: 20 s
    "VLLM_USE_DEEP_GEMM": "0",  # neither this nor the next is needed here, and a small installation lacks them
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A machine without a network has no address but its own.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Sizes:
    """How much each part does on a device."""

    exact_model: Mapping[str, Any]
    """Shape of the model with random weights whose answers are compared."""
    num_prompts: int
    chunk_tokens: tuple[int, int]
    max_model_len: int
    """Longest prompt and answer of the model whose time is measured."""
    window_s: float
    """Seconds in which a load's queries arrive."""
    num_alone: int
    """Queries of one user."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine whose time is measured."""
    float32_args: Mapping[str, Any] = field(default_factory=dict)
    """What an engine needs to compute in float32."""


SIZES: Mapping[Device, Sizes] = {
    "cuda": Sizes(
        {"hidden_size": 1_024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4},
        num_prompts=32,
        chunk_tokens=(250, 550),
        max_model_len=16_384,
        window_s=8.0,
        num_alone=5,
        engine_args={"load_format": "dummy", "gpu_memory_utilization": 0.9},
        float32_args={"dtype": "float32", "attention_backend": "TRITON_ATTN"},
    ),
    "cpu": Sizes(
        {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        num_prompts=8,
        chunk_tokens=(30, 60),
        max_model_len=4_096,
        window_s=3.0,
        num_alone=2,
    ),
}


def measured_model(device: Device, folder: Path) -> Path:
    """Write the model whose times are measured, and return its folder: on CUDA a configuration without weights."""
    path = folder / "measured"
    if device == "cpu":
        return path if path.exists() else make_tiny_llama(path, max_model_len=SIZES["cpu"].max_model_len)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    return path


def set_environment() -> None:
    """Set what vLLM reads from the environment, except for what is set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
