"""The names that a user may rely on."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import streamrag

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(streamrag.__path__, "streamrag.")
    if not module.name.endswith("worker_main")
)


def test_every_public_name_of_the_package_is_there_and_lazy_names_are_known_to_type_checkers() -> None:
    assert streamrag.__all__ == [*sorted(streamrag._HOMES), "__version__"]
    for name in streamrag.__all__:
        assert getattr(streamrag, name) is not None
    tree = ast.parse(Path(streamrag.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamrag.")
        for alias in node.names
    }
    assert typed == set(streamrag.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = streamrag.Nothing


@pytest.mark.parametrize("name", MODULES)
def test_all_names_what_a_module_defines_in_public(name: str) -> None:
    module = importlib.import_module(name)
    if not hasattr(module, "__all__"):
        assert hasattr(module, "__path__"), f"{name} has no __all__"  # a folder may have none
        return
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for public in module.__all__:
        value = getattr(module, public)
        assert value is not None
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"
