"""Queries that share workers in made time: what newcomers wait for among those that never let go."""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from streamrag.sources.workers.fair_queue import FairQueue, Share

MAX_JOB_S = 2.0


class Wait(NamedTuple):
    """A newcomer's."""

    wait_s: float
    rest_s: float
    """Until all jobs would have ended that were under way when it came."""


class MadeQueries:
    """A random number of workers and queries, from `seed`, over a made minute; and eight newcomers with a job each."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._size = self._random.choice([2, 3, 4, 8, 16])
        self._queue: FairQueue[int] = FairQueue(self._size, clock=lambda: self._now_s)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._held: dict[int, float] = {}  # when each job ends, by its worker
        self._tasks: list[asyncio.Task[None]] = []
        self.waits: list[Wait] = []

    async def run(self) -> list[Wait]:
        for number in range(self._size):
            self._queue.put(number)
        for _ in range(self._random.randint(1, self._size + 2)):
            begin = self._random.choice([self._flood, self._keep_on, self._keep_on_and_flood])
            self._at(self._random.uniform(0, 10), begin)
        for _ in range(8):
            self._at(self._random.uniform(5, 50), lambda: self._ask(Share(), note=self.waits.append))
        while self._events and self._events[0][0] < 60:
            self._now_s, _, do = heapq.heappop(self._events)
            do()
            for _ in range(6):
                await asyncio.sleep(0)
        self._queue.close()
        await asyncio.gather(*self._tasks)
        return self.waits

    def _flood(self) -> None:
        share = Share()
        for _ in range(100):
            self._ask(share)

    def _keep_on(self) -> None:
        share, until_s = Share(), self._random.uniform(5, 40)

        def again() -> None:
            if self._now_s < until_s:
                self._ask(share, then=again)

        for _ in range(self._random.randint(1, self._size)):
            again()

    def _keep_on_and_flood(self) -> None:
        """Few jobs for long, and then many at once."""
        share, until_s = Share(), self._random.uniform(5, 40)

        def again() -> None:
            for _ in range(1 if self._now_s < until_s else 50):
                self._ask(share, then=again if self._now_s < until_s else None)

        again()

    def _at(self, at_s: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), do))

    def _ask(
        self, share: Share, *, then: Callable[[], None] | None = None, note: Callable[[Wait], None] | None = None
    ) -> None:
        self._tasks.append(asyncio.create_task(self._job(share, then, note)))

    async def _job(self, share: Share, then: Callable[[], None] | None, note: Callable[[Wait], None] | None) -> None:
        asked_s = self._now_s
        rest_s = max((end_s - asked_s for end_s in self._held.values()), default=0.0)
        number = await self._queue.get(share, "")
        if number is None:
            return
        if note:
            note(Wait(self._now_s - asked_s, rest_s))
        end_s = self._now_s + self._random.uniform(0.1, MAX_JOB_S)
        self._held[number] = end_s

        def end() -> None:
            del self._held[number]
            self._queue.give_back(number, share, "")
            if then:
                then()

        self._at(end_s, end)
