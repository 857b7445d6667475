import asyncio

import pytest
from made_queries import MAX_JOB_S, MadeQueries

from streamrag.sources.workers.fair_queue import FairQueue, Share


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Workers:
    """A queue of workers, and what becomes of those who wait for them."""

    def __init__(self, size: int = 1) -> None:
        self.clock = Clock()
        self.queue: FairQueue[int] = FairQueue(size, clock=self.clock)
        self.served: list[str] = []
        self.held: dict[str, tuple[int, Share, str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        for number in range(size):
            self.queue.put(number)

    async def ask(self, name: str, share: Share, part: str = "") -> "asyncio.Task[None]":
        async def wait() -> None:
            thing = await self.queue.get(share, part)
            if thing is not None:
                self.served.append(name)
                self.held[name] = (thing, share, part)

        self._tasks.append(asyncio.create_task(wait()))
        await self.settle()
        return self._tasks[-1]

    async def give_back(self, name: str, after_s: float = 0.0) -> None:
        self.clock.now_s += after_s
        self.queue.give_back(*self.held.pop(name))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_the_next_query_is_the_one_with_least_time_not_fewest_jobs() -> None:
    workers, slow, quick = Workers(), Share(), Share()
    await workers.ask("slow 1", slow)
    for i in (2, 3):
        await workers.ask(f"slow {i}", slow)
    for i in (1, 2, 3):
        await workers.ask(f"quick {i}", quick)
    await workers.give_back("slow 1", after_s=4)
    for i in (1, 2, 3):
        await workers.give_back(f"quick {i}", after_s=1)
    assert workers.served == ["slow 1", "quick 1", "quick 2", "quick 3", "slow 2"]


async def test_time_counts_while_a_job_is_still_under_way() -> None:
    workers, hostile, normal = Workers(size=2), Share(), Share()
    for i in (1, 2, 3):
        await workers.ask(f"hostile {i}", hostile)
    await workers.ask("normal", normal)
    await workers.give_back("hostile 1", after_s=1)
    assert workers.served == ["hostile 1", "hostile 2", "normal"]


async def test_a_query_that_was_away_has_saved_up_no_turns() -> None:
    workers, steady, away = Workers(), Share(), Share()
    await workers.ask("away 0", away)
    await workers.give_back("away 0", after_s=1)
    await workers.ask("steady 0", steady)
    await workers.give_back("steady 0", after_s=100)
    await workers.ask("steady 1", steady)
    for i in (1, 2, 3):
        await workers.ask(f"away {i}", away)
    await workers.ask("steady 2", steady)
    await workers.give_back("steady 1", after_s=10)
    await workers.give_back("away 1", after_s=6)
    await workers.give_back("away 2", after_s=6)
    assert workers.served[2:] == ["steady 1", "away 1", "away 2", "steady 2"]


async def test_new_queries_do_not_keep_an_old_one_waiting_for_ever() -> None:
    workers, old = Workers(), Share()
    await workers.ask("old 0", old)
    await workers.ask("old 1", old)
    await workers.ask("new 0", Share())
    await workers.give_back("old 0", after_s=3)
    for i in range(10):
        await workers.ask(f"new {i + 1}", Share())
        await workers.give_back(f"new {i}", after_s=1)
        if "old 1" in workers.held:
            break
    assert "old 1" in workers.served


async def test_within_a_query_hosts_take_turns() -> None:
    workers, share = Workers(), Share()
    for name in ("slow 1", "slow 2", "slow 3", "quick 1", "quick 2"):
        await workers.ask(name, share, name.split()[0])
    for name, took_s in (("slow 1", 5), ("quick 1", 1), ("quick 2", 1)):
        await workers.give_back(name, after_s=took_s)
    assert workers.served == ["slow 1", "quick 1", "quick 2", "slow 2"]


@pytest.mark.parametrize(("size", "num_held"), [(1, 1), (2, 1), (5, 2)])
async def test_a_query_that_had_a_job_stopped_holds_at_most_half(size: int, num_held: int) -> None:
    workers, stopped, other = Workers(size), Share(), Share()
    stopped.was_stopped = True
    for i in range(size + 1):
        await workers.ask(f"stopped {i}", stopped)
    assert len(workers.served) == num_held
    for i in range(size):
        await workers.ask(f"other {i}", other)
    assert len(workers.served) == size
    await workers.give_back("stopped 0")
    assert len(workers.served) == size + 1


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_cancelled_request_for_a_worker_keeps_nothing(is_granted: bool) -> None:
    workers, share = Workers(), Share()
    await workers.ask("first", share)
    waiting = await workers.ask("cancelled", share)
    await workers.ask("last", Share())
    if is_granted:
        workers.queue.give_back(*workers.held.pop("first"))  # the waiting task does not know it yet
    waiting.cancel()
    await workers.settle()
    if not is_granted:
        await workers.give_back("first")
    assert workers.served == ["first", "last"]
    assert share.num_held == 0


async def test_closing_the_queue_sends_every_waiting_task_away() -> None:
    workers = Workers()
    await workers.ask("first", Share())
    waiting = await workers.ask("waiting", Share())
    workers.queue.close()
    await waiting
    await workers.give_back("first")
    assert await workers.queue.get(Share(), "") is None
    assert workers.served == ["first"]


async def test_a_newcomer_waits_for_what_is_under_way_and_no_longer_than_a_job_more() -> None:
    for seed in range(60):
        waits = await MadeQueries(seed).run()
        assert len(waits) == 8, seed
        for wait in waits:
            assert wait.wait_s <= wait.rest_s + MAX_JOB_S, (seed, wait)
