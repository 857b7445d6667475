"""Check by form that names and docstrings read as plain English: CONTRIBUTING.md has the rules."""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "streamrag", ROOT / "bench" / "streamrag_bench")
MODULES = {path: ast.parse(path.read_text()) for package in PACKAGES for path in sorted(package.rglob("*.py"))}
MAX_FUNCTION_LINES, MAX_CLASS_LINES, MAX_FOLDER_MODULES = 60, 300, 15
OPENERS = set(
    re.findall(
        r"\w+",
        """of what that those these it its itself as so who whoever whom whose nothing nobody one same there
        where which whatever until from by in on here such else something anything everything everybody everyone how
        why also behind beside besides they them some others both only""",
    )
)
"""First words of sentences that hide what is done, or what a thing is."""
TEST_OPENERS = OPENERS - {"both", "only"} | {"this", "none", "when", "while", "once"}
"""First words of test names that hide what is tested. "Both sides ..." and "Only owners ..." are subjects."""
RIDDLES = re.compile("nobod|everybod|somebod|anybod|whoever|stranger|so_many|comes?_about|behind_the_back")
"""Words of law and legend, which hide a subject anywhere in a test's name."""
VAGUE = set(
    re.findall(
        r"\w+",
        """said told asked answered answering asking again chosen choosing spelled found shown showing made took stood
        given known begun taken kept brought left gone done heard writing running opening sharing dropping
        following watching reading building tokenizing retrieving refining silence life home course books parts
        lane lanes choice kinds handle stretch scratch likes things whoever""",
    )
)
"""Participles, gerunds and pictures, which name nothing by themselves."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree: ast.Module) -> Iterator[Definition]:
    return (node for node in ast.walk(tree) if isinstance(node, Definition))


def place(path: Path, node: Definition | ast.Expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def docstrings() -> Iterator[tuple[str, str, bool]]:
    """Yield place, text, and whether it is that of a function or class, of each docstring."""
    for path, tree in MODULES.items():
        for parent in ast.walk(tree):
            body = getattr(parent, "body", [])
            if isinstance(parent, Definition) and (text := ast.get_docstring(parent)):
                yield place(path, parent), text, True
            for node in body[1:] if isinstance(body, list) else []:
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    yield place(path, node), node.value.value.strip(), False


def test_docstrings_begin_with_what_is_done_or_what_a_thing_is() -> None:
    def is_bad(text: str, is_definition: bool) -> bool:
        word = re.match(r"[A-Za-z']+", text)
        return word is not None and (word[0].lower() in OPENERS or (is_definition and word[0] in ("If", "When")))

    assert [(where, text[:60]) for where, text, is_definition in docstrings() if is_bad(text, is_definition)] == []


def test_names_are_nouns_for_things_and_verbs_for_actions() -> None:
    modules = [str(path) for path in MODULES if path.stem in VAGUE]
    names = [
        f"{place(p, n)} {n.name}" for p, t in MODULES.items() for n in definitions(t) if n.name.strip("_") in VAGUE
    ]
    assert modules + names == []


def test_test_names_begin_with_what_is_tested() -> None:
    paths = [path for folder in ("tests", "bench") for path in sorted((ROOT / folder).rglob("test_*.py"))]
    names = [
        f"{path.relative_to(ROOT)}: test_{name}"
        for path in paths
        for name in re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
        if name.partition("_")[0] in TEST_OPENERS or RIDDLES.search(name)
    ]
    assert names == []


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place(path, node))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize(("kind", "limit"), [(ast.FunctionDef, MAX_FUNCTION_LINES), (ast.ClassDef, MAX_CLASS_LINES)])
def test_functions_and_classes_stay_small(kind: type[ast.AST], limit: int) -> None:
    kinds = (kind, ast.AsyncFunctionDef) if kind is ast.FunctionDef else (kind,)
    sizes = {
        f"{place(path, node)} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in MODULES.items()
        for node in definitions(tree)
        if isinstance(node, kinds)
    }
    assert {name: size for name, size in sizes.items() if size > limit} == {}


def test_folders_stay_small() -> None:
    sizes = collections.Counter(str(path.parent.relative_to(ROOT)) for path in MODULES)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FOLDER_MODULES} == {}
