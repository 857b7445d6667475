"""The time, as the plugin reads it."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class HostClock:
    """Both clocks that records need. A simulated engine puts its own in their place."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds, of all records. `time.monotonic` is, on Linux, the same for all processes of a host."""
    wall: Callable[[], float] = time.time
    """Seconds, of `Request.arrival_time`, which is all that vLLM says about when a plain request was sent."""
