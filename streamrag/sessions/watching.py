"""Questions that are kept answered, all those of a session: Flash Queries, after arXiv 2605.13784, section 3.9."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from streamrag.errors import (
    BackendError,
    ConfigurationError,
    PipelineClosedError,
    PromptTooLongError,
    StreamRagError,
    TooManyQueriesError,
)
from streamrag.sessions.asking import Asked
from streamrag.sessions.at_once import AtOnce
from streamrag.sessions.log import SessionLog
from streamrag.sessions.log_lines import KeptWatch
from streamrag.sessions.watch import Watch, WatchedAnswer
from streamrag.support.messages import is_number, is_whole, plain_text, short
from streamrag.support.tasks import cancel_regardless
from streamrag.telemetry import Answer

if TYPE_CHECKING:
    from streamrag.sessions.session import Session

RETRY_S = 1.0
"""Seconds until the next attempt, after one that failed or for which there was no room."""

Admit: TypeAlias = Callable[[Asked], Callable[[], None]]
"""Makes room for one answer, and returns what is to be called at its end; or raises TooManyQueriesError."""


class Watches:
    """All registered questions of a session, as many at once as end before the data change again: see `AtOnce`.

    After each new version, in order of priority; when another version stands before all are answered, those that were
    left go first among their equals, so that none starves.

    log: keeps those that have a name.
    admit: called before each answer; while it refuses, none is begun.
    """

    def __init__(self, session: "Session", log: SessionLog | None, admit: Admit) -> None:
        self._session = session
        self._log = log
        self._admit = admit
        self._watches: list[Watch] = []
        self.named: dict[str, Watch] = {}
        """Also those that cannot be answered, until their owner ends them."""
        self._at_once = AtOnce()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, name: str | None, given: KeptWatch) -> Watch:
        """Register a question; another one of this name goes."""
        if not is_number(given.every_s) or given.every_s < 0:
            raise ConfigurationError(f"every_s={short(given.every_s)} must be a number of seconds, 0 or more")
        if not is_whole(given.priority):
            raise ConfigurationError(f"priority={short(given.priority)} must be a whole number")
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigurationError(f"name={short(name)} must be a text, or None")
        name, what = name and plain_text(name), given.asked()
        if name is not None and self._log is not None:
            of = {field: getattr(what, field) for field in ("question", "answers", "with_gap", "decisive_gap")}
            every_s, priority = float(given.every_s), int(given.priority)
            self._log.watched(replace(given, watch=name, every_s=every_s, priority=priority, **of))
        return self.begin(name, given)

    def begin(self, name: str | None, kept: KeptWatch) -> Watch:
        """Register what `add` has checked, or a log has."""
        watch = Watch(self, kept.asked(), float(kept.every_s), int(kept.priority), name)
        if name is not None:
            before = self.named.get(name)
            self.named[name] = watch
            if before is not None:
                before.stop()
        self._watches.append(watch)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamrag watches")
        return watch

    def remove(self, watch: Watch) -> None:
        """It is no longer answered."""
        with suppress(ValueError):
            self._watches.remove(watch)

    def forget(self, watch: Watch) -> None:
        """Its owner has ended it: no session that is resumed has it."""
        if watch.name is not None and self.named.get(watch.name) is watch and not self._is_closed:
            del self.named[watch.name]
            if self._log is not None:
                self._log.unwatched(watch.name)

    def data_updated(self) -> None:
        """Another version stands."""
        self._at_once.stands(_now_s())
        self._has_work.set()

    def answer_to(self, asked: Asked, version: int) -> Answer | None:
        """The answer that was computed ahead for this very question and version, if there is one."""
        for watch in self._watches:
            if watch.newest is None or watch.version != version or not asked.key[-1]:
                continue
            if watch.asked.key == asked.key and watch.asked.with_gap >= asked.with_gap:
                return watch.newest.answer
        return None

    async def aclose(self) -> None:
        """End all; a log keeps those with a name."""
        self._is_closed = True
        under_way = [watch.work for watch in self._watches if watch.work is not None]
        await cancel_regardless([*under_way, *([self._task] if self._task else [])])
        for watch in list(self._watches):
            watch.stop()

    async def _run(self) -> None:
        while True:
            self._has_work.clear()
            wait_s = self._start_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_work.wait()

    def _start_due(self) -> float | None:
        """Have answered what is due, as far as there is room.

        Returns the seconds until there is more to do, None if nothing but another event brings that about.
        """
        try:
            self._session.check_open()
        except PipelineClosedError:
            return None
        except BackendError as error:  # the session has failed: there will be no other version
            for watch in list(self._watches):
                watch.stop(error)
        now, version = _now_s(), self._session.version
        stale = [watch for watch in self._watches if watch.version < version and watch.work is None]
        due = sorted((each for each in stale if each.due_s <= now), key=lambda each: (-each.priority, each.version))
        num_working = sum(watch.work is not None for watch in self._watches)
        starting: list[tuple[Watch, Callable[[], None]]] = []
        wait_s = min((each.due_s - now for each in stale if each.due_s > now), default=None)
        try:
            for watch in due[: max(self._at_once.most - num_working, 0)]:
                leave = self._admit(watch.asked)
                starting.append((watch, leave))
        except TooManyQueriesError:
            wait_s = RETRY_S
        for watch, leave in starting:
            watch.due_s = now + watch.every_s
            work = self._answer(watch, num_working + len(starting))
            watch.work = asyncio.create_task(work, name="streamrag watched question")
            watch.work.add_done_callback(partial(self._ended, watch, leave))
        return wait_s

    def _ended(self, watch: Watch, leave: Callable[[], None], work: "asyncio.Task[None]") -> None:
        leave()  # also where the work was cancelled before it had begun
        if watch.work is work:
            watch.work = None
        self._has_work.set()

    async def _answer(self, watch: Watch, num_at_once: int) -> None:
        try:
            answered = await self._answered(watch)
        except (ConfigurationError, PromptTooLongError) as error:  # this question's fault
            watch.work = None
            watch.stop(error)
        except Exception as error:  # whatever the engine raises, the others are answered, and this one again
            watch.error = (
                error if isinstance(error, StreamRagError) else BackendError(f"the engine failed: {error!r:.300}")
            )
            watch.due_s = _now_s() + max(watch.every_s, RETRY_S)
        else:
            self._at_once.took(num_at_once, answered.took_s)
            watch.put(answered)

    async def _answered(self, watch: Watch) -> WatchedAnswer:
        began_s = _now_s()
        async with self._session.ask_ahead(watch.asked) as stream:
            async for _ in stream:
                pass
        answer = stream.result
        assert answer.version is not None
        return WatchedAnswer(watch.question, answer.text, answer.version, _now_s() - began_s, answer.gap, answer)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
