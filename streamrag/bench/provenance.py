"""What a result depends on beside its settings."""

import platform

from streamrag.backends.vllm.version import DISTRIBUTIONS
from streamrag.versions import installed_versions


def versions() -> dict[str, str]:
    """Versions of the packages that matter, and of Python."""
    return {"python": platform.python_version(), **installed_versions("streamrag", *DISTRIBUTIONS, "torch")}
