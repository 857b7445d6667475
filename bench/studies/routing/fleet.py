"""Replicas behind a router, in virtual time: the router and the tracker are those that run in production.

query ─▶ router.rank ─▶ replica ─▶ first token, end          tracker and router are told at once
             ▲                        │
             └── reports, every half second, half a second late or so, as Ray Serve's controller brings them
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.routing import Opening, ReplicaTracker, Report, Router
from streamrag_bench.summary import percentile

from .loads import Query, blocks

REPORT_S = 0.5
"""Between two reports of a replica; Ray Serve draws each a tenth longer or shorter."""
CONTROLLER_S = 0.5
"""Most seconds that a report is on its way."""
HOT_S = 1.0
"""A replica is a hot spot while the prompts that wait there take longer than this, and four times what others have."""


class Stream(Protocol):
    """A query on a replica."""

    @property
    def num_spent(self) -> int: ...
    async def update(self, token_ids: Sequence[int], *, is_complete: bool) -> None: ...
    def __aiter__(self) -> AsyncIterator[object]: ...


class Engine(Protocol):
    """A simulated replica."""

    slowdown: float

    @property
    def busy_s(self) -> float: ...
    def stream(
        self, token_ids: Sequence[int], num_output: int, *, is_complete: bool
    ) -> AbstractAsyncContextManager[Stream]: ...
    def report(self) -> Report: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the first replica, at shares of the time of all arrivals."""

    start: float
    end: float
    slowdown: float
    """So many times slower meanwhile; infinite: it is killed, and comes back empty."""


@dataclass(frozen=True, slots=True)
class Done:
    """A query that has its answer, or has failed."""

    query: Query
    ttft_s: float
    """From its complete prompt on."""
    end_s: float
    num_spent: int
    """Blocks of its prompts that were computed."""
    replica: str
    num_replays: int
    has_failed: bool = False


@dataclass(slots=True)
class Outcome:
    done: list[Done] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    num_samples: int = 0
    num_hot: int = 0

    def figures(self) -> dict[str, float]:
        good = [done for done in self.done if not done.has_failed]
        ttft_s = [done.ttft_s for done in good]
        busy = list(self.busy_s.values())
        end_s = max(done.end_s for done in self.done)
        return {
            "p50_s": percentile(ttft_s, 0.5),
            "p95_s": percentile(ttft_s, 0.95),
            "p99_s": percentile(ttft_s, 0.99),
            "mean_s": sum(ttft_s) / len(ttft_s),
            "latency_s": sum(done.end_s - done.query.arrival_s for done in good) / len(good),
            "hit_rate": 1 - sum(done.num_spent for done in good) / sum(done.query.num_blocks for done in good),
            "tokens_per_s": sum(done.query.num_output for done in good) / end_s,
            "imbalance": max(busy) / (sum(busy) / len(busy)),
            "busy": sum(busy) / len(busy) / end_s,
            "hot_share": self.num_hot / max(self.num_samples, 1),
            "num_replays": sum(done.num_replays for done in self.done),
            "num_failed": sum(done.has_failed for done in self.done),
        }


@dataclass(slots=True)
class Caller:
    """Whoever routes, and knows of no query but its own."""

    router: Router
    tracker: ReplicaTracker = field(default_factory=ReplicaTracker)


