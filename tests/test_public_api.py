"""The names that a user may rely on, and that what we show to users relies on no others."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamrag
from scripts.api import MODULES
from streamrag import testing

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("without_garbage_collection")

PACKAGE = ROOT / "streamrag"
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "api").glob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))
ABSENT = {
    name
    for name in MODULES
    for framework in ("livekit", "pipecat")
    if name.endswith(f".{framework}") and importlib.util.find_spec(framework) is None
}
"""Adapters for frameworks that have an environment of their own, in which `make voice` imports them."""
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def has_all(tree: ast.Module) -> bool:
    assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    assigned += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return "__all__" in map(ast.unparse, assigned)


def imported(code: str) -> Iterator[tuple[str, str | None]]:
    """The module, and the name that is imported from it, of each import of streamrag."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] == "streamrag")


def public_names(module: str) -> list[str]:
    if module not in ABSENT:
        return list(importlib.import_module(module).__all__)
    code = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    assigned = [
        node for node in code.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(assigned[0].value))


def is_public(module: str, name: str | None) -> bool:
    return module in MODULES and (name is None or name in public_names(module))


def test_only_public_modules_have_an_all() -> None:
    found = {module_of(path) for path in PACKAGE.rglob("*.py") if has_all(ast.parse(path.read_text()))}
    assert sorted(found) == sorted(MODULES)


@pytest.mark.parametrize("name", sorted({*MODULES} - ABSENT))
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for public in module.__all__:
        value = getattr(module, public)
        assert value is not None
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"


def test_the_reference_has_every_public_name() -> None:
    headings = set(re.findall(r"^## (\w+)$", "".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md")), re.M))
    named = {public for name in MODULES if name not in ABSENT for public in importlib.import_module(name).__all__}
    assert named - headings - {"__version__"} == set()


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name not in ABSENT and hasattr(importlib.import_module(name), "_HOMES")]
)
def test_names_that_load_their_modules_are_known_to_type_checkers(name: str) -> None:
    module = importlib.import_module(name)
    typed = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.asname != "__version__"
    }
    assert typed == module._HOMES
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_names_for_custom_parts_and_all_errors_are_imported_from_streamrag() -> None:
    parts = {"Source", "Backend", "Mode", "Startable", "Tokenizer", "ReplaySource", "TraceRecorder"}
    errors = importlib.import_module("streamrag.errors")
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert "StreamRagError" in tree
    assert parts | tree <= {*streamrag.__all__}


def test_no_name_for_demonstrations_is_imported_from_streamrag() -> None:
    assert {*streamrag.__all__} & {*testing.__all__} == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_public_names_only(path: Path) -> None:
    code = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(code)["cells"] if cell["cell_type"] == "code"]
        code = "\n".join("".join(source) for source in cells)
    ours = (
        {"streamrag.demo.demo_folder"} if path.name == "demo.py" else set()
    )  # what `streamrag serve --demo` makes too
    assert [found for found in imported(code) if not is_public(*found) and found[0] not in ours] == []


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: path.name)
def test_a_page_for_users_names_public_names_only(path: Path) -> None:
    text = path.read_text()
    assert [found for code in PYTHON.findall(text) for found in imported(code) if not is_public(*found)] == []
    named = [name.rpartition(".") for name in re.findall(r"(?<![\w/.-])streamrag(?:\.[a-zA-Z_]+)+", text)]
    wrong = [f"{module}.{name}" for module, _, name in named if f"{module}.{name}" not in MODULES]
    assert [name for name in wrong if not is_public(*name.rsplit(".", 1))] == []


def test_the_reference_is_what_signatures_and_docstrings_say() -> None:
    """It holds the surface: every name with its kind and signature, and every option with its default."""
    command = [sys.executable, "scripts/api.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
