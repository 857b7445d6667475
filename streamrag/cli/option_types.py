"""Types for command-line options, which argparse calls with the text that was typed."""

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """Return the whole number in `text`, which must be at least 1; underscores may group its digits."""
    value = text.replace("_", "")
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(value)


def seconds(text: str) -> float:
    """Return the number of seconds in `text`, which must be from 0.1 to 86,400."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")
    return value
