"""Studies, and examples that compare answers, name the dtype of their engines: equal bfloat16 answers are luck."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKERS = {"VllmBackend", "EngineArgs", "AsyncEngineArgs", "LLM"}
CHOOSE_NOTHING = {"ask_the_web", "langgraph_tools", "own_policy", "push_tokens", "watch_a_log", "wrap_a_function"}
"""Examples that compare no answers, with a model of the reader's: the engine's dtype is the best one."""
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
COMPARING = [
    *sorted(ROOT.glob("bench/studies/**/*.py")),
    *(path for path in EXAMPLES if path.stem not in CHOOSE_NOTHING),
]


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def engine_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls of what makes an engine, and partials of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = [node.func, *node.args[:1]] if name_of(node.func) == "partial" else [node.func]
            if any(name_of(each) in MAKERS for each in called):
                yield node


def arguments(call: ast.Call) -> Iterator[object]:
    """Yield the names of keywords and of engine arguments; None for what is only known when it runs."""
    for keyword in call.keywords:
        yield keyword.arg
        if keyword.arg == "engine_args":
            keys = keyword.value.keys if isinstance(keyword.value, ast.Dict) else [None]
            yield from (getattr(key, "value", None) for key in keys)


@pytest.mark.parametrize("path", COMPARING, ids=lambda path: "-".join(path.relative_to(ROOT).with_suffix("").parts))
def test_every_engine_of_a_study_names_its_dtype(path: Path) -> None:
    for call in engine_calls(ast.parse(path.read_text())):
        assert {*arguments(call)} & {"dtype", None}, f"{path.name}, line {call.lineno}"


def test_examples_that_leave_the_dtype_to_the_engine_make_one() -> None:
    found = {path.stem for path in EXAMPLES if any(engine_calls(ast.parse(path.read_text())))}
    assert found & CHOOSE_NOTHING == CHOOSE_NOTHING


@pytest.mark.parametrize(
    "code", ["vllm.LLM(model)", "partial(VllmBackend, model)", "arg_utils.EngineArgs(model=model)"]
)
def test_a_call_without_dtype_is_found(code: str) -> None:
    assert len([*engine_calls(ast.parse(code))]) == 1
