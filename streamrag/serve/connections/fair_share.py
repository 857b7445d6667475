"""Event loop time for work that a client causes by sending bytes: a little is free, and the rest is shared."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FREE_S = 0.002
"""CPU seconds that an account has free at first. A request of some KiB needs .3 ms."""

FREE_SHARE = 0.01
"""CPU seconds that an account has free in each further second."""

BUSY_SHARE = 0.2
"""Share of the event loop for all accounts together that need more than what is free."""


class FairShare:
    """Pauses between pieces of work, so that clients who cause much of it leave time for all others.

    The pauses of an account grow with the number of accounts that pause. What goes beyond the free part of each account
    therefore takes no more than `BUSY_SHARE` of the event loop in total, however many accounts there are. The free part
    is per account: the total of these grows with the accounts, and where an account belongs to a connection, a client
    gets `FREE_S` more with each connection that it opens. Only a limit of the rate of connections bounds that.

    now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.busy_until_s: dict[Account, float] = {}


class Account:
    """Work that one client, connection or stream has caused."""

    def __init__(self, share: FairShare) -> None:
        self.num_waiting = 0
        """Number of pieces of work in `take_turn` that have not begun, or whose pause is not over."""
        self._share = share
        self._lock = asyncio.Lock()
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

    async def take_turn(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, called once the turns before it are over, and pause for as long as it costs.

        For large pieces: those that arrive at the same moment on several connections would else be done one right after
        the other, each before the pause of any.
        """
        self.num_waiting += 1
        try:
            async with self._lock:
                began_s = time.thread_time()
                try:
                    return work()
                finally:
                    await asyncio.sleep(self.pause_s(time.thread_time() - began_s))
        finally:
            self.num_waiting -= 1
