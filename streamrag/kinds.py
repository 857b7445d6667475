"""What a value is that somebody else's code gave: for checks, and for what they say."""

import math
from numbers import Integral, Real

__all__ = ["is_number", "is_whole", "kind_of"]


def is_whole(value: object) -> bool:
    """Whether it is a whole number of whatever type; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number of whatever type; NaN is none by its name."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def kind_of(value: object) -> str:
    """What it is, for a message, as in "a str": its value may be long."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
