import json
from dataclasses import replace
from pathlib import Path

import pytest

from streamrag.engine.costs.copy_costs import linear_copies
from streamrag.engine.costs.profile_files import load_profile, profile_names, save_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile, TableProfile
from streamrag.errors import ConfigurationError

TABLE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030), (200, 0.070)), 1e-6, 0.001, kv_tokens=1_000)


def shipped(name: str) -> AnalyticProfile:
    profile = load_profile(name)
    assert isinstance(profile, AnalyticProfile)
    return profile


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_say_where_they_come_from(name: str) -> None:
    profile = shipped(name)
    assert profile.name == name
    told = {"date", "source", "efficiency", "overhead_s", "kv_tokens", "host_bandwidth_bytes_per_s", "host_latency_s"}
    assert profile.provenance.keys() >= told
    assert profile.kv_tokens % profile.block_size == 0


def test_profiles_for_comparison_differ_in_their_links_only() -> None:
    profile = shipped("h200-llama8b-tp2")
    for variant, bandwidth in (("slow", 8e9), ("fast", 450e9)):
        other = shipped(f"h200-llama8b-tp2-{variant}-host")
        assert other.host_bandwidth_bytes_per_s == bandwidth
        same = {"name": "", "host_bandwidth_bytes_per_s": None, "provenance": {}}
        assert replace(other, **same) == replace(profile, **same)


def test_profiles_can_be_written_and_read(tmp_path: Path) -> None:
    measured = replace(TABLE, copies=linear_copies(1_000, 1e9, 1e-5, is_overlapped=False), num_layers=2)
    for profile in (TABLE, measured, shipped("a40-llama8b-tp2")):
        save_profile(profile, tmp_path / "profile.json")
        assert load_profile(str(tmp_path / "profile.json")) == profile


def test_profiles_from_before_copies_were_known_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    save_profile(TABLE, path)
    values = json.loads(path.read_text())
    for name in ("copies", "num_layers", "tensor_parallel_size", "own_pair_s", "provenance"):
        del values[name]
    path.write_text(json.dumps(values))
    assert load_profile(str(path)) == TABLE


def test_copies_that_are_no_line_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    save_profile(replace(TABLE, copies=linear_copies(1_000, 1e9)), path)
    values = json.loads(path.read_text())
    values["copies"]["in_points"] = [[2, 0.2], [1, 0.1]]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match=r"broken\.json is not a hardware profile: in_points"):
        load_profile(str(path))


def test_an_unknown_profile_name_or_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'h300'.*h200-llama8b-tp2"):
        load_profile("h300")
    path = tmp_path / "broken.json"
    for text in ("{", "[]", json.dumps({"kind": "guess"}), json.dumps({"kind": "table", "name": "x"})):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"broken\.json is not a hardware profile"):
            load_profile(str(path))
