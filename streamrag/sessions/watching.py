"""Questions that are kept answered: Flash Queries, after arXiv 2605.13784, section 3.9."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from streamrag.core import Backend, SamplingParams
from streamrag.errors import ConfigurationError, PipelineClosedError, StreamRagError
from streamrag.kinds import is_number, is_whole, plain_text, short
from streamrag.tasks import cancel_regardless
from streamrag.telemetry import Answer
from streamrag.tokenizing import in_thread

if TYPE_CHECKING:
    from streamrag.sessions.session import Session


@dataclass(frozen=True, slots=True)
class WatchedAnswer:
    """An answer that was computed before anybody asked."""

    question: str
    text: str
    version: int
    """Of the data."""
    took_s: float
    """To compute it."""
    gap: float | None
    """Confidence: how much more likely the answer's first token was than the next best, or than that of the next best
    of the answers that there may be, in log-probability. None if it was not asked for."""
    answer: Answer


class Watch(AsyncIterator[WatchedAnswer]):
    """One registered question. Iterate it for its answers, each when it differs from the one before.

    A reader that is slow misses answers that were overtaken, and gets the newest. `aclose` ends it.
    """

    def __init__(
        self,
        watches: "Watches",
        question: str,
        answers: tuple[str, ...],
        every_s: float,
        priority: int,
        params: SamplingParams,
        with_gap: bool,
    ) -> None:
        self.question = question
        self.with_gap = with_gap
        self.priority = priority
        self.every_s = every_s
        self.params = params
        self.allowed = answers
        self.newest: WatchedAnswer | None = None
        """The answer to the newest version that it was computed for."""
        self.num_answered = 0
        self.error: StreamRagError | None = None
        """Why the last attempt failed; it is made again with the next data."""
        self.due_s = 0.0
        self._watches = watches
        self._unread: WatchedAnswer | None = None
        self._told: str | None = None
        self._has_news = asyncio.Event()
        self._has_answered = asyncio.Event()
        """Set, and replaced by another, with each answer."""
        self._is_closed = False

    @property
    def version(self) -> int:
        """Of `newest`; -1 before there is one."""
        return -1 if self.newest is None else self.newest.version

    def put(self, answered: WatchedAnswer) -> None:
        """A new answer."""
        self.newest = answered
        self.num_answered += 1
        self.error = None
        self._wake()
        if answered.text != self._told:
            self._unread = answered
            self._told = answered.text
            self._has_news.set()

    async def at_least(self, version: int) -> WatchedAnswer:
        """The answer to this version of the data, or to a newer one, once it is there.

        :raises PipelineClosedError: the watch ended first.
        :raises ConfigurationError: the question cannot be answered at all.
        """
        while self.newest is None or self.version < version:
            if isinstance(self.error, ConfigurationError):
                raise self.error
            if self._is_closed:
                raise PipelineClosedError("the watch ended before that version was answered")
            await self._has_answered.wait()
        return self.newest

    def _wake(self) -> None:
        self._has_answered.set()
        self._has_answered = asyncio.Event()

    def fail(self, error: StreamRagError) -> None:
        """It cannot be answered at all; whoever iterates is told."""
        self.error = error
        self._is_closed = True
        self._has_news.set()
        self._wake()
        self._watches.remove(self)

    async def aclose(self) -> None:
        """The question is no longer answered ahead."""
        self.end()

    def end(self) -> None:
        """The same, at once."""
        self._is_closed = True
        self._has_news.set()
        self._wake()
        self._watches.remove(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchedAnswer:
        while self._unread is None:
            if self._is_closed:
                if isinstance(self.error, ConfigurationError):
                    raise self.error
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        answered, self._unread = self._unread, None
        return answered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class Watches:
    """All registered questions of a session, answered one after the other by one task.

    After each new version, in order of priority; when another version stands before all are answered, those that were
    left go first among their equals, so that none starves.
    """

    def __init__(self, session: "Session", backend: Backend) -> None:
        self._session = session
        self._backend = backend
        self._watches: list[Watch] = []
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(
        self,
        question: str,
        answers: tuple[str, ...],
        every_s: float,
        priority: int,
        params: SamplingParams | None,
        with_gap: bool,
    ) -> Watch:
        """Register a question."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigurationError("the question is empty: ask something")
        if not is_number(every_s) or every_s < 0:
            raise ConfigurationError(f"every_s={short(every_s)} must be a number of seconds, 0 or more")
        if not is_whole(priority):
            raise ConfigurationError(f"priority={short(priority)} must be a whole number")
        if isinstance(answers, str) or not all(isinstance(each, str) and each for each in answers):
            raise ConfigurationError(f"answers={short(answers)} must be a tuple of texts, as in ('yes', 'no')")
        watch = Watch(
            self,
            plain_text(question),
            tuple(answers),
            float(every_s),
            int(priority),
            params or SamplingParams(max_tokens=64),
            with_gap,
        )
        self._watches.append(watch)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="streamrag watches")
        return watch

    def remove(self, watch: Watch) -> None:
        """It is no longer answered."""
        with suppress(ValueError):
            self._watches.remove(watch)

    def data_updated(self) -> None:
        """Another version stands."""
        self._has_work.set()

    def answer_to(self, question: str, version: int, params: SamplingParams) -> Answer | None:
        """The answer that was computed ahead for this very question and version, if there is one."""
        for watch in self._watches:
            if watch.question == question and watch.version == version and (watch.allowed or watch.params == params):
                assert watch.newest is not None
                return watch.newest.answer
        return None

    async def aclose(self) -> None:
        """End all."""
        if self._task is not None:
            await cancel_regardless([self._task])
        for watch in list(self._watches):
            await watch.aclose()

    async def _run(self) -> None:
        while True:
            wait_s = await self._answer_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_work.wait()

    async def _answer_due(self) -> float | None:
        """Answer whatever is due; seconds until the next is, None if that takes other data."""
        self._has_work.clear()
        while stale := [watch for watch in self._watches if watch.version < self._session.state.version]:
            now = time.monotonic()
            due = [watch for watch in stale if watch.due_s <= now]
            if not due:
                return min(watch.due_s for watch in stale) - now
            watch = min(due, key=lambda watch: (-watch.priority, watch.version))
            watch.due_s = now + watch.every_s
            try:
                watch.put(await self._answered(watch))
            except PipelineClosedError:
                return None
            except ConfigurationError as error:  # of this question, and of all data
                watch.fail(error)
            except StreamRagError as error:
                watch.error = error
                watch.due_s = time.monotonic() + max(watch.every_s, 1.0)
        return None

    async def _answered(self, watch: Watch) -> WatchedAnswer:
        began_s = time.monotonic()
        params, by_token = watch.params, {}
        if watch.allowed:
            by_token = await in_thread(self._backend.model.tokenizer, partial(self._first_tokens, watch.allowed))
            allowed = {"allowed_token_ids": sorted(by_token)}
            if watch.with_gap:
                allowed["logprob_token_ids"] = allowed["allowed_token_ids"]
            params = replace(params, max_tokens=1, temperature=0.0, extra={**params.extra, **allowed})
        elif watch.with_gap:
            params = replace(params, extra={**params.extra, "logprobs": 2})
        async with self._session.ask(watch.question, params=params) as stream:
            async for _ in stream:
                pass
        answer = stream.result
        if by_token:
            answer = replace(answer, text=by_token.get(answer.token_ids[0], answer.text), finish_reason="stop")
        assert answer.version is not None
        return WatchedAnswer(
            watch.question, answer.text, answer.version, time.monotonic() - began_s, answer.gap, answer
        )

    def _first_tokens(self, answers: tuple[str, ...]) -> dict[int, str]:
        """Answers by the token that each begins with.

        :raises ConfigurationError: two begin alike.
        """
        by_token: dict[int, str] = {}
        for text in answers:
            first = self._backend.model.tokenizer.encode(text)[0]
            if first in by_token:
                raise ConfigurationError(
                    f"the answers {by_token[first]!r} and {text!r} begin with the same token: choose others"
                )
            by_token[first] = text
        return by_token
