"""Watched questions, which are answered again after each change of the data.

Source: Flash Queries, arXiv 2605.13784, section 3.9.
"""

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
from streamrag.sessions.question_options import Question, WatchOptions
from streamrag.sessions.questions import Questions
from streamrag.support.messages import plain_text
from streamrag.support.tasks import Broadcast, cancel_and_wait
from streamrag.telemetry import Answer

RETRY_S = 1.0
"""Seconds until the next attempt, after one that failed or was not admitted."""

Admit: TypeAlias = Callable[[Question], Callable[[], None]]
"""Admits one answer and returns a function to call at its end, or raises TooManyQueriesError."""


@dataclass(frozen=True, slots=True)
class WatchedAnswer:
    """An answer to a watched question."""

    question: str
    text: str
    version: int
    """Version of the data."""
    took_s: float
    """Seconds to compute it."""
    gap: float | None
    """Lead in log-probability: of the first token over the next best or, with `answers`, of the chosen answer over the
    next best, as far as they were computed. None without `with_margin`."""
    answer: Answer


class Watch(AsyncIterator[WatchedAnswer]):
    """A question that is answered again for each version of the data.

    Iterate it for answers that differ from the previous one. A slow reader skips to the newest. `aclose` ends it.
    """

    def __init__(self, watches: "Watches", options: WatchOptions) -> None:
        self.options = options
        self.spec = options.parse()
        """The validated question."""
        self.newest: WatchedAnswer | None = None
        """The newest answer; None until there is one."""
        self.num_answered = 0
        self.error: StreamRagError | None = None
        """Error of the last attempt, if it failed. The next version is tried again."""
        self.due_s = 0.0  # earliest time of the next attempt, on the event loop's clock
        self.work: asyncio.Task[None] | None = None
        """The task that is computing an answer, if any."""
        self._watches = watches
        self._unread: WatchedAnswer | None = None
        self._last_read: str | None = None
        self._news = Broadcast()
        self._is_closed = False

    @property
    def question(self) -> str:
        """The text of the question."""
        return self.spec.text

    @property
    def name(self) -> str | None:
        """The key of the watch in `Session.watches`; None if it has no name."""
        return self.options.name

    @property
    def version(self) -> int:
        """Version of `newest`; -1 if there is none."""
        return -1 if self.newest is None else self.newest.version

    def put(self, answer: WatchedAnswer) -> None:
        """Set the newest answer, clear `error`, and wake readers, who get only a text that is not the last one read."""
        self.newest = answer
        self.num_answered += 1
        self.error = None
        self._unread = answer if answer.text != self._last_read else None
        self._news.wake()

    async def at_least(self, version: int) -> WatchedAnswer:
        """Wait for the answer to this version of the data or a newer one, and return it.

        :raises PipelineClosedError: the watch ended first.
        :raises StreamRagError: the question cannot be answered at all.
        """
        while self.newest is None or self.version < version:
            if self._is_closed:
                raise self.error or PipelineClosedError("the watch ended before that version was answered")
            await self._news.wait()
        return self.newest

    async def aclose(self) -> None:
        """End the watch, and remove it from the session's log."""
        self.end()

    def end(self) -> None:
        """End the watch, and remove it from the session's log."""
        self._watches.forget(self)
        self.stop()

    def stop(self, error: StreamRagError | None = None) -> None:
        """End the watch and an answer that is being computed, unless it has ended before, and wake its readers. The
        watch stays in the log, so that a resumed session restores it.

        error: raised in its readers, if the question cannot be answered at all.
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
    """The watches of a session, and the background task that answers them after each new version.

    They are answered in order of priority, then of their newest version, so that none starves. `ConcurrencyEstimator`
    limits how many are answered concurrently. `admit` is called before each answer; while it raises, none is started.
    """

    def __init__(self, questions: Questions, data: SessionData, log: SessionLog | None, admit: Admit) -> None:
        self._questions = questions
        self._data = data
        self._log = log
        self._admit = admit
        self.active: list[Watch] = []
        """Watches that have not ended."""
        self.named: dict[str, Watch] = {}
        """Named watches, including those that cannot be answered, until their owner ends them."""
        self._concurrency = ConcurrencyEstimator()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, options: WatchOptions) -> Watch:
        """Start and return a watch, and write it to the log if it has a name. Raises as `Session.watch` does."""
        question = options.parse()
        if options.name is not None:
            options = replace(options, name=plain_text(options.name), question=question.text, answers=question.answers)
            if self._log is not None:
                self._log.add_watch(options)
        return self._start(options)

    def resume(self) -> None:
        """Restore the watches of the log."""
        for options in self._log.watches.values() if self._log else ():
            self._start(options)

    def _start(self, options: WatchOptions) -> Watch:
        """Start and return a watch without logging it; stop an earlier one of its name. The first starts the task."""
        watch = Watch(self, options)
        if watch.name is not None:
            replaced, self.named[watch.name] = self.named.get(watch.name), watch
            if replaced is not None:
                replaced.stop()
        self.active.append(watch)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamrag watches")
        return watch

    def forget(self, watch: Watch) -> None:
        """Remove a named watch from `named` and the log, unless it was replaced or the session is closing."""
        if watch.name is not None and self.named.get(watch.name) is watch and not self._is_closed:
            del self.named[watch.name]
            if self._log is not None:
                self._log.remove_watch(watch.name)

    def on_version(self) -> None:
        """Record that the data have a new version, and wake the task that answers watches."""
        self._concurrency.observe_version(_now_s())
        self._has_work.set()

    def find(self, question: Question, version: int) -> Answer | None:
        """Return a watch's answer to this version and question; None if there is none, if the question is not
        repeatable, or if the question wants a margin that the watch does not compute."""
        for watch in self.active:
            if watch.newest is None or watch.version != version or not question.is_repeatable:
                continue
            if watch.spec.key == question.key and watch.spec.with_margin >= question.with_margin:
                return watch.newest.answer
        return None

    async def aclose(self) -> None:
        """Cancel the work of all watches and end them; named ones stay in the log, for a resumed session."""
        self._is_closed = True
        await cancel_and_wait([task for task in (self._task, *(each.work for each in self.active)) if task])
        for watch in list(self.active):
            watch.stop()

    async def _run(self) -> None:
        """Start the watches that are due, whenever something has changed or one becomes due, until cancelled."""
        while True:
            self._has_work.clear()
            wait_s = self._start_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_work.wait()

    def _start_due(self) -> float | None:
        """Start a task for each watch that is due, in order and up to the limit; in a failed session, stop all instead.

        Due is a watch without an answer to the newest version, unless one is being computed or `due_s` is to come.
        Returns the seconds until the next one may be due, `RETRY_S` if one is not admitted, or None to wait for events.
        """
        try:
            self._data.check_open()
        except PipelineClosedError:
            return None
        except BackendError as error:  # the session has failed, so there will be no new version
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
            watch.due_s = now + watch.options.min_interval_s
            work = self._answer(watch, num_working + len(starting))
            watch.work = asyncio.create_task(work, name="streamrag watched question")
            watch.work.add_done_callback(partial(self._on_end, watch, leave))
        return wait_s

    def _on_end(self, watch: Watch, leave: Callable[[], None], work: "asyncio.Task[None]") -> None:
        """Release the admission of an answer that has ended, clear the watch's `work`, and look for due watches."""
        leave()  # in a callback, because the task may be cancelled before it starts
        if watch.work is work:
            watch.work = None
        self._has_work.set()

    async def _answer(self, watch: Watch, num_concurrent: int) -> None:
        """Compute an answer, with the last one as its draft, and `put` it into the watch. A question that no version
        can answer stops the watch; after any other error, stored in `watch.error`, the watch is due again later."""
        began_s = _now_s()
        last = () if watch.newest is None else watch.newest.answer.token_ids
        question = replace(watch.spec, draft=last)  # most new versions do not change the answer
        try:
            async with AnswerStream(self._questions.prepare(question)) as stream:
                async for _ in stream:
                    pass
            answer = stream.result
        except (ConfigurationError, PromptTooLongError) as error:  # no version of the data can be answered
            watch.work = None
            watch.stop(error)
        except Exception as error:  # foreign code may raise anything; the watch is tried again
            failed = BackendError(f"the engine failed: {error!r:.300}")
            watch.error = error if isinstance(error, StreamRagError) else failed
            watch.due_s = _now_s() + max(watch.options.min_interval_s, RETRY_S)
        else:
            took_s = _now_s() - began_s
            self._concurrency.observe_answer(num_concurrent, took_s)
            assert answer.version is not None
            watch.put(WatchedAnswer(watch.question, answer.text, answer.version, took_s, answer.gap, answer))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
