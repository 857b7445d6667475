"""Fair shares of the event loop for the parsing work that clients cause."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from streamrag.serve.failures import RequestError

T = TypeVar("T")

FREE_S = 0.002  # Free CPU seconds of a new account. A request of a few KiB takes 0.3 ms.
FREE_SHARE = 0.01  # free CPU seconds that an account gains per second
BUSY_SHARE = 0.2  # maximum share of the event loop for all accounts together that have used up their free part


class FairShare:
    """A scheduler of pauses between pieces of work, so that expensive clients leave time for all others.

    The pauses of an account grow with the number of paused accounts. Work beyond the free parts therefore takes at most
    `BUSY_SHARE` of the event loop, however many accounts there are. The free parts are per account and add up: where
    each connection has an account, a client gets another `FREE_S` with each connection that it opens. Only a rate limit
    of connections bounds that.

    now_s: the clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self.busy_until_s: dict[Account, float] = {}


class Account:
    """The CPU time used, and the memory held, on behalf of one client, connection or stream."""

    def __init__(self, share: FairShare) -> None:
        self.num_waiting = 0  # number of calls of `take_turn` in progress, including those in their pause
        self._share = share
        self._lock = asyncio.Lock()
        self._num_bytes = 0
        self._used_s = 0.0
        self._since_s = share.now_s()

    def pause_s(self, took_s: float) -> float:
        """Charge `took_s` of CPU time, and return the seconds that the caller has to pause.

        They are 0 within the free part, else `took_s / BUSY_SHARE` times the number of paused accounts, this one too.
        The pauses of an account add up.
        """
        now_s = self._share.now_s()
        self._used_s = max(self._used_s - FREE_SHARE * (now_s - self._since_s), 0.0) + took_s
        self._since_s = now_s
        if self._used_s <= FREE_S:
            return 0.0
        busy = self._share.busy_until_s
        for account in [each for each, until_s in busy.items() if until_s <= now_s]:
            del busy[account]
        until_s = busy.pop(self, now_s)
        busy[self] = until_s + took_s * (len(busy) + 1) / BUSY_SHARE
        return busy[self] - now_s

    def turn_s(self, takes_s: float) -> float:
        """Charge work ahead of time, and return the seconds until its turn, which earlier work's pauses delay.

        For small pieces: a client whose pieces are further apart than their pauses never waits.
        """
        wait_s = max(self._share.busy_until_s.get(self, 0.0) - self._share.now_s(), 0.0)
        self.pause_s(takes_s)
        return wait_s

    def hold(self, num_bytes: int, most: int) -> None:
        """Count memory of requests that wait. Raises RequestError (429) beyond `most`. The caller must `release` it."""
        if self._num_bytes + num_bytes > most:
            message = f"requests of yours that wait take more than {most:,} bytes, which is the most"
            raise RequestError(message, status=429, code="too_many_waiting")
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Subtract memory that `hold` has counted."""
        self._num_bytes -= num_bytes

    @contextmanager
    def holding(self, num_bytes: int, most: int) -> Iterator[None]:
        """Count memory while the block runs, as `hold` does."""
        self.hold(num_bytes, most)
        try:
            yield
        finally:
            self.release(num_bytes)

    async def take_turn(self, work: Callable[[], T]) -> T:
        """Return `work()`, called after the account's earlier turns and their pauses, and then pause for its cost.

        For large pieces: without turns, pieces that arrive at once on several connections would run back to back,
        before any of the pauses.
        """
        self.num_waiting += 1
        try:
            async with self._lock:
                start_s = time.thread_time()
                try:
                    return work()
                finally:
                    await asyncio.sleep(self.pause_s(time.thread_time() - start_s))
        finally:
            self.num_waiting -= 1
