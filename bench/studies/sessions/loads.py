"""Loads for a session on a simulated engine: data at a rate, windows that slide, watched questions, many sessions."""

import asyncio
from contextlib import AsyncExitStack
from itertools import cycle, islice
from math import inf
from statistics import mean, median
from typing import Any, TypeAlias

from streamrag.core import SamplingParams
from streamrag.sessions import Session
from streamrag.support.tasks import cancel_and_wait
from streamrag_bench.summary import percentile
from studies.sessions.arms import ask
from studies.sessions.prices import QUESTIONS, samples
from studies.sessions.simulation import Device, Site, simulated

NUM_OUTPUT_TOKENS = 2
"""A word and the end, as for the published questions, which are answered with a word or a number."""
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
WINDOW = 32_000
SAMPLES_IN_WINDOW = WINDOW // 16
Row: TypeAlias = dict[str, Any]


def now_s() -> float:
    return asyncio.get_running_loop().time()


def opened(site: Site, **options: Any) -> Session:
    """A session in virtual time."""
    return Session(site.backend, clock=now_s, **options)


class Feed:
    """Appends samples at a rate, one at a time, `at_most` so many, and knows when each came."""

    def __init__(self, session: Session, rate: float, at_most: float = inf) -> None:
        self._session = session
        self._rate = rate
        self._at_most = at_most
        self._came_s: list[float] = []
        self._num_before = session.state.num_appended
        self._task = asyncio.create_task(self._run(), name="feed")

    async def _run(self) -> None:
        began_s, lines = now_s(), cycle(samples(SAMPLES_IN_WINDOW))
        while self._rate and len(self._came_s) < self._at_most:
            due_s = began_s + len(self._came_s) / self._rate
            if due_s > now_s():
                await asyncio.sleep(due_s - now_s())
            self._came_s.append(now_s())
            await self._session.append(next(lines))

    @property
    def num_behind(self) -> int:
        """Samples that a question would not see now."""
        state = self._session.state
        return state.num_appended - state.version

    @property
    def behind_s(self) -> float:
        """Age of the oldest of them."""
        num_behind = self.num_behind
        return now_s() - self._came_s[-min(num_behind, len(self._came_s))] if num_behind and self._came_s else 0.0

    async def ends(self) -> None:
        """All have come."""
        await self._task

    async def aclose(self) -> None:
        await cancel_and_wait([self._task])


async def filled(session: Session, num: int) -> None:
    """So many samples stand in it."""
    version = 0
    for line in islice(cycle(samples(SAMPLES_IN_WINDOW)), num):
        version = await session.append(line)
    await ask(session, "Ready?", PARAMS, at_least=version)


# ---------------------------------------------------------------------------------------------------------- ingestion


