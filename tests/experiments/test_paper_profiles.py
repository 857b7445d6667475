import json
from pathlib import Path
from typing import Any

import pytest
from paper_profiles import main, read_paper_profile

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import TableProfile, recompute_s

METADATA = {
    "model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu_memory_utilization": 0.8,
    "tensor_parallel_size": 2,
    "max_num_batched_tokens": 4_096,
}
SIZES = [16 << power for power in range(13)]


def latency_ms(num_tokens: int) -> float:
    return 8 + 0.02 * num_tokens + 5e-7 * num_tokens**2


RECOMPUTE: dict[str, Any] = {
    "recomputation_latencies": {str(num): [latency_ms(num)] * 4 + [1e4] for num in SIZES},
    "metadata": METADATA,
}
SWAP: dict[str, Any] = {
    "swap_in_latency": {str(num): [0.5 + 0.002 * num] * 10 for num in SIZES},
    "swap_out_latency": {str(num): [0.5 + 0.003 * num] * 10 for num in SIZES},
    "metadata": METADATA,
}


def loaded(folder: Path, **files: Any) -> TableProfile:
    """Write the files, convert them, and load the profile."""
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    main([*(str(folder / f"{name}.json") for name in files), "--output", str(folder / "profile.json")])
    profile = load_profile(str(folder / "profile.json"))
    assert isinstance(profile, TableProfile)
    return profile


def test_the_recompute_file_gives_the_steps_that_were_measured(tmp_path: Path) -> None:
    profile = loaded(tmp_path, recompute=RECOMPUTE)
    for num_tokens in SIZES:
        if num_tokens <= 4_096:
            assert profile.step_s([(num_tokens, 0)]) == pytest.approx(latency_ms(num_tokens) / 1e3, rel=0.01)
    assert (profile.name, profile.tensor_parallel_size, profile.block_size) == ("recompute", 2, 16)
    assert profile.copies is None
    assert profile.provenance["model_name"] == "meta-llama/Llama-3.1-8B-Instruct"


def test_attention_to_what_is_there_costs_what_attention_within_a_step_does(tmp_path: Path) -> None:
    profile = loaded(tmp_path, recompute=RECOMPUTE)
    expected_ms = latency_ms(24_000) + 5 * 8 - latency_ms(1)  # six steps of a fixed 8 ms, but for the next token's
    assert recompute_s(profile, 0, 24_000, 4_096) == pytest.approx(expected_ms / 1e3, rel=0.02)


def test_latencies_of_more_tokens_than_a_step_takes_are_left_out(tmp_path: Path) -> None:
    # The artifact times one step, which computes no more than the budget.
    profile = loaded(tmp_path, recompute=RECOMPUTE)
    assert [num for num, _ in profile.points] == [float(num) for num in SIZES if num <= 4_096]


def test_the_swap_file_is_read_beside_it_by_tokens(tmp_path: Path) -> None:
    for files in ({"recompute": RECOMPUTE, "swap": SWAP}, {"swap": SWAP, "recompute": RECOMPUTE}):
        copies = loaded(tmp_path, **files).copies
        assert copies is not None
        assert copies.in_s(100) == pytest.approx(0.0005 + 1_600 * 2e-6)
        assert copies.out_s(100) == pytest.approx(0.0005 + 1_600 * 3e-6)
        assert (copies.block_bytes, copies.is_overlapped) == (16 * 131_072 // 2, True)


def test_a_single_file_may_hold_recomputation_and_swap_latencies(tmp_path: Path) -> None:
    assert loaded(tmp_path, both={**RECOMPUTE, **SWAP}).copies is not None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"swap": SWAP}, 'one file must have "recomputation_latencies", and 0 have'),
        ({"a": RECOMPUTE, "b": RECOMPUTE}, "and 2 have"),
        ({"a": RECOMPUTE, "b": {"kind": "table"}}, "nothing else"),
        ({"a": {"recomputation_latencies": {}}}, "is missing or empty"),
        ({"a": {"recomputation_latencies": {"x": [1]}}}, "'x'"),
        ({"a": {"recomputation_latencies": {"16": []}}}, "'16'"),
        ({"a": {"recomputation_latencies": {"16": ["1"]}}}, "'16'"),
        ({"a": {"recomputation_latencies": {"16": [1]}}}, "two are needed"),
        ({"a": {**RECOMPUTE, "metadata": []}}, "not an object"),
        ({"a": RECOMPUTE, "b": {**SWAP, "metadata": {}}}, "model_name is 'meta-llama/Llama-3.1-8B-Instruct'"),
        ({"a": {**RECOMPUTE, **SWAP, "metadata": {**METADATA, "model_name": "x/tiny"}}}, "'tiny'.*is not known"),
        ({"a": RECOMPUTE, "b": {"swap_in_latency": SWAP["swap_in_latency"], "metadata": METADATA}}, "swap_out_latency"),
    ],
)
def test_a_paper_profile_that_cannot_be_read_is_refused_with_the_reason(files: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_paper_profile("paper", list(files.values()))
