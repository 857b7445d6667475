"""What pip and uv are given to install streamrag."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_overrides_that_users_are_given_are_those_of_the_project() -> None:
    lines = [line for line in (ROOT / "overrides.txt").read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert lines == project["tool"]["uv"]["override-dependencies"]
