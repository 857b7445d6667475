"""Experiments, and demos that compare answers, name the dtype of their engines: in bfloat16 equal answers are luck."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPARING = [*sorted(ROOT.glob("experiments/*.py")), ROOT / "examples" / "demo.py"]


def made_backends(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of VllmBackend, and partials of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = [node.func, *node.args[:1]] if getattr(node.func, "id", "") == "partial" else [node.func]
            if any(getattr(name, "id", "") == "VllmBackend" for name in called):
                yield node


@pytest.mark.parametrize("path", COMPARING, ids=lambda path: path.stem)
def test_every_backend_of_an_experiment_names_its_dtype(path: Path) -> None:
    for call in made_backends(ast.parse(path.read_text())):
        assert {keyword.arg for keyword in call.keywords} & {"dtype", None}, f"{path.name}, line {call.lineno}"
