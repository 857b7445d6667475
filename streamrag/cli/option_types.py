"""Types of command-line options, for argparse."""

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """Parse an integer of at least 1; underscores may group its digits. Raises ArgumentTypeError for another."""
    value = text.replace("_", "")
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(value)


def seconds(text: str) -> float:
    """Parse a number of seconds from 0.1 to 86,400. Raises ArgumentTypeError for another."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise ArgumentTypeError(f"{text!r} must be a number of seconds from 0.1 to 86400")
    return value
