import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import streamrag
from streamrag.backends.vllm.version import DISTRIBUTIONS, SUPPORTED, check_version
from streamrag.errors import UnsupportedVersionError


@pytest.mark.parametrize("found", ["0.33.1", "0.3", "0.320.0"])
def test_another_series_of_vllm_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    with pytest.raises(UnsupportedVersionError, match=rf"vllm {found} is installed"):
        check_version()


@pytest.mark.parametrize("found", [SUPPORTED, f"{SUPPORTED}.0", f"{SUPPORTED}.7.post1"])
def test_every_version_of_the_series_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    check_version()


def test_the_project_says_the_same_of_vllm_and_of_itself() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    assert project["version"] == streamrag.__version__
    major, minor = map(int, SUPPORTED.split("."))
    for name in DISTRIBUTIONS:
        assert project["optional-dependencies"][name][0] == f"{name}>={SUPPORTED},<{major}.{minor + 1}"
