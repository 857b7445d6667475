"""A fair queue for a few workers: the next turn is for the query that has had least of them.

A query that keeps workers busy, because its pages are many or made to be slow, must not keep them from the others. So
what counts is the time for which jobs have held a worker, not their number. Time that a query did not ask for is not
saved up: one that begins, or comes back, or asks for more than it has, stands where those stand that were there all the
time.

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
    """Seconds for which jobs have held workers, those under way included."""

    def __init__(self) -> None:
        self.num_held = 0
        self._offset_s = 0.0

    def used_s(self, now_s: float) -> float:
        """Return the seconds up to now."""
        return self._offset_s + self.num_held * now_s

    def add(self, num_held: int, now_s: float) -> None:
        """Begin a job (1), or end one (-1). Which one does not matter: only sums do."""
        self.num_held += num_held
        self._offset_s -= num_held * now_s

    def raise_to(self, level_s: float, now_s: float) -> None:
        """Count it as `level_s` at least."""
        self._offset_s += max(0.0, level_s - self.used_s(now_s))


class Share(_Use):
    """The use that one query has made of a pool's workers."""

    def __init__(self) -> None:
        super().__init__()
        self.was_stopped = False
        """Whether one of its jobs took more than it might. From then on it may hold only half of the workers."""
        self.parts: dict[str, _Use] = defaultdict(_Use)
        """The use of each of its parts, such as the hosts that it crawls."""

    def add_job(self, num_held: int, part: str, now_s: float) -> None:
        """Begin a job of `part` (1), or end one (-1)."""
        self.add(num_held, now_s)
        self.parts[part].add(num_held, now_s)


class _Waiting(NamedTuple):
    number: int
    part: str
    turn: asyncio.Future[Any]


class FairQueue(Generic[T]):
    """The free ones of `size` things, and the jobs that wait for one."""

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._free: list[T] = []
        self._waiting: dict[Share, list[_Waiting]] = {}
        self._numbers = itertools.count()
        self._holding: set[Share] = set()
        self._level_s = 0.0  # what a share has had that was always there: it grows more slowly the more there are
        self._now_s = clock()
        self._is_closed = False

    def put(self, thing: T) -> None:
        """Add a thing that is free."""
        self._free.append(thing)
        self._serve()

    async def get(self, share: Share, part: str) -> T | None:
        """Wait for the turn of `part` of `share`, and return a thing; None when the queue is closed."""
        if self._is_closed:
            return None
        self._update_level()
        if share not in self._waiting:
            share.raise_to(self._level_s, self._now_s)
        turn: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(next(self._numbers), part, turn)
        self._waiting.setdefault(share, []).append(waiting)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if (
                turn.done() and not turn.cancelled() and (thing := turn.result()) is not None
            ):  # granted, and not yet told
                self.give_back(thing, share, part)
            else:
                self._update_level()
                self._forget(share, waiting)
            raise

    def give_back(self, thing: T, share: Share, part: str) -> None:
        """Free a thing that `get` gave for this share and part, or what has taken its place."""
        self._update_level()
        share.add_job(-1, part, self._now_s)
        if not share.num_held:
            self._holding.discard(share)
        self.put(thing)

    def close(self) -> None:
        """Give None to all that wait."""
        self._is_closed = True
        for waiting in itertools.chain.from_iterable(self._waiting.values()):
            if not waiting.turn.done():
                waiting.turn.set_result(None)
        self._waiting.clear()

    def _update_level(self) -> None:
        """Raise the level by the time that workers were held since the last call, divided among holders and waiters.

        Call it before any of them comes or goes.
        """
        now_s = self._clock()
        if self._holding:
            held_s = (now_s - self._now_s) * sum(share.num_held for share in self._holding)
            self._level_s += held_s / len(self._holding | self._waiting.keys())
        self._now_s = now_s

    def _forget(self, share: Share, waiting: _Waiting) -> None:
        others = [other for other in self._waiting.pop(share, ()) if other is not waiting]
        if others:
            self._waiting[share] = others

    def _serve(self) -> None:
        self._update_level()
        while self._free and not self._is_closed and (share := self._next_share()):
            waiting = min(
                self._waiting[share], key=lambda each: (share.parts[each.part].used_s(self._now_s), each.number)
            )
            self._forget(share, waiting)
            if not waiting.turn.done():  # else it is cancelled, and not yet told
                share.add_job(1, waiting.part, self._now_s)
                self._holding.add(share)
                waiting.turn.set_result(self._free.pop(0))

    def _next_share(self) -> Share | None:
        num_stopped = max(1, self._size // 2)
        shares = [share for share in self._waiting if not share.was_stopped or share.num_held < num_stopped]
        return min(shares, key=lambda share: (share.used_s(self._now_s), self._waiting[share][0].number), default=None)