class Fleet:
    """One run: replicas, routers, and what is asked of them.

    With several routers each query comes to one of them at random; if that is sticky, all of a session to the same.
    """

    def __init__(
        self,
        num_replicas: int,
        make_engine: Callable[[], Engine],
        routers: Sequence[Router],
        *,
        is_sticky: bool = False,
        seed: int = 1,
    ) -> None:
        self._is_sticky = is_sticky
        self._make_engine = make_engine
        self.callers = [Caller(router) for router in routers]
        self._rng = random.Random(f"fleet {seed}")
        self._engines = {f"r{n}": make_engine() for n in range(num_replicas)}
        self._to_replay: set[str] = set()
        self._attempts: dict[str, set[asyncio.Task[None]]] = {name: set() for name in self._engines}
        self.outcome = Outcome(busy_s=dict.fromkeys(self._engines, 0.0))

    async def run(self, queries: Sequence[Query], fault: Fault | None = None) -> Outcome:
        loop = asyncio.get_running_loop()
        background = [loop.create_task(self._reporting(name)) for name in self._engines]
        background.append(loop.create_task(self._sampling()))
        if fault is not None:
            background.append(loop.create_task(self._break(fault, queries[-1].arrival_s)))
        asked = []
        for n, query in enumerate(queries):
            await asyncio.sleep(query.arrival_s - loop.time())
            asked.append(loop.create_task(self._ask(f"q{n}", query, self._caller_of(query))))
        await asyncio.gather(*asked)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for name, engine in self._engines.items():
            self.outcome.busy_s[name] += engine.busy_s
        return self.outcome

    # ------------------------------------------------------------------------------------------------------- queries

    def _caller_of(self, query: Query) -> Caller:
        if len(self.callers) == 1:
            return self.callers[0]
        return (random.Random(query.session) if self._is_sticky else self._rng).choice(self.callers)

    async def _ask(self, query_id: str, query: Query, caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(query.texts[0][0])
        opening = Opening(blocks(query.texts[0][1]), session=query.session)
        num_replays = 0
        while True:
            name = self._route(query_id, opening, caller)
            attempt = loop.create_task(self._try(query_id, query, caller, name, num_replays))
            self._attempts[name].add(attempt)
            await asyncio.wait([attempt])
            self._attempts[name].discard(attempt)
            if not attempt.cancelled():
                attempt.result()
                break
            if query_id not in self._to_replay:  # it has shown a token
                self.outcome.done.append(Done(query, 0.0, loop.time(), 0, name, num_replays, has_failed=True))
                break
            self._to_replay.discard(query_id)
            num_replays += 1
            opening = Opening(self._newest(query), session=query.session)
        caller.tracker.ended(query_id)

    def _newest(self, query: Query) -> tuple[int, ...]:
        """What the caller's side holds of its prompt by now."""
        now_s = asyncio.get_running_loop().time() - query.arrival_s
        return blocks([text for at_s, text in query.texts if at_s <= now_s + 1e-9][-1])

    def _route(self, query_id: str, opening: Opening, caller: Caller) -> str:
        states = caller.tracker.states(self._engines)
        ranked = caller.router.rank(opening, states, asyncio.get_running_loop().time())
        full = {state.id for state in states if state.num_open >= state.max_open > 1}
        name = next((name for name in ranked if name not in full), ranked[0])
        caller.tracker.routed(query_id, name, caller.router.routed(opening, name))
        return name

    async def _try(self, query_id: str, query: Query, caller: Caller, name: str, num_replays: int) -> None:
        loop = asyncio.get_running_loop()
        newest, now_s = self._newest(query), loop.time() - query.arrival_s
        coming = [(at_s, text) for at_s, text in query.texts if at_s > now_s + 1e-9]
        async with self._engines[name].stream(newest, query.num_output, is_complete=not coming) as stream:
            for n, (at_s, text) in enumerate(coming, start=1):
                await asyncio.sleep(query.arrival_s + at_s - loop.time())
                newest = blocks(text)
                await stream.update(newest, is_complete=n == len(coming))
            first_s = None
            async for _ in stream:
                if first_s is None:
                    first_s = loop.time()
                    caller.tracker.first_token(query_id)
                    caller.router.completed(newest, name)
            assert first_s is not None
            end_s = loop.time()
        ttft_s = first_s - query.arrival_s - query.texts[-1][0]
        self.outcome.done.append(Done(query, ttft_s, end_s, stream.num_spent, name, num_replays))

    # ------------------------------------------------------------------------------------------------------ replicas

    async def _reporting(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._rng.random() * REPORT_S)
        while True:
            if name in self._engines:
                report = self._engines[name].report()
                loop.call_later(self._rng.random() * CONTROLLER_S, self._reported, name, self._engines[name], report)
            await asyncio.sleep(REPORT_S * self._rng.uniform(0.9, 1.1))

    def _reported(self, name: str, engine: Engine, report: Report) -> None:
        if self._engines.get(name) is engine:
            for caller in self.callers:
                caller.tracker.reported(name, report, asyncio.get_running_loop().time())

    async def _sampling(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            waits_s = []
            for engine in self._engines.values():
                report = engine.report()
                waits_s.append(report.queued_tokens / report.tokens_per_s if report.tokens_per_s else 0.0)
            others_s = (sum(waits_s) - max(waits_s)) / max(len(waits_s) - 1, 1)
            self.outcome.num_samples += 1
            self.outcome.num_hot += max(waits_s) > max(HOT_S, 4 * others_s)

    async def _break(self, fault: Fault, last_s: float) -> None:
        name = next(iter(self._engines))
        await asyncio.sleep(fault.start * last_s)
        if fault.slowdown < float("inf"):
            self._engines[name].slowdown = fault.slowdown
            await asyncio.sleep((fault.end - fault.start) * last_s)
            self._engines[name].slowdown = 1.0
            return
        self.outcome.busy_s[name] += self._engines.pop(name).busy_s
        for caller in self.callers:
            self._to_replay.update(caller.tracker.lost(name)[0])
            caller.router.lost(name)
        for attempt in self._attempts[name]:
            attempt.cancel()
        await asyncio.sleep((fault.end - fault.start) * last_s)
        self._engines[name] = self._make_engine()


def simulate(
    num_replicas: int,
    make_engine: Callable[[], Engine],
    routers: Sequence[Router],
    queries: Sequence[Query],
    fault: Fault | None = None,
    *,
    is_sticky: bool = False,
) -> Outcome:
    """One run in virtual time."""

    async def run() -> Outcome:
        fleet = Fleet(num_replicas, make_engine, routers, is_sticky=is_sticky)
        return await fleet.run(queries, fault)

    return run_virtual(run())


FAULTS: Mapping[str, Fault] = {"slow": Fault(0.3, 0.7, 3.0), "killed": Fault(0.4, 0.6, float("inf"))}
