"""The optional packages of an index. They are looked up without being imported."""

from importlib.util import find_spec

from streamrag.errors import MissingDependencyError, install_line

LIBRARIES = {"diskann": "diskannpy", "ivf": "faiss"}
"""The module that each kind of index needs."""
DISTRIBUTIONS = {"faiss": "faiss-cpu"}
"""The distributions of modules whose name is another one."""
INSTALL_DISKANN = (
    "pip install --no-deps diskannpy==0.7.0   (it asks for an old numpy, but runs with the current one; "
    "there are wheels for CPython up to 3.11 on Linux x86-64; elsewhere, build the index with --kind ivf)"
)


def is_installed(*modules: str) -> bool:
    """Whether all of these modules can be imported."""
    return all(find_spec(module) for module in modules)


def require_package(module: str) -> None:
    """Raise MissingDependencyError if a module of DiskANN or of the extra `embed` is not installed."""
    if not is_installed(module):
        install = INSTALL_DISKANN if module == "diskannpy" else install_line("embed")
        raise MissingDependencyError(DISTRIBUTIONS.get(module, module.replace("_", "-")), install)
