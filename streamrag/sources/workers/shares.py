"""Whose turn it is to use one of a few workers: whoever has had least of them.

A query that keeps workers busy, because its pages are many or made to be slow, must not keep them from the others. So
what counts is the time for which jobs have held a worker, not their number. Time that a query did not ask for is not
saved up: one that begins, or comes back, or asks for more than it has, stands where those stand that were there all the
time.

Source: virtual time as in weighted fair queueing, https://doi.org/10.1145/75246.75248
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Share:
    """What one query has had of the workers of a pool, and each of its parts, such as the hosts that it crawls."""

    def __init__(self) -> None:
        self.was_stopped = False
        """Whether one of its jobs took more than it might. From then on it may hold only half of the workers."""
        self._whole = _Use()
        self._parts: dict[str, _Use] = {}

    @property
    def num_held(self) -> int:
        """Workers that its jobs hold now."""
        return len(self._whole.since_s)

    def used_s(self, now_s: float) -> float:
        """Seconds of workers, up to now."""
        return self._whole.until(now_s)

    def part_used_s(self, part: str, now_s: float) -> float:
        """Seconds of workers that jobs for `part` had, up to now."""
        return self._part(part).until(now_s)

    def _part(self, part: str) -> "_Use":
        return self._parts.setdefault(part, _Use())

    def come(self, level_s: float) -> None:
        """The query asks for a worker, and waits for none: from here on it counts as having had `level_s` at least."""
        self._whole.used_s = max(self._whole.used_s, level_s)

    def begin(self, part: str, now_s: float) -> None:
        """A job of `part` gets a worker."""
        for use in (self._whole, self._part(part)):
            use.since_s.append(now_s)

    def end(self, part: str, now_s: float) -> None:
        """A job of `part` gives its worker back. Which of the query's jobs does not matter: only sums do."""
        for use in (self._whole, self._part(part)):
            use.used_s += now_s - use.since_s.pop()


class _Use:
    def __init__(self) -> None:
        self.used_s = 0.0  # of jobs that are over
        self.since_s: list[float] = []  # of jobs that are under way

    def until(self, now_s: float) -> float:
        return self.used_s + sum(now_s - since_s for since_s in self.since_s)


class _Waiting(NamedTuple):
    number: int
    part: str
    turn: "asyncio.Future[None]"


class FairQueue(Generic[T]):
    """The free ones of `size` things, and who waits for one."""

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._free: list[T] = []
        self._granted: dict[asyncio.Future[None], T] = {}
        self._waiting: dict[Share, list[_Waiting]] = {}
        self._numbers = itertools.count()
        self._holding: set[Share] = set()
        self._level_s = 0.0  # what a share has had that was always there: it grows more slowly the more there are
        self._level_at_s = clock()
        self._is_closed = False

    def put(self, thing: T) -> None:
        """Add a thing that nobody has."""
        self._free.append(thing)
        self._serve()

    async def get(self, share: Share, part: str) -> T | None:
        """A thing, when it is the turn of `part` of `share`; None when the queue is closed."""
        if self._is_closed:
            return None
        self._raise_level()
        if share not in self._waiting:
            share.come(self._level_s)
        waiting = _Waiting(next(self._numbers), part, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(share, []).append(waiting)
        self._serve()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn in self._granted:
                self.give_back(self._granted.pop(waiting.turn), share, part)
            else:
                self._raise_level()
                self._forget(share, waiting)
            raise
        return self._granted.pop(waiting.turn, None)

    def give_back(self, thing: T, share: Share, part: str) -> None:
        """Free a thing that `get` gave for this share and part, or what has taken its place."""
        self._raise_level()
        share.end(part, self._level_at_s)
        if not share.num_held:
            self._holding.discard(share)
        self.put(thing)

    def close(self) -> None:
        """Send everybody away who waits."""
        self._is_closed = True
        for waiting in itertools.chain.from_iterable(self._waiting.values()):
            if not waiting.turn.done():
                waiting.turn.set_result(None)
        self._waiting.clear()

    def _raise_level(self) -> None:
        """To now: by the time that workers were held since it was last done, divided among those who held or waited.

        To be done before any of them comes or goes.
        """
        now_s = self._clock()
        num_held = sum(share.num_held for share in self._holding)
        if num_held:
            self._level_s += (now_s - self._level_at_s) * num_held / len(self._holding | self._waiting.keys())
        self._level_at_s = now_s

    def _forget(self, share: Share, waiting: _Waiting) -> None:
        others = [other for other in self._waiting.pop(share, ()) if other is not waiting]
        if others:
            self._waiting[share] = others

    def _serve(self) -> None:
        self._raise_level()
        while self._free and not self._is_closed and (share := self._next_share()):
            now_s = self._level_at_s
            waiting = min(self._waiting[share], key=lambda each: (share.part_used_s(each.part, now_s), each.number))
            self._forget(share, waiting)
            if waiting.turn.done():  # cancelled, and not yet told
                continue
            share.begin(waiting.part, now_s)
            self._holding.add(share)
            self._granted[waiting.turn] = self._free.pop(0)
            waiting.turn.set_result(None)

    def _next_share(self) -> Share | None:
        now_s = self._level_at_s
        fit = [share for share in self._waiting if not share.was_stopped or share.num_held < max(1, self._size // 2)]
        return min(fit, key=lambda share: (share.used_s(now_s), self._waiting[share][0].number), default=None)
