"""A fair queue for worker processes: the next worker goes to the query that has used the least worker time.

A query that keeps workers busy, with many or slow pages, must not starve the others, so the queue compares the time for
which jobs have held workers, not the number of jobs. Unused time is not saved up: a query that arrives, returns or asks
for more joins at the current level of the queries that were active all the time.

Source: virtual time as in weighted fair queueing, https://doi.org/10.1145/75246.75248
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Use:
    """Worker time used by jobs, running ones included."""

    def __init__(self) -> None:
        self.num_held = 0
        self._offset_s = 0.0

    def used_s(self, now_s: float) -> float:
        """Return the worker seconds used until now."""
        return self._offset_s + self.num_held * now_s

    def add(self, num_held: int, now_s: float) -> None:
        """Begin a job (1), or end one (-1). Jobs need no identity, because only the sum matters."""
        self.num_held += num_held
        self._offset_s -= num_held * now_s

    def raise_to(self, level_s: float, now_s: float) -> None:
        """Raise the used time to `level_s` if it is lower."""
        self._offset_s += max(0.0, level_s - self.used_s(now_s))


class Share(_Use):
    """The worker time that one query has used."""

    def __init__(self) -> None:
        super().__init__()
        self.was_stopped = False
        """Whether a job exceeded its limits; from then on the query may hold at most half of the workers."""
        self.parts: dict[str, _Use] = defaultdict(_Use)
        """The time used by each part of the query, such as each host that it crawls."""

    def add_job(self, num_held: int, part: str, now_s: float) -> None:
        """Begin a job of `part` (1), or end one (-1)."""
        self.add(num_held, now_s)
        self.parts[part].add(num_held, now_s)


class _Waiter(NamedTuple):
    number: int
    part: str
    future: asyncio.Future[Any]


class FairQueue(Generic[T]):
    """A pool of `size` items, each of which one job may hold at a time."""

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._free: list[T] = []
        self._waiters: dict[Share, list[_Waiter]] = {}
        self._numbers = itertools.count()
        self._holders: set[Share] = set()
        self._level_s = 0.0  # the time used by a share that was always active: the more shares, the slower it grows
        self._now_s = clock()
        self._is_closed = False

    def put(self, item: T) -> None:
        """Add a free item, which a waiting job gets at once."""
        self._free.append(item)
        self._serve()

    async def get(self, share: Share, part: str) -> T | None:
        """Wait for the turn of `part` of `share`, and return an item, held until `give_back`; None once closed."""
        if self._is_closed:
            return None
        self._update_level()
        if share not in self._waiters:
            share.raise_to(self._level_s, self._now_s)
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(next(self._numbers), part, future)
        self._waiters.setdefault(share, []).append(waiter)
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (item := future.result()) is not None:  # just granted
                self.give_back(item, share, part)
            else:
                self._update_level()
                self._remove(share, waiter)
            raise

    def give_back(self, item: T, share: Share, part: str) -> None:
        """Free the item that `get` returned for `share` and `part`, or its replacement."""
        self._update_level()
        share.add_job(-1, part, self._now_s)
        if not share.num_held:
            self._holders.discard(share)
        self.put(item)

    def close(self) -> None:
        """Let all waiting calls of `get` return None."""
        self._is_closed = True
        for waiter in itertools.chain.from_iterable(self._waiters.values()):
            if not waiter.future.done():
                waiter.future.set_result(None)
        self._waiters.clear()

    def _update_level(self) -> None:
        """Add the worker time since the last call to the level, divided among holders and waiters.

        Call it before a holder or waiter is added or removed.
        """
        now_s = self._clock()
        if self._holders:
            held_s = (now_s - self._now_s) * sum(share.num_held for share in self._holders)
            self._level_s += held_s / len(self._holders | self._waiters.keys())
        self._now_s = now_s

    def _remove(self, share: Share, waiter: _Waiter) -> None:
        others = [other for other in self._waiters.pop(share, ()) if other is not waiter]
        if others:
            self._waiters[share] = others

    def _serve(self) -> None:
        """Give free items to waiting jobs, one by one: to the query that `_next_share` returns, there to the part,
        such as a host, that has used the least time, and there to the job that arrived first."""
        self._update_level()
        while self._free and not self._is_closed and (share := self._next_share()):
            waiter = min(
                self._waiters[share], key=lambda each: (share.parts[each.part].used_s(self._now_s), each.number)
            )
            self._remove(share, waiter)
            if not waiter.future.done():  # otherwise its task was just cancelled
                share.add_job(1, waiter.part, self._now_s)
                self._holders.add(share)
                waiter.future.set_result(self._free.pop(0))

    def _next_share(self) -> Share | None:
        """Return the waiting share that has used least, or None. A stopped one holds at most half of the items."""
        max_held = max(1, self._size // 2)
        shares = [share for share in self._waiters if not share.was_stopped or share.num_held < max_held]
        return min(shares, key=lambda share: (share.used_s(self._now_s), self._waiters[share][0].number), default=None)
