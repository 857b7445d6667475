"""The programs of docs/tutorial.md run as the page says, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrag.testing import make_tiny_llama

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
PROGRAM = re.compile(r'^```py title="(\w+\.py)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs of the tutorial."""
    programs = dict(PROGRAM.findall(PAGE.read_text()))
    assert list(programs) == ["library.py", "watch.py", "chain.py", "compare.py"]
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def output(folder: Path, program: str) -> list[str]:
    ran = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_each_document_goes_to_the_model_when_it_arrives(folder: Path) -> None:
    kinds = [line.split("  ")[1].split()[0] for line in output(folder, "watch.py") if " s  " in line]
    assert kinds == ["retrieved", "sent"] * 6 + ["sent", "retrieval"]


def test_a_chain_prints_the_answer(folder: Path) -> None:
    assert output(folder, "chain.py") == ["It moves a file [3]."]


@pytest.mark.engine
def test_both_ways_are_measured(folder: Path) -> None:
    """The tiny model's context is too short for the documents, which is no error: they are left out."""
    make_tiny_llama(folder / "smollm2")
    lines = output(folder, "compare.py")[-2:]
    assert [line.split(":")[0] for line in lines] == ["overlap=True", "overlap=False"]