async def ingestion(device: Device, rate: float, for_s: float) -> Row:
    """Data stream into a window that is nearly full."""
    async with simulated(device) as site, opened(site, window_tokens=WINDOW) as session:
        await filled(session, SAMPLES_IN_WINDOW * 9 // 10)
        return await asked_while(session, rate, for_s, PARAMS)


async def asked_while(session: Session, rate: float, for_s: float, params: SamplingParams) -> Row:
    """Questions one after the other while data stream in."""
    before, feed = session.state, Feed(session, rate)
    firsts: list[float] = []
    behind, behind_s = [], []
    end_s = now_s() + for_s
    while now_s() < end_s:
        behind.append(feed.num_behind)
        behind_s.append(feed.behind_s)
        firsts.append((await ask(session, f"Question {len(firsts)}?", params)).first_s)
    await feed.aclose()
    state = session.state
    return {
        "rate": rate,
        "num_asked": len(firsts),
        **{f"p{r}_first_s": percentile(firsts, r / 100) for r in (50, 95, 99)},
        **{f"p{r}_behind": percentile(behind, r / 100) for r in (50, 99)},
        **{f"p{r}_behind_s": percentile(behind_s, r / 100) for r in (50, 99)},
        "num_appended": state.num_appended - before.num_appended,
        "num_dropped": state.num_dropped - before.num_dropped,
        "num_slid": state.num_slid - before.num_slid,
    }


# ------------------------------------------------------------------------------------------------------------- window


async def window(device: Device, rate: float, share: float, num_windows: float, num_asked: int) -> Row:
    """Data for so many windows stream into a full one."""
    for_s = num_windows * SAMPLES_IN_WINDOW / rate
    async with simulated(device) as site, opened(site, window_tokens=WINDOW, slide_share=share) as session:
        await filled(session, SAMPLES_IN_WINDOW - 20)
        site.meter.reset()
        row = await asked_evenly(session, rate, for_s, num_asked, PARAMS)
    num_computed = site.meter.num_computed - row["num_for_questions"]
    return {
        "slide_share": share,
        "busy_share": site.meter.busy_s / row["took_s"],
        "computed_per_token": num_computed / (16 * row["num_taken_in"]),
        "most_kv_of_window": site.most_kv_tokens / WINDOW,
        "mean_kept_of_window": row.pop("mean_tokens") / WINDOW,
        **row,
    }


async def asked_evenly(session: Session, rate: float, for_s: float, num_asked: int, params: SamplingParams) -> Row:
    """Questions at even intervals while data stream in: as many samples as come in that time, however late questions
    are answered; until all are taken in."""
    before, began_s, feed = session.state, now_s(), Feed(session, rate, round(rate * for_s))
    firsts: list[float] = []
    behind_s, num_tokens, num_for_questions = [], [], 0
    for i in range(num_asked):
        await asyncio.sleep(max(began_s + i * for_s / num_asked - now_s(), 0))
        behind_s.append(feed.behind_s)
        num_tokens.append(session.state.num_tokens)
        asked = await ask(session, f"Question {i}?", params)
        firsts.append(asked.first_s)
        num_for_questions += asked.num_tokens - (asked.num_cached or 0) + params.max_tokens - 1
    await feed.ends()
    asked = await ask(session, "All there?", params, at_least=session.state.num_appended)
    num_for_questions += asked.num_tokens - (asked.num_cached or 0) + params.max_tokens - 1
    state, took_s = session.state, now_s() - began_s
    num_dropped = state.num_dropped - before.num_dropped
    return {
        "rate": rate,
        "took_s": took_s,
        "mean_tokens": mean(num_tokens),
        **{f"p{r}_first_s": percentile(firsts, r / 100) for r in (50, 99)},
        **{f"p{r}_behind_s": percentile(behind_s, r / 100) for r in (50, 99)},
        "most_behind_s": max(behind_s),
        "num_taken_in": state.version - before.version - num_dropped,
        "num_dropped": num_dropped,
        "num_slid": state.num_slid - before.num_slid,
        "num_for_questions": num_for_questions,
    }


# -------------------------------------------------------------------------------------------------------------- flash


async def flash(device: Device, interval_s: float, num_cycles: int) -> Row:
    """Five of six questions are watched; 55 samples come at intervals, and in the middle of each a question."""
    async with simulated(device) as site, opened(site, window_tokens=WINDOW) as session:
        lines = samples(num_cycles * 55)
        watches = [session.watch(question, params=PARAMS) for question in QUESTIONS[:5]]
        hits: list[float] = []
        misses: list[float] = []
        for number in range(num_cycles):
            for line in lines[number * 55 :][:55]:
                await session.append(line)
            await asyncio.sleep(interval_s / 2)
            asked = await ask(session, QUESTIONS[number % len(QUESTIONS)], PARAMS)
            (hits if asked.num_cached == asked.num_tokens else misses).append(asked.last_s)
            await asyncio.sleep(max((number + 1) * interval_s - now_s(), 0))
        num_ahead = sum(watch.num_answered for watch in watches)
    return {
        "interval_s": interval_s,
        "num_hits": len(hits),
        "num_misses": len(misses),
        "num_ahead": num_ahead,
        "p50_hit_s": median(hits or [0.0]),
        "p50_miss_s": median(misses or [0.0]),
    }


async def most_flash(device: Device, interval_s: float, num_watched: int = 256) -> Row:
    """More questions are watched than can be answered between two batches of 55 samples: how many are?"""
    async with simulated(device) as site, opened(site, window_tokens=WINDOW) as session:
        watches = [session.watch(f"Question {i}?", params=PARAMS) for i in range(num_watched)]
        counts = []
        for number in range(6):
            num_before = sum(watch.num_answered for watch in watches)
            for line in samples(55):
                await session.append(line)
            await asyncio.sleep((number + 1) * interval_s - now_s())
            counts.append(sum(watch.num_answered for watch in watches) - num_before)
    return {"interval_s": interval_s, "num_watched": num_watched, "num_answered_p50": median(counts[1:])}


# --------------------------------------------------------------------------------------------------------------- many


async def many(device: Device, num_sessions: int, for_s: float = 20.0) -> Row:
    """Sessions of 100 samples, to each of which one more comes every second, and a question a second to each tenth.

    Their system texts differ: the same data behind the same text would be one session's KV for all."""
    firsts: list[float] = []
    async with simulated(device) as site, AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(opened(site, window_tokens=4_000, name=f"{i}", system=f"You watch {i}."))
            for i in range(num_sessions)
        ]
        for session in sessions:
            for line in samples(100):
                await session.append(line)
        began_s = now_s()
        await asyncio.gather(*(ask(session, "Ready?", PARAMS, at_least=100) for session in sessions))
        ready_s, num_tokens = now_s() - began_s, sessions[0].state.num_tokens
        site.meter.reset()
        began_s = now_s()
        feeds = [await _staggered(session, i / num_sessions) for i, session in enumerate(sessions)]

        async def asking(session: Session) -> None:
            for _ in range(int(for_s)):
                firsts.append((await ask(session, QUESTIONS[0], PARAMS)).first_s)
                await asyncio.sleep(1.0)

        await asyncio.gather(*(asking(session) for session in sessions[::10]))
        took_s = now_s() - began_s
        for feed in feeds:
            await feed.aclose()
    return {
        "num_sessions": num_sessions,
        "num_tokens": num_tokens,
        "ready_s": ready_s,
        **{f"p{r}_first_s": percentile(firsts, r / 100) for r in (50, 99)},
        "busy_share": site.meter.busy_s / took_s,
        "kv_tokens_each": site.most_kv_tokens / num_sessions,
    }


async def _staggered(session: Session, after_s: float) -> Feed:
    await asyncio.sleep(after_s / 10)
    return Feed(session, 1.0)
