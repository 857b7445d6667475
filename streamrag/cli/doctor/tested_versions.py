"""The releases of vLLM that were tested, and what was tested with each."""

import json
from pathlib import Path
from typing import Any

TESTED_FILE = Path(__file__).with_suffix(".json")
"""Results of `make vllm` with each release that it tried; see `read_tested`."""


def read_tested() -> dict[str, dict[str, Any]]:
    """Read what was tested with which release, and on which day. `scripts/vllm_release.py` writes it."""
    return dict(json.loads(TESTED_FILE.read_text()))


def describe_tests(version: str) -> str:
    """Describe in a few words what was tested with a release: all, its scheduler, or nothing."""
    found = read_tested().get(version.split("+")[0])
    if found is None:
        return "this release was not tested"
    suite = f"{found.get('suite_passed', 0)} of vLLM's own tests"
    if found["is_engine_tested"]:
        return f"tested with all tests on a CPU, and with {suite}"
    return f"its scheduler was tested with {found.get('loads', 0):,} random loads and {suite}, its kernels were not"
