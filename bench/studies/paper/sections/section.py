"""What a section of the report is given, and what it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..pictures import Pictures
from ..plan import Scale, Wanted
from ..results import Results


@dataclass(frozen=True)
class Report:
    """What sections write from."""

    scale: Scale
    results: Results
    pictures: Pictures


class Section(NamedTuple):
    """`name` is that of the option `--only`."""

    name: str
    title: str
    wanted: Callable[[Scale], Wanted]
    write: Callable[[Report], str]


def nothing(scale: Scale) -> Wanted:
    """For sections that simulate nothing."""
    return ()
