"""The programs of docs/tutorial.md run as the page says: each in a process of its own, but for the one with an engine,
which this process has imported already. `make test-long` runs that one on its own too."""

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
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
    assert kinds == ["sent"] + ["retrieved", "sent"] * 6 + ["sent", "retrieval"]


def test_a_chain_prints_the_answer(folder: Path) -> None:
    assert output(folder, "chain.py") == ["It moves a file [3]."]


@pytest.fixture
def quick_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `library` for programs in this process, which waits a tenth as long for each document."""
    library = folder / "library.py"
    text = library.read_text()
    assert "sleep(0.4)" in text
    library.write_text(text.replace("sleep(0.4)", "sleep(0.04)"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    yield
    sys.modules.pop("library", None)


def check_comparison(lines: list[str]) -> None:
    assert [line.split(":")[0] for line in lines[-2:]] == ["overlap=True", "overlap=False"]


@pytest.mark.engine
@pytest.mark.usefixtures("quick_library")
def test_both_ways_are_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model's context is too short for the documents, which is no error: they are left out."""
    make_tiny_llama(folder / "smollm2")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which are all written when an engine starts
    runpy.run_path(str(folder / "compare.py"), run_name="__main__")  # which the engine's process imports, too
    check_comparison(capsys.readouterr().out.splitlines())


@pytest.mark.long
@pytest.mark.engine
def test_a_process_of_its_own_measures_both_ways(folder: Path) -> None:
    make_tiny_llama(folder / "smollm2")
    check_comparison(output(folder, "compare.py"))
