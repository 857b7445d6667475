from dataclasses import replace
from typing import Any

import pytest

from streamrag.engine.costs.default_profile import check_fits, decoder_shape, default_profile
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile, recompute_s
from streamrag.errors import ConfigurationError

LLAMA_8B = decoder_shape(
    "Llama-3.1-8B",
    hidden_size=4_096,
    intermediate_size=14_336,
    vocab_size=128_256,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype_bytes=2,
)


def h200() -> AnalyticProfile:
    profile = load_profile("h200-llama8b-tp2")
    assert isinstance(profile, AnalyticProfile)
    return profile


def test_the_shape_of_a_llama_is_known_by_its_configuration() -> None:
    assert LLAMA_8B.num_params == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_8B.weight_bytes == pytest.approx(16.06e9, rel=0.001)
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_an_assumed_profile_says_that_it_was_not_measured() -> None:
    profile = default_profile(LLAMA_8B, device="cuda", device_name="NVIDIA H200", tensor_parallel_size=2)
    assert profile.name == "analytic default"
    assert "not measured" in profile.provenance["source"]


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A40"])
def test_the_assumed_profile_of_a_listed_gpu_is_near_its_shipped_one(name: str) -> None:
    assumed = default_profile(LLAMA_8B, device="cuda", device_name=name, tensor_parallel_size=2)
    known = load_profile(f"{name.split()[1].lower()}-llama8b-tp2")
    assert recompute_s(assumed, 0, 10_000) == pytest.approx(recompute_s(known, 0, 10_000), rel=0.25)
    assert assumed.copies is not None
    assert known.copies is not None
    assert assumed.copies.in_s(500) == pytest.approx(known.copies.in_s(500), rel=0.05)
    assert assumed.copies.is_overlapped


def test_a_gpu_is_known_by_whole_words_and_an_unknown_one_is_slow() -> None:
    def peak(name: str) -> float:
        return default_profile(LLAMA_8B, device="cuda", device_name=name).peak_flops

    assert peak("NVIDIA RTX A4000") == peak("some card") < peak("NVIDIA A40") < peak("NVIDIA H100 PCIe") < peak("H100")


def test_products_of_32_bits_take_longer() -> None:
    full = replace(LLAMA_8B, weight_bytes=4 * LLAMA_8B.num_params)
    slow, quick = (default_profile(shape, device="cuda", device_name="NVIDIA H200") for shape in (full, LLAMA_8B))
    assert slow.peak_flops < quick.peak_flops / 10


def test_a_cpu_stands_still_while_it_copies_and_computes_with_its_cores() -> None:
    two, four = (default_profile(LLAMA_8B, device="cpu", num_cores=num, block_size=32) for num in (2, 4))
    assert two.copies is not None
    assert not two.copies.is_overlapped
    assert two.copies.block_bytes == 32 * 131_072
    assert four.peak_flops == 2 * two.peak_flops


FITTING: dict[str, Any] = {
    "block_size": 16,
    "tensor_parallel_size": 2,
    "block_bytes": 16 * 65_536,
    "is_overlapped": True,
}


def test_a_profile_of_the_same_engine_fits() -> None:
    check_fits(h200(), **FITTING)
    check_fits(h200(), block_size=16, tensor_parallel_size=2)
    check_fits(replace(h200(), host_bandwidth_bytes_per_s=None), **FITTING)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"block_size": 32}, "blocks have 16 tokens, not 32"),
        ({"tensor_parallel_size": 1}, "tensor_parallel_size is 2, not 1"),
        ({"block_bytes": 1_000}, "1,048,576 bytes on a device, not 1,000"),
        ({"is_overlapped": False}, "of a GPU, and this is a CPU"),
    ],
)
def test_a_profile_of_another_engine_is_refused_with_the_reason(engine: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        check_fits(h200(), **{**FITTING, **engine}, model="my-llama")
    assert "'h200-llama8b-tp2' does not fit my-llama" in str(refused.value)
    assert "streamrag profile --model" in str(refused.value)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"tokens, not 32; its tensor_parallel_size"):
        check_fits(h200(), block_size=32, tensor_parallel_size=4)
