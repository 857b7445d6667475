"""The clock in seconds, passed in wherever time is read so that tests and simulations can replace it."""

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]
monotonic: Clock = time.monotonic
