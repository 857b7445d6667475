"""How the scheduler plugin is put together."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamrag.backends.vllm import scheduler
from streamrag.engine.rules import KvBudgetLeft
from streamrag.engine.step_size import StepCosts
from tests.backends.vllm.scheduler.test_adapters import make_engine
from tests.backends.vllm.scheduler.test_third_party_connector import connected
from tests.engine.planned import Limits

FOLDER = Path(scheduler.__file__).parent

OF_VLLM = {
    "_all_token_ids",
    "_free_request_blocks",
    "_handle_blocked_waiting_request",
    "_inflight_prefills",
    "_request_blocks_can_be_freed",
}
"""Attributes of vLLM's own scheduler and request, for which it has no public name."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(FOLDER.rglob("*.py")):
        yield path.relative_to(FOLDER).as_posix(), ast.parse(path.read_text())


def test_no_object_reads_the_underscored_attributes_of_another() -> None:
    found = {
        (name, ast.unparse(node))
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        and node.attr not in {*OF_VLLM, "_replace"}  # which named tuples have
    }
    assert found == set()


def test_only_the_hooks_subclass_the_scheduler_of_vllm() -> None:
    subclassing = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {ast.unparse(base) for base in node.bases} & {"Scheduler", "AsyncScheduler", "_Base"}
    }
    assert subclassing == {"hooks.py"}


def test_plans_are_made_in_one_module() -> None:
    calling = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "plan"
    }
    assert calling == {"step.py"}


def test_each_hook_is_in_the_table_of_hooks() -> None:
    (hooks,) = (tree for name, tree in modules() if name == "hooks.py")
    table = ast.get_docstring(hooks) or ""
    (class_,) = (n for n in hooks.body if isinstance(n, ast.ClassDef) and n.name == "StreamingHooks")
    methods = [n.name for n in class_.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
    assert [name for name in methods if f"`{name}`" not in table] == []


def test_plans_are_tested_with_the_rules_of_the_engine_in_its_order(bench: Callable[..., Any]) -> None:
    options = {"max_data_tokens": 8, "kv_budget": 0.5, "data_high_water": 0.9, "groups_prefills": True}
    schedulers = [
        bench(num_draft_tokens=2, streamrag=options).scheduler,
        bench(has_mamba=True).scheduler,
        connected(bench).scheduler,
        make_engine(max_loras=1, is_async=False).scheduler,
    ]
    limits = Limits(
        *(400, 6),
        step_costs=StepCosts(60, 0.1),
        num_blocks_kept_from_data=1,
        max_data_tokens=1,
        budget=KvBudgetLeft(1, has_claims=False),
        draft_survival=0.5,
        max_adapters=1,
        prefill_unit=4,
        has_connector=True,
    )
    tested = [type(rule) for rule in limits.rules(lambda request, num_tokens: None)]
    used = [[type(rule) for rule in scheduler.plugin.planner._make_rules()] for scheduler in schedulers]
    assert used == [[rule for rule in tested if rule in listed] for listed in used]
    assert set(tested) == {rule for listed in used for rule in listed}
