"""The one clock: seconds that only grow, passed in wherever time is read so that a test or a simulator can own it."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]

monotonic: Clock = time.monotonic
