"""The optional packages of an index. They are looked up without being imported."""

import importlib.util

from streamrag.errors import MissingDependencyError, require_modules

LIBRARIES = {"diskann": "diskannpy", "ivf": "faiss"}
"""The module that each kind of index needs."""
INSTALL_DISKANN = (
    "pip install --no-deps diskannpy==0.7.0   (it asks for an old numpy, but runs with the current one; "
    "there are wheels for CPython up to 3.11 on Linux x86-64; elsewhere, build the index with --kind ivf)"
)


def is_installed(*modules: str) -> bool:
    """Whether all of these modules can be imported."""
    return all(importlib.util.find_spec(module) for module in modules)


def require_package(module: str) -> None:
    """Raise MissingDependencyError if a module of DiskANN or of the extra `embed` is not installed."""
    if module == "diskannpy" and not is_installed(module):
        raise MissingDependencyError(module, INSTALL_DISKANN)
    require_modules("embed", module)
