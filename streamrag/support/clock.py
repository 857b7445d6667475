"""The clock in seconds, passed in wherever time is read so that tests and simulations can replace it."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
monotonic: Clock = time.monotonic


def seconds_since_boot() -> float:
    """Return the seconds since this machine started, with those in which it slept, which `monotonic` leaves out;
    without these where the system is not Linux."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
