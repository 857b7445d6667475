"""Which way imports run within the distribution, and what its commands do not import before they need it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamrag_bench

PACKAGE = Path(streamrag_bench.__file__).parent
SLOW = ("matplotlib", "scipy", "vllm")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def importers(*modules: str) -> set[str]:
    """Parts of the package, a folder or a module each, that import one of the modules."""
    return {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if any(f"{name}.".startswith(tuple(f"{module}." for module in modules)) for name in imports(path))
    }


def test_only_commands_import_commands() -> None:
    assert importers("streamrag_bench.cli", "streamrag.cli") == {"cli"}


def test_only_the_measured_engine_imports_vllm() -> None:
    assert importers("vllm") == {"measured_engine"}


@pytest.mark.parametrize("command", ["advise", "bench.command", "profile", "trace"])
def test_the_help_of_a_command_needs_no_slow_package(command: str) -> None:
    code = f"import sys, streamrag_bench.cli.{command}; print(*sorted(set(sys.modules) & set({SLOW!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
