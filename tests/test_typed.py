"""A user's type checker sees the package's types, from the package as it is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SNIPPET = """
from streamrag import Pipeline

def ask(pipeline: Pipeline) -> None:
    reveal_type(pipeline.stream("Why?").result.cut_short)
    pipeline.stream("Why?", max_token=3)
"""
# What the package itself imports is a minute's work to look at, and not the question here.
CONFIGURATION = """
[mypy]
follow_imports = skip
[mypy-streamrag,streamrag.*]
follow_imports = normal
"""


def test_a_users_mypy_sees_types_and_a_misspelt_option(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "/dev/null", "snippet.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'snippet.py:5: note: Revealed type is "str | None"' in checked.stdout
    assert 'snippet.py:6: error: Unexpected keyword argument "max_token"' in checked.stdout
    assert "Found 1 error" in checked.stdout


@pytest.mark.parametrize(
    ("folder", "package", "module"), [("", "streamrag", "core/__init__"), ("bench", "streamrag_bench", "cell")]
)
def test_the_wheel_says_that_the_package_is_typed(folder: str, package: str, module: str) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling, which makes the wheel, is not installed")
    files = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT / folder)).recurse_included_files()}
    assert {f"{package}/py.typed", f"{package}/{module}.py"} <= files
    assert not {path for path in files if not path.startswith(f"{package}/")}
