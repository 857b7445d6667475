"""Checks of values that foreign code gave, and their words in messages."""

import math
from contextlib import suppress
from numbers import Integral, Real


def is_whole(value: object) -> bool:
    """Whether it is a whole number of any type; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number of any type that a float can hold; NaN is not."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return not math.isnan(float(value))
    return False


def short(value: object) -> str:
    """Return the beginning of the `repr` of `value`, or its kind if it has none, as a number of 5,000 digits."""
    try:
        return f"{value!r:.200}"
    except Exception:  # the value is anybody's, and this is for the message of another error
        return kind_of(value)


def message_of(error: BaseException) -> str:
    """Return what `error` says, or its kind if it says nothing or fails to: an exception may be anybody's class too."""
    with suppress(Exception):
        if text := str(error):
            return text
    return type(error).__name__


def plain_text(text: str) -> str:
    """The same text as a `str`: a subclass, as an Enum, may be written otherwise than it reads, or have no hash."""
    return str.__str__(text)


def kind_of(value: object) -> str:
    """Return the kind of `value` for a message, as in "a str": the value itself may be long."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
