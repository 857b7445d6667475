from dataclasses import replace

import pytest

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile, StepPart, TableProfile, recompute_s
from streamrag.errors import ConfigurationError

TABLE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030), (200, 0.070)), 1e-6, 0.001, kv_tokens=1_000)


def shipped(name: str) -> AnalyticProfile:
    profile = load_profile(name)
    assert isinstance(profile, AnalyticProfile)
    return profile


def test_a_step_bound_by_compute_takes_its_flops_over_the_reached_peak() -> None:
    profile = shipped("h200-llama8b-tp2")
    num_pairs = 2_048 * (10_000 + 1_024)
    flops = 2 * 8.03e9 * 2_048 + 4 * 32 * 32 * 128 * num_pairs
    expected_s = flops / (2 * 989e12 * profile.efficiency) + profile.overhead_s
    assert profile.step_s([(2_048, 10_000)]) == pytest.approx(expected_s)


def test_a_step_bound_by_memory_reads_all_weights_and_all_kv() -> None:
    profile = shipped("h200-llama8b-tp2")
    num_bytes = 16.06e9 + 131_072 * (1_001 + 501)
    expected_s = num_bytes / (2 * 4.8e12) + profile.overhead_s
    assert profile.step_s([(1, 1_000), (1, 500)]) == pytest.approx(expected_s)


def test_thirty_thousand_tokens_take_more_than_the_peak_allows() -> None:
    # The authors' "30K tokens in about 100 ms" is beyond the devices: 482 TFLOP take 0.24 s at their peak.
    steps = [(2_048, done) for done in range(0, 30_000, 2_048)]
    assert sum(shipped("h200-llama8b-tp2").step_s([part]) for part in steps) > 0.24


def test_slower_devices_take_longer() -> None:
    part: list[StepPart] = [(2_048, 5_000)]
    h200, h100, a40 = (shipped(f"{device}-llama8b-tp2").step_s(part) for device in ("h200", "h100", "a40"))
    assert h200 == h100 < a40
    assert shipped("h100-llama8b-tp2").step_s([(1, 100)]) > shipped("h200-llama8b-tp2").step_s([(1, 100)])


def test_a_table_is_linear_between_its_points_and_beyond_them() -> None:
    bare = replace(TABLE, pair_s=0.0, request_s=0.0)
    for num_tokens, expected_s in ((1, 0.010), (100, 0.030), (150, 0.050), (300, 0.110)):
        assert bare.step_s([(num_tokens, 7)]) == pytest.approx(expected_s)


def test_a_table_adds_attention_and_requests() -> None:
    pairs = 50 * (100 + 25) + 50 * 25
    assert TABLE.step_s([(50, 100), (50, 0)]) == pytest.approx(0.030 + 1e-6 * pairs + 2 * 0.001)


def test_new_tokens_can_attend_to_each_other_for_less() -> None:
    table = replace(TABLE, own_pair_s=1e-7)
    assert table.step_s([(50, 100)]) == pytest.approx(TABLE.step_s([(50, 100)]) - 50 * 25 * 9e-7)


def test_points_that_are_no_line_are_refused() -> None:
    for points in (((1, 0.1),), ((5, 0.1), (5, 0.2)), ((5, 0.1), (1, 0.2))):
        with pytest.raises(ConfigurationError, match="ascending"):
            replace(TABLE, points=points)


@pytest.mark.parametrize("end", [1, 40, 100, 101, 350])
def test_recomputing_takes_what_the_steps_take_more_than_the_token_after_them(end: int) -> None:
    chunks: list[StepPart] = [(min(100, end + 1 - done), done) for done in range(0, end + 1, 100)]
    expected_s = sum(TABLE.step_s([chunk]) for chunk in chunks) - TABLE.step_s([(1, end)])
    assert recompute_s(TABLE, 0, end, 100) == pytest.approx(expected_s)
    assert recompute_s(TABLE, 0, 0, 100) == recompute_s(TABLE, end, end, 100) == 0.0


def test_the_last_tokens_of_a_prompt_take_longer_than_the_first() -> None:
    assert recompute_s(TABLE, 3_000, 3_100, 200) > recompute_s(TABLE, 0, 100, 200)
    whole_s, halves_s = recompute_s(TABLE, 0, 400, 200), [recompute_s(TABLE, a, a + 200, 200) for a in (0, 200)]
    assert whole_s == pytest.approx(sum(halves_s))


def test_recomputing_beside_a_batch_takes_what_the_batchs_steps_take_longer() -> None:
    batch: list[StepPart] = [(1, 500)] * 20
    expected_s = sum(TABLE.step_s([(80, done), *batch]) - TABLE.step_s(batch) for done in (0, 80))
    assert recompute_s(TABLE, 0, 160, 100, batch) == pytest.approx(expected_s)
    with pytest.raises(ConfigurationError, match="budget=20"):
        recompute_s(TABLE, 0, 160, 20, batch)


def test_ranks_copy_their_shares_over_their_own_links() -> None:
    profile = replace(shipped("h200-llama8b-tp2"), host_latency_s=0.0)
    copies = profile.copies
    assert copies is not None
    assert (copies.block_bytes, copies.is_overlapped) == (16 * 131_072 // 2, True)
    assert copies.in_s(1_000) == pytest.approx(1_000 * 16 * 65_536 / 50e9)
    alone = replace(profile, tensor_parallel_size=1).copies
    assert alone is not None
    assert alone.in_s(1_000) == pytest.approx(2 * copies.in_s(1_000))
    assert replace(profile, host_bandwidth_bytes_per_s=None).copies is None
