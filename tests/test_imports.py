"""Which way imports run, and what is not imported before it is used."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamrag

pytestmark = pytest.mark.usefixtures("without_garbage_collection")

PACKAGE = Path(streamrag.__file__).parent

# Imports run down this list only; parts on one line never import each other. What stands in a folder of `sources` or
# `backends` is a part of its own.
RING = [
    {"__main__"},
    {"cli"},
    {"serve"},
    {"adapters", "demo", "testing"},
    {"backends/lanes"},
    {"backends/ray"},
    {"backends/replicas"},
    {"backends/simulated", "backends/tools", "routing"},
    {"sources/crawl", "sources/hand_over", "sources/postgres", "sources/search"},
    {"sources/index", "sources/pages"},
    {"sources/documents"},
    {"sources/http", "sources/workers"},
    {"open_questions", "refresh", "sessions", "trace"},
    {"display_text", "trace_context"},
]
CORE = [
    {"pipeline"},
    {"backends/openai", "backends/vllm", "sources"},
    {"backends"},
    {"query"},
    {"engine", "modes", "telemetry"},
    {"core"},
    {"records"},
    {"support"},
    {"errors"},
]
"""What the first page promises: it imports nothing of the ring."""

MAX_CORE_LINES = 16_698

LATE = {("pipeline", "sessions"), ("pipeline", "open_questions")}
"""The only imports of the ring in the core: inside functions, for who asks for them."""

# In `backends/vllm`, what the modules of each process may import beside each other.
SHARED_BY_PROCESS: dict[str, set[str]] = {
    "client": {"chunk_wire", "facts", "scheduler_options", "version"},
    "scheduler": {"chunk_wire", "copy_wire", "facts", "scheduler_options", "version"},
    "worker": {"copy_wire"},
    "connector": {"facts", "scheduler", "worker", "copy_wire", "scheduler_options"},  # vLLM's entry to both
    "nixl_connector": set(),  # of decode lanes, which run vLLM's own scheduler and workers
    "scheduler_options": {"chunk_wire"},
    "version": set(),
    "facts": set(),
    "chunk_wire": set(),
    "copy_wire": set(),
}

# In `sources`, what the modules of each folder may import beside modules that stand in no folder.
BENEATH_FOLDER: dict[str, set[str]] = {
    "crawl": {"documents", "pages", "http", "workers"},
    "documents": {"http", "workers"},
    "hand_over": set(),
    "http": set(),
    "index": {"documents", "workers"},
    "pages": {"documents", "http", "workers"},
    "postgres": {"documents", "index", "workers"},
    "search": {"index", "workers"},
    "workers": set(),
    "": set(),  # the modules in no folder are for every program, and need no package
}

HEAVY = {
    "crawl4ai",
    "diskannpy",
    "jinja2",
    "matplotlib",
    "numpy",
    "psycopg",
    "psycopg_pool",
    "ray",
    "sentence_transformers",
    "torch",
    "transformers",
    "vllm",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield module_of(path), ast.parse(path.read_text())


def without_type_checking(tree: ast.Module) -> ast.Module:
    """Imports for a type checker alone are none."""

    class Remover(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if ast.unparse(node.test) == "TYPE_CHECKING" else node

    return Remover().visit(tree)  # type: ignore[no-any-return]


def part_of(module: str) -> str:
    name, *rest = module.split(".")
    is_folder = name in {"backends", "sources"} and rest and (PACKAGE / name / rest[0]).is_dir()
    return f"{name}/{rest[0]}" if is_folder else name


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def names_imported(tree: ast.AST) -> Iterator[str]:
    """`from a import b` as a.b, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_run_down_the_house() -> None:
    line_of = {part: number for number, line in enumerate([*RING, *CORE]) for part in line}
    wrong = []
    num_checked = 0
    for module, tree in modules():
        if module == "__init__":
            continue
        for imported in imports(without_type_checking(tree)):
            if imported == "streamrag":  # the top, which knows all
                wrong.append(f"streamrag.{module} imports streamrag")
            if imported.startswith("streamrag_bench"):  # which adds its commands by entry points
                wrong.append(f"streamrag.{module} imports {imported}")
            if not imported.startswith("streamrag."):
                continue
            importer, target = part_of(module), part_of(imported.removeprefix("streamrag."))
            num_checked += 1
            if importer != target and line_of[importer] >= line_of[target] and (importer, target) not in LATE:
                wrong.append(f"streamrag.{module} imports {imported}")
    assert wrong == []
    assert num_checked > 50


