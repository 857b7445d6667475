"""Questions that are kept answered: Flash Queries, after arXiv 2605.13784, section 3.9."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, TypeAlias

from streamrag.errors import (
    BackendError,
    ConfigurationError,
    PipelineClosedError,
    PromptTooLongError,
    StreamRagError,
    TooManyQueriesError,
)
from streamrag.query.answer_stream import AnswerStream
from streamrag.sessions.concurrency import ConcurrencyEstimator
from streamrag.sessions.data import SessionData
from streamrag.sessions.log import SessionLog
from streamrag.sessions.question import Question, WatchOptions
from streamrag.sessions.questions import Questions
from streamrag.support.messages import plain_text
from streamrag.support.tasks import Broadcast, cancel_regardless
from streamrag.telemetry import Answer

RETRY_S = 1.0
"""Seconds until the next attempt, after one that failed or for which there was no room."""

Admit: TypeAlias = Callable[[Question], Callable[[], None]]
"""Makes room for one answer, and returns what is to be called at its end; or raises TooManyQueriesError."""


@dataclass(frozen=True, slots=True)
class WatchedAnswer:
    """An answer that was computed before anybody asked."""

    question: str
    text: str
    version: int
    """Version of the data."""
    took_s: float
    """Seconds to compute it."""
    gap: float | None
    """Confidence: how much more likely the answer's first token was than the next best, in log-probability; of a few
    answers, the chosen one than the next best, as far as they were computed. None if it was not asked for."""
    answer: Answer


class Watch(AsyncIterator[WatchedAnswer]):
    """A question that is answered again with each version of the data.

    Iterate it for its answers, each when it differs from the one before. A reader that is slow misses answers that were
    overtaken, and gets the newest. `aclose` ends it.
    """

    def __init__(self, watches: "Watches", options: WatchOptions) -> None:
        self.options = options
        self.spec = options.parse()
        """The question, checked."""
        self.newest: WatchedAnswer | None = None
        """The answer to the newest version that it was computed for."""
        self.num_answered = 0
        self.error: StreamRagError | None = None
        """Error of the last attempt, if it failed; it is made again with the next data."""
        self.due_s = 0.0
        self.work: asyncio.Task[None] | None = None
        """The task that answers it."""
        self._watches = watches
        self._unread: WatchedAnswer | None = None
        self._last_read: str | None = None
        self._news = Broadcast()
        self._is_closed = False

    @property
    def question(self) -> str:
        """The question as it was asked."""
        return self.spec.text

    @property
    def name(self) -> str | None:
        """The name under which it is found in `Session.watches`."""
        return self.options.name

    @property
    def version(self) -> int:
        """Version of `newest`; -1 before there is one."""
        return -1 if self.newest is None else self.newest.version

    def put(self, answer: WatchedAnswer) -> None:
        """Have a new answer."""
        self.newest = answer
        self.num_answered += 1
        self.error = None
        self._unread = answer if answer.text != self._last_read else None
        self._news.wake()

    async def at_least(self, version: int) -> WatchedAnswer:
        """Return the answer to this version of the data, or to a newer one, once it is there.

        :raises PipelineClosedError: the watch ended first.
        :raises StreamRagError: the question cannot be answered at all.
        """
        while self.newest is None or self.version < version:
            if self._is_closed:
                raise self.error or PipelineClosedError("the watch ended before that version was answered")
            await self._news.wait()
        return self.newest

    async def aclose(self) -> None:
        """Stop watching, at once: the question is no longer answered ahead, nor when its session is resumed."""
        self.end()

    def end(self) -> None:
        """End the watch, at once."""
        self._watches.forget(self)
        self.stop()

    def stop(self, error: StreamRagError | None = None) -> None:
        """End the watch for now: a session that is resumed has it again, if it has a name.

        error: why it cannot be answered at all, for its readers.
        """
        if self._is_closed:
            return
        self.error = error
        self._is_closed = True
        self._news.wake()
        self._watches.active.remove(self)
        if self.work is not None:
            self.work.cancel()

    async def __anext__(self) -> WatchedAnswer:
        while self._unread is None:
            if self._is_closed:
                raise self.error or StopAsyncIteration
            await self._news.wait()
        answer, self._unread = self._unread, None
        self._last_read = answer.text
        return answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class Watches:
    """All registered questions of a session. As many are answered at once as end before the data change again.

    After each new version they are answered in order of priority. When another version stands before all are answered,
    those that were left go first among their equals, so that none starves.

    admit: called before each answer; while it refuses, none is begun.
    """

    def __init__(self, questions: Questions, data: SessionData, log: SessionLog | None, admit: Admit) -> None:
        self._questions = questions
        self._data = data
        self._log = log
        self._admit = admit
        self.active: list[Watch] = []
        """Watches that are answered."""
        self.named: dict[str, Watch] = {}
        """Watches that have a name, also those that cannot be answered, until their owner ends them."""
        self._concurrency = ConcurrencyEstimator()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, options: WatchOptions) -> Watch:
        """Register a question to watch. It replaces another one of the same name.

        :raises ConfigurationError: it cannot work, or cannot be kept in the log.
        :raises SessionLogError: it is too long for the log.
        """
        question = options.parse()
        if options.name is not None:
            options = replace(options, name=plain_text(options.name), question=question.text, answers=question.answers)
            if self._log is not None:
                self._log.add_watch(options)
        return self.begin(options)

    def resume(self) -> None:
        """Register the questions that the log has."""
        for options in self._log.watches.values() if self._log else ():
            self.begin(options)

    def begin(self, options: WatchOptions) -> Watch:
        """Register a question that is in the log, or has no name."""
        watch = Watch(self, options)
        if watch.name is not None:
            before, self.named[watch.name] = self.named.get(watch.name), watch
            if before is not None:
                before.stop()
        self.active.append(watch)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamrag watches")
        return watch

    def forget(self, watch: Watch) -> None:
        """Remove it from the log: its owner has ended it, and no session that is resumed has it."""
        if watch.name is not None and self.named.get(watch.name) is watch and not self._is_closed:
            del self.named[watch.name]
            if self._log is not None:
                self._log.remove_watch(watch.name)

    def on_version(self) -> None:
        """Wake the task that answers watched questions: the data has a new version."""
        self._concurrency.observe_version(_now_s())
        self._has_work.set()

    def find(self, question: Question, version: int) -> Answer | None:
        """Return the answer that was computed ahead for this very question and version, if there is one."""
        for watch in self.active:
            if watch.newest is None or watch.version != version or not question.is_repeatable:
                continue
            if watch.spec.key == question.key and watch.spec.with_gap >= question.with_gap:
                return watch.newest.answer
        return None

    async def aclose(self) -> None:
        """End all watches; a log keeps those with a name."""
        self._is_closed = True
        await cancel_regardless([task for task in (self._task, *(each.work for each in self.active)) if task])
        for watch in list(self.active):
            watch.stop()

    async def _run(self) -> None:
        while True:
            self._has_work.clear()
            wait_s = self._start_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_work.wait()

    def _start_due(self) -> float | None:
        """Begin to answer all that is due, as far as there is room.

        Returns the seconds until there is more to do; None if only another event brings more.
        """
        try:
            self._data.check_open()
        except PipelineClosedError:
            return None
        except BackendError as error:  # the session has failed: there will be no other version
            for watch in list(self.active):
                watch.stop(error)
        now, version = _now_s(), self._data.ingestion.ready.version
        stale = [watch for watch in self.active if watch.version < version and watch.work is None]
        stale.sort(key=lambda watch: (-watch.options.priority, watch.version))
        due = [watch for watch in stale if watch.due_s <= now]
        wait_s = min((watch.due_s - now for watch in stale if watch.due_s > now), default=None)
        num_working = sum(watch.work is not None for watch in self.active)
        starting: list[tuple[Watch, Callable[[], None]]] = []
        try:
            for watch in due[: max(self._concurrency.limit - num_working, 0)]:
                leave = self._admit(watch.spec)
                starting.append((watch, leave))
        except TooManyQueriesError:
            wait_s = RETRY_S
        for watch, leave in starting:
            watch.due_s = now + watch.options.every_s
            work = self._answer(watch, num_working + len(starting))
            watch.work = asyncio.create_task(work, name="streamrag watched question")
            watch.work.add_done_callback(partial(self._on_end, watch, leave))
        return wait_s

    def _on_end(self, watch: Watch, leave: Callable[[], None], work: "asyncio.Task[None]") -> None:
        leave()  # also where the work was cancelled before it had begun
        if watch.work is work:
            watch.work = None
        self._has_work.set()

    async def _answer(self, watch: Watch, num_concurrent: int) -> None:
        began_s = _now_s()
        try:
            async with AnswerStream(self._questions.prepare(watch.spec)) as stream:
                async for _ in stream:
                    pass
            answer = stream.result
        except (ConfigurationError, PromptTooLongError) as error:  # this question's fault
            watch.work = None
            watch.stop(error)
        except Exception as error:  # whatever the engine raises, the others are answered, and this one again
            failed = BackendError(f"the engine failed: {error!r:.300}")
            watch.error = error if isinstance(error, StreamRagError) else failed
            watch.due_s = _now_s() + max(watch.options.every_s, RETRY_S)
        else:
            took_s = _now_s() - began_s
            self._concurrency.observe_answer(num_concurrent, took_s)
            assert answer.version is not None
            watch.put(WatchedAnswer(watch.question, answer.text, answer.version, took_s, answer.gap, answer))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
