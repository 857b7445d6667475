"""Checks of options that several sources have."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeGuard

from streamrag.errors import ConfigurationError
from streamrag.support.messages import is_whole, short


def check_whole(owner: str, name: str, value: object, least: int, most: int) -> None:
    """:raises ConfigurationError: it is no whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(f"{owner}: {name}={short(value)} must be a whole number from {least} to {most}")


def is_growing(value: object, least: int) -> TypeGuard[Sequence[int]]:
    """Whether it is a list of whole numbers from `least`, each larger than the one before. It may be empty."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(is_whole, value)):
        return False
    return all(each >= least for each in value[:1]) and all(a < b for a, b in pairwise(value))
