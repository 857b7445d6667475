"""Each supported release of vLLM that is not the installed one: its sources, with a short run of each part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vllm_release import INSTALLED, PAGE, PARTS, page_with_releases
from streamrag.backends.vllm.version import SUPPORTED, series_of
from streamrag.cli.doctor.tested_versions import describe_tests, read_tested

ROOT = Path(__file__).parent.parent


def test_each_series_was_tried_and_the_page_says_so() -> None:
    assert {series_of(version) for version in read_tested()} == set(SUPPORTED)
    assert INSTALLED in read_tested()
    assert page_with_releases(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.long
@pytest.mark.parametrize("version", [version for version in read_tested() if version != INSTALLED])
@pytest.mark.timeout(900)
def test_the_scheduler_works_with_the_sources_of_this_release(version: str) -> None:
    parts = [
        f"--only={part}" for part in PARTS if part != "suite"
    ]  # tests/scripts runs that, for the installed release
    command = [sys.executable, "scripts/vllm_release.py", version, "--short", *parts]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout[ran.stdout.rindex("\n{") :])
    assert (found["faults_caught"], found["cells_different"]) == (1, 0)


def test_an_untested_release_is_named_so() -> None:
    assert describe_tests("0.32.99") == "this release was not tested"
    assert describe_tests(INSTALLED).startswith("tested with all tests on a CPU, and with ")
