from dataclasses import replace
from pathlib import Path

import pytest

from experiments.profile_picture import draw_profile
from streamrag.engine.costs.copy_costs import linear_copies
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.errors import ConfigurationError

PROFILE = TableProfile("t", "cpu", ((1, 0.010), (100, 0.030)), 1e-7, 0.0, kv_tokens=1_000, block_size=10)


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    measured = {"num_beside": 8, "alone": {"64": 0.02, "128": 0.04}, "beside": {"64": 0.02, "128": 0.03}}
    provenance = {"max_model_len": 2_048, "recompute_s": measured, "copies": "measured"}
    for name, profile in (
        ("measured", replace(replace(PROFILE, copies=linear_copies(1, 1e4, 0.010)), provenance=provenance)),
        ("no-crossing", replace(PROFILE, copies=linear_copies(1, 1.0, 0.0))),
        ("shipped", load_profile("h200-llama8b-tp2")),
    ):
        path = tmp_path / f"{name}.png"
        draw_profile(path, profile)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_profile_picture_that_cannot_be_drawn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no copy times"):
        draw_profile(tmp_path / "x.png", PROFILE)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        draw_profile(tmp_path / "none" / "x.png", replace(PROFILE, copies=linear_copies(1, 1.0, 0.0)))
