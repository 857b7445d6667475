"""Event loop time for work that a client causes by sending bytes: a little is free, and the rest is shared."""

import time
from collections.abc import Callable

FREE_S = 0.002
"""CPU seconds that an account has free at first. A request of some KiB needs .3 ms."""

FREE_SHARE = 0.01
"""CPU seconds that an account has free in each further second."""

BUSY_SHARE = 0.2
"""Share of the event loop for all accounts together that need more than what is free."""


class FairShare:
    """Pauses between pieces of work, so that clients who cause much of it leave time for all others.

    The pauses of an account grow with the number of accounts that pause, so together they take no more than
    `BUSY_SHARE` of the event loop, however many they are.

    now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.busy_until_s: dict[Account, float] = {}


class Account:
    """Work that one connection or stream has caused."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._used_s = 0.0
        self._since_s = share.now_s()

    def pause_s(self, took_s: float) -> float:
        """Return the seconds to pause after a piece of work that took `took_s` of CPU time."""
        now_s = self._share.now_s()
        self._used_s = max(self._used_s - FREE_SHARE * (now_s - self._since_s), 0.0) + took_s
        self._since_s = now_s
        if self._used_s <= FREE_S:
            return 0.0
        busy = self._share.busy_until_s
        for account in [each for each, until_s in busy.items() if until_s <= now_s]:
            del busy[account]
        busy.pop(self, None)
        pause_s = took_s * (len(busy) + 1) / BUSY_SHARE
        busy[self] = now_s + pause_s
        return pause_s
