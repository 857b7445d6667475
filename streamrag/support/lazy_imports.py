"""Public names whose modules are imported on first use."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def public_names(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return the public names of `package`, and a module-level `__getattr__` that imports each once, on first use.

    They are written once, as type checkers need them: as lines `from MODULE import NAME as NAME` under
    `if TYPE_CHECKING:` in the package's `__init__.py`, which is read here.
    """
    loader: Any = sys.modules[package].__loader__
    homes = {name: home for home, name in IMPORT.findall(loader.get_source(package))}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(homes), get
