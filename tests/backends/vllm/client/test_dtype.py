"""The dtype of an engine that is not told one. No engine is started."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrag.backends.vllm.client.processes import import_vllm, make_config
from streamrag.backends.vllm.facts import emulated_dtypes
from streamrag.testing import make_tiny_llama

NEITHER = {"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": False, "amx_fp16": False}
BFLOAT16_ONLY = NEITHER | {"avx512_bf16": True}

DtypeOf = Callable[..., torch.dtype]


@pytest.fixture
def dtype_of(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DtypeOf:
    """The dtype of an engine on a CPU with these capabilities, whose model has weights in `stored`."""
    import_vllm()
    # Imported under other capabilities, it would load vLLM's kernels for another CPU beside those that a test of this
    # process has loaded, which ends the process.
    importlib.import_module("vllm.model_executor.model_loader")

    def ask(capabilities: dict[str, bool], stored: str = "float32", **engine_args: Any) -> torch.dtype:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        model = tiny_model
        if stored != "float32":
            model = make_tiny_llama(tmp_path / stored)
            config = model / "config.json"
            config.write_text(config.read_text().replace("float32", stored))
        dtype: torch.dtype = make_config(str(model), {"dtype": "auto", **engine_args}).model_config.dtype
        return dtype

    return ask


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_cpu_without_instructions_for_16_bits_computes_in_float32(dtype_of: DtypeOf, stored: str) -> None:
    assert dtype_of(NEITHER, stored) == torch.float32


def test_a_cpu_with_the_instructions_computes_as_vllm_chooses(dtype_of: DtypeOf) -> None:
    assert dtype_of(BFLOAT16_ONLY) == torch.bfloat16
    assert dtype_of(BFLOAT16_ONLY, "float16") == torch.float32
    assert dtype_of(BFLOAT16_ONLY | {"amx_fp16": True}, "bfloat16") == torch.bfloat16


def test_a_dtype_that_is_given_wins(dtype_of: DtypeOf) -> None:
    assert dtype_of(NEITHER, dtype="bfloat16") == torch.bfloat16
    assert dtype_of(NEITHER, dtype=torch.float16) == torch.float16
    assert dtype_of(BFLOAT16_ONLY, dtype="float32") == torch.float32


def test_quantized_weights_keep_the_dtype_that_their_kernels_compute_in(dtype_of: DtypeOf) -> None:
    assert dtype_of(NEITHER, quantization="fp8") == torch.bfloat16


@pytest.mark.parametrize(
    ("capabilities", "emulated"),
    [
        (NEITHER, ("bfloat16", "float16")),
        (BFLOAT16_ONLY, ("float16",)),
        ({"amx_bf16": True, "avx512_bf16": False, "avx512_fp16": True}, ()),
        ({"neon": True, "bf16": False, "fp16_arith": True}, ("bfloat16",)),
        ({"neon": True, "bf16": True, "fp16_arith": True}, ()),
        ({"architecture": "ppc64le"}, ()),  # torch does not know its instructions: vLLM's choice stays
        ({}, ()),
    ],
)
def test_dtypes_without_cpu_instructions_count_as_emulated(
    capabilities: dict[str, Any], emulated: tuple[str, ...]
) -> None:
    assert emulated_dtypes(capabilities) == emulated
