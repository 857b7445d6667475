"""Which version this is, and which ones of other packages are installed."""

from importlib import metadata

__version__ = "0.1.0"


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions by package, without the packages that are not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
