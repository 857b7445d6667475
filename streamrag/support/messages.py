"""Checks of values from foreign code, and their text in messages."""

import math
from contextlib import suppress
from numbers import Integral, Real


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of any numeric type; bools are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is a real number of any type that fits a float; bools and NaN are not."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return not math.isnan(float(value))
    return False


def short_repr(value: object) -> str:
    """Return the first 200 characters of `repr(value)`, or its type if `repr` fails, as for an int of 5,000 digits."""
    try:
        return f"{value!r:.200}"
    except Exception:  # foreign code; and this is for the message of another error
        return type_name(value)


def message_of(error: BaseException) -> str:
    """Return the message of `error`, or the name of its type if the message is empty or `str` fails."""
    with suppress(Exception):
        if text := str(error):
            return text
    return type(error).__name__


def plain_text(text: str) -> str:
    """Convert a subclass of `str` to `str`: a subclass such as an Enum may format differently, or be unhashable."""
    return str.__str__(text)


def type_name(value: object) -> str:
    """Return the type of `value` for a message, as in "a str"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