def test_the_core_can_be_read_in_a_day() -> None:
    core = set().union(*CORE)
    lines = [path.read_text().count("\n") for path in PACKAGE.rglob("*.py") if part_of(module_of(path)) in core]
    assert sum(lines) <= MAX_CORE_LINES


def parts_of(line: str) -> list[str]:
    """The parts of a line in the list of CONTRIBUTING.md; a name may stand in the folder of the one before."""
    known = set().union(*RING, *CORE)
    parts = [""]
    for name in line.strip().partition("  ")[0].split(", "):
        beside = f"{parts[-1].partition('/')[0]}/{name}"
        parts.append(beside if "/" in parts[-1] and beside in known else name)
    return parts[1:]


def test_the_list_for_contributors_has_the_same_parts_in_the_same_order() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    ((ring, core),) = re.findall(r"\n\n((?: {4}.+\n)+?) {4}-+ the core\n((?: {4}.+\n)+)", text)
    for lines, expected in ((ring, RING), (core, CORE)):
        height_of = {part: height for height, parts in enumerate(expected) for part in parts}
        listed = [parts_of(line) for line in lines.splitlines()]
        assert sorted(part for parts in listed for part in parts) == sorted(height_of)
        heights = [{height_of[part] for part in parts} for parts in listed]
        assert all(len(of_line) == 1 for of_line in heights)
        assert heights == sorted(heights, key=min)


def test_only_backends_import_vllm() -> None:
    """By statement, or by name as `importlib.import_module("vllm...")`."""
    importers = set()
    for module, tree in modules():
        by_name = (
            str(node.args[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        )
        if any(name.split(".")[0] == "vllm" for name in (*imports(tree), *by_name)):
            importers.add(module.split(".")[0])
    assert importers == {"backends"}


def test_processes_of_an_engine_share_only_what_travels_between_them() -> None:
    wrong = []
    found = set()
    for module, tree in modules():
        if not module.startswith("backends.vllm.") or module == "backends.vllm.__init__":
            continue
        importer = module.split(".")[2]
        for imported in names_imported(tree):
            if not imported.startswith("streamrag.backends.vllm"):
                continue
            target = imported.removeprefix("streamrag.backends.vllm.").split(".")[0]
            found.add((importer, target))
            if target not in {importer, *SHARED_BY_PROCESS[importer]}:
                wrong.append(f"streamrag.{module} imports {imported}")
    assert wrong == []
    assert {(importer, target) for importer, targets in SHARED_BY_PROCESS.items() for target in targets} <= found


def test_folders_of_sources_import_one_way() -> None:
    wrong = []
    found = set()
    for module, tree in modules():
        if not module.startswith("sources.") or module == "sources.__init__":
            continue
        importer = module.split(".")[1] if module.count(".") == 2 else ""
        for imported in names_imported(tree):
            target = imported.removeprefix("streamrag.sources.").split(".")[0]
            if not imported.startswith("streamrag.sources.") or target not in BENEATH_FOLDER:
                continue
            found.add((importer, target))
            if target not in {importer, *BENEATH_FOLDER[importer]}:
                wrong.append(f"streamrag.{module} imports {imported}")
    assert wrong == []
    assert {(importer, target) for importer, targets in BENEATH_FOLDER.items() for target in targets} <= found


def test_importing_streamrag_imports_nothing_heavy() -> None:
    names = [name for name in streamrag.__all__ if name != "__version__"]
    code = (
        "import sys, streamrag\n"
        "first = sorted(set(sys.modules) & set(sys.argv[1].split()))\n"
        f"for name in {names!r}: getattr(streamrag, name)\n"
        "import streamrag.cli\n"
        "print(first, sorted(set(sys.modules) & set(sys.argv[1].split())))"
    )
    heavy = HEAVY | {"httpx", "pydantic", "rich"}
    alone = subprocess.run(
        [sys.executable, "-c", code, " ".join(sorted(heavy))], capture_output=True, text=True, check=True
    )
    first, with_all_names = alone.stdout.split("] [")
    assert first == "["
    assert not HEAVY & set(with_all_names.strip("]\n").replace("'", "").split(", "))
