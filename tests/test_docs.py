"""The documentation: its site can be built and needs no network, and its examples are true."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import streamrag
from streamrag import Append, Chunk
from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.testing import ScriptedBackend, ScriptedSource
from streamrag.trace import Trace, TracedAppend, TracedChunk, TracedQuery, write_trace

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in PAGES
    for number, code in enumerate(PYTHON.findall(path.read_text()))
]
WITH_DOCTESTS = [
    ".".join(path.relative_to(folder).with_suffix("").parts)
    for folder, package in ((ROOT, "streamrag"), (ROOT / "bench", "streamrag_bench"))
    for path in sorted((folder / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
DECISIONS = ROOT / "docs" / "contributing" / "decisions"

GIVEN = """
from typing import Any

from streamrag import {names}
from streamrag.testing import ScriptedBackend, ScriptedSource
"""
"""What examples take for granted."""
SIGNATURE = (
    "source: Source, web: Source, wiki: Source, backend: {backend}, model: str, url: str, "
    "question_ids: tuple[int, ...], page_ids: list[int], whole_prompt_ids: tuple[int, ...], end_ids: list[int], "
    "database: Any"
)
CONFIGURATION = """
[mypy]
check_untyped_defs = True
follow_imports = skip
[mypy-streamrag,streamrag.*]
follow_imports = normal
[mypy-livekit.*,pipecat.*]
ignore_missing_imports = True
"""


class Database:
    """The one of the example of a source."""

    async def search(self, query: str) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(body="The printer jams.", url="https://tickets.example.org/1", subject="Printer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what examples find there."""
    for name in ("Llama-3.1-8B-Instruct", "model", "my_package", "my-cross-encoder", "bge-small"):
        (tmp_path / name).mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text("def my_key(request, now_s): return request.arrival_s")
    page = TracedAppend(0.5, TracedChunk("a", 4, "The printer jams.", "printer.md"))
    write_trace(Trace((TracedQuery("1", 0.0, "Why does it jam?", (page,), 1.0),)), tmp_path / "crawl.jsonl.gz")
    save_profile(TableProfile("machine", "", ((1, 1.0), (2, 2.0)), 0.0, 0.0, 100), tmp_path / "machine.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_site_has_no_broken_link_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loading = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    assert [found for page in pages for found in loading.findall(page.read_text())] == []


def test_examples_use_the_package_as_its_types_say(tmp_path: Path) -> None:
    names = [name for name in streamrag.__all__ if name != "__version__"]
    parts = [GIVEN.format(names=", ".join(names))]
    for number, example in enumerate(EXAMPLES):
        (code,) = example.values
        backend = "VllmBackend" if "backend.start(print)" in str(code) else "Backend"
        parts.append(f"async def example_{number}({SIGNATURE.format(backend=backend)}) -> None:  # {example.id}")
        parts.append(textwrap.indent(str(code), "    "))
    (tmp_path / "examples.py").write_text("\n".join(parts))
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "/dev/null", "examples.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("code", EXAMPLES)
@pytest.mark.usefixtures("folder")
async def test_an_example_runs(code: str) -> None:
    """Those that start an engine are checked above only; examples/ has the same as programs, which other tests run."""
    for framework in ("livekit", "pipecat"):
        if f"from {framework}" in code and importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed: `make test-long`")
    tree = compile(code, "<example>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    if "VllmBackend(" in code and any(isinstance(node, ast.AsyncWith) for node in tree.body):
        return
    chunk = Chunk("The printer jams.", "printer.md")
    sources = {name: ScriptedSource([Append(chunk)]) for name in ("source", "web", "wiki")}
    names: dict[str, Any] = {name: getattr(streamrag, name) for name in streamrag.__all__}
    names |= {"ScriptedBackend": ScriptedBackend, "ScriptedSource": ScriptedSource, "database": Database()}
    names |= {**sources, "backend": ScriptedBackend(), "model": "./model"}
    block = compile(tree, "<example>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if block.co_flags & inspect.CO_COROUTINE:
        await eval(block, names)
    else:
        exec(block, names)
    if test := names.get("test_my_handler"):
        await test()
    if source := names.get("TicketSource"):
        assert [event async for event in source().stream("printer")] != []


@pytest.mark.parametrize("module", WITH_DOCTESTS)
def test_examples_of_docstrings_are_true(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(module))
    assert ran.attempted > 0
    assert ran.failed == 0


@pytest.mark.parametrize("page", ["web-crawling", "vector-search", "hybrid-search", "postgres", "mcp"])
def test_the_page_of_a_source_says_when_to_use_it_its_options_and_its_limits(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [text.count(f"\n## {what}\n") for what in ("When to use it", "Options", "Limits")] == [1] * 3


@pytest.mark.parametrize(
    "path", [path for path in PAGES if "api" not in (path.stem, path.parent.name)], ids=lambda path: path.name
)
def test_a_page_has_at_most_two_thousand_words(path: Path) -> None:
    assert len(path.read_text().split()) <= 2_000, "studies stand in bench/studies"


@pytest.mark.parametrize("name", ["your-server", "public-benchmark"])
def test_a_page_that_starts_vllms_server_says_how_to_with_the_build_for_cpus(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert re.search(r"^(    |`)vllm serve ", page, re.MULTILINE)
    assert "`python -m vllm.entrypoints.openai.api_server --model " in page


def test_the_picture_and_the_texts_have_the_figures_of_the_recorded_demo() -> None:
    command = [sys.executable, "bench/studies/demo/publish_figures.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_words_about_the_picture_have_its_seconds() -> None:
    (words,) = re.findall(r"!\[(.*)\]\(docs/timeline\.svg\)", (ROOT / "README.md").read_text())
    picture = (ROOT / "docs" / "timeline.svg").read_text()
    assert re.findall(r"[\d.]+ s\b", words) == re.findall(r">([\d.]+ s) to the first token<", picture)


def test_a_live_search_loses_on_two_cores_as_the_page_of_benchmarks_says() -> None:
    figures = runpy.run_path(str(ROOT / "bench" / "studies" / "demo" / "publish_figures.py"))
    arms = json.loads(figures["LIVE_SEARCH"].read_text())["arms"]
    loss = 1 - arms["every update"]["ttft_s_ratio"]
    assert f"loses {loss:.0%}".replace("%", " %") in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_picture_shows_the_median_of_all_pairs_also_of_those_with_the_same_question() -> None:
    figures = runpy.run_path(str(ROOT / "bench" / "studies" / "demo" / "publish_figures.py"))
    rows = [
        {"question": question, "arm": arm, "ttft_after_retrieval_s": seconds}
        for question, waiting_s in (("a", 4.0), ("b", 3.0), ("a", 1.0), ("a", 2.0), ("b", 5.0))
        for arm, seconds in (("streaming", 1.0), ("not streaming", waiting_s))
    ]
    pairs = figures["pairs_of"](rows)
    assert figures["median_pair"](pairs)[1]["ttft_after_retrieval_s"] == 3.0
    assert figures["median_pair"](pairs[:4])[1]["ttft_after_retrieval_s"] == 2.0  # the lower one, of an even number


def test_the_versions_are_those_of_the_package_metadata() -> None:
    """Each row of an extra has the package and range that pyproject.toml has."""
    text = (ROOT / "docs" / "versions.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", text, re.MULTILINE)
    assert len(rows) == 13
    assert [row for row in rows if f"{row[1]}{row[2]}" not in extras[row[0]]] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 100


def test_the_glossary_has_at_most_80_terms_in_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    groups = [re.findall(r"^- \*\*(.+?)\*\*: ", group, re.MULTILINE) for group in text.split("\n## ")[1:]]
    assert all(group == sorted(group, key=str.lower) for group in groups)
    terms = [term for group in groups for term in group]
    assert len({term.lower() for term in terms}) == len(terms) <= 80


def test_decisions_are_few_and_short_and_name_no_module() -> None:
    pages = {path.name: path.read_text() for path in DECISIONS.glob("*.md")}
    decisions = [text for page in pages.values() for text in page.split("\n## ")[1:]]
    assert len(decisions) <= 45
    for text in decisions:
        title, _, body = text.partition("\n")
        assert len(body.split()) <= 150, title
        assert re.findall(r"^\*\*(\w+)\.\*\* ", body, re.MULTILINE) == ["Context", "Decision", "Consequence"], title
    assert re.findall(r"`[\w./-]+\.py`", "".join(pages.values())) == []
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", pages["index.md"])) == pages.keys() - {"index.md"}


def test_the_index_is_that_of_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))["indexed"](index, pages) == index


def test_users_have_at_most_48_pages() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) <= 48, "merge pages"
