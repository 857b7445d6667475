"""The package versions that a result depends on."""

import platform

from streamrag.backends.vllm.version import DISTRIBUTIONS
from streamrag.support.versions import installed_versions


def versions() -> dict[str, str]:
    """Return the versions of Python, streamrag, vLLM and torch."""
    return {"python": platform.python_version(), **installed_versions("streamrag", *DISTRIBUTIONS, "torch")}
