import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from streamrag.engine.costs import (
    AnalyticProfile,
    Part,
    TableProfile,
    fit_table,
    load_profile,
    profile_names,
    save_profile,
)
from streamrag.errors import ConfigurationError

TABLE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030), (200, 0.070)), 1e-6, 0.001, kv_tokens=1_000)


def shipped(name: str) -> AnalyticProfile:
    profile = load_profile(name)
    assert isinstance(profile, AnalyticProfile)
    return profile


@pytest.mark.parametrize("name", ["h200-llama8b-tp2", "h200-llama8b-tp2-sync", "h100-llama8b-tp2", "a40-llama8b-tp2"])
def test_shipped_profiles_say_where_they_come_from(name: str) -> None:
    profile = shipped(name)
    assert name in profile_names()
    assert profile.name == name
    assert profile.provenance.keys() >= {"date", "source", "efficiency", "overhead_s", "kv_tokens"}
    assert profile.kv_tokens % profile.block_size == 0


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
    part: list[Part] = [(2_048, 5_000)]
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


def test_a_fit_finds_what_made_the_measurements() -> None:
    rng = random.Random(0)
    true = replace(TABLE, own_pair_s=3e-6)
    measured = []
    for _ in range(120):
        parts = [(rng.choice([1, 16, 64, 100, 150]), rng.randrange(3_000)) for _ in range(rng.choice([1, 1, 2, 6]))]
        measured.append((parts, true.step_s(parts) * rng.uniform(0.99, 1.01)))
    found = replace(true, **asdict(fit_table(measured, [1, 100, 200])))
    for parts, _ in measured:
        assert found.step_s(parts) == pytest.approx(true.step_s(parts), rel=0.02)
    assert found.step_s([(500, 2_000)]) == pytest.approx(true.step_s([(500, 2_000)]), rel=0.05)


def test_profiles_can_be_written_and_read(tmp_path: Path) -> None:
    for profile in (TABLE, shipped("a40-llama8b-tp2")):
        save_profile(profile, tmp_path / "profile.json")
        assert load_profile(str(tmp_path / "profile.json")) == profile


def test_what_is_no_profile_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'h300'.*h200-llama8b-tp2"):
        load_profile("h300")
    path = tmp_path / "broken.json"
    for text in ("{", "[]", json.dumps({"kind": "guess"}), json.dumps({"kind": "table", "name": "x"})):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"broken\.json is no hardware profile"):
            load_profile(str(path))
