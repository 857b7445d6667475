"""Public names whose modules are imported on first use."""

import re
import sys
from importlib import import_module
from typing import Any

IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def import_lazily(module: str) -> list[str]:
    """Let `module` import its lazy names when they are used, each once, and return them, sorted.

    They are written once, as type checkers need them: as lines `from MODULE import NAME as NAME` under
    `if TYPE_CHECKING:` in the source of the module, which is read here.
    """
    loader: Any = sys.modules[module].__loader__
    homes = {name: home for home, name in IMPORT.findall(loader.get_source(module))}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    sys.modules[module].__getattr__ = get  # type: ignore[method-assign]
    return sorted(homes)
