"""Versions of this package and of installed ones."""

from contextlib import suppress
from importlib import metadata

__version__ = "0.1.0"


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the version of each of `packages` that is installed, by its name; others are left out."""
    versions = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
