"""Questions that are kept answered, all those of a session: Flash Queries, after arXiv 2605.13784, section 3.9."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from streamrag.core import Backend, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PipelineClosedError, PromptTooLongError, StreamRagError
from streamrag.kinds import is_number, is_whole, plain_text, short
from streamrag.sessions.answering import exact_key
from streamrag.sessions.watch import Watch, WatchedAnswer
from streamrag.tasks import cancel_regardless, is_cancelled
from streamrag.telemetry import Answer
from streamrag.tokenizing import in_thread

if TYPE_CHECKING:
    from streamrag.sessions.session import Session

RETRY_S = 1.0
"""After an attempt that failed."""


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
        if not isinstance(answers, tuple | list) or not all(isinstance(each, str) and each for each in answers):
            raise ConfigurationError(f"answers={short(answers)} must be a tuple of texts, as in ('yes', 'no')")
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigurationError(f"params={short(params)} must be a SamplingParams")
        watch = Watch(
            self,
            plain_text(question),
            tuple(map(plain_text, answers)),
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

    def answer_to(self, question: str, version: int, params: SamplingParams | None) -> Answer | None:
        """The answer that was computed ahead for this very question and version, if there is one."""
        for watch in self._watches:
            if watch.newest is None or (watch.question, watch.version) != (question, version):
                continue
            is_as_asked = params is None if watch.allowed else watch.key == exact_key(params or SamplingParams()) != ""
            if is_as_asked:
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
        try:
            self._session.check_open()
        except PipelineClosedError:
            return None
        except BackendError as error:  # the session has failed: there will be no other version
            for watch in list(self._watches):
                watch.fail(error)
        while stale := [watch for watch in self._watches if watch.version < self._session.state.version]:
            now = time.monotonic()
            due = [watch for watch in stale if watch.due_s <= now]
            if not due:
                return min(watch.due_s for watch in stale) - now
            watch = min(due, key=lambda watch: (-watch.priority, watch.version))
            watch.due_s = now + watch.every_s
            watch.work = asyncio.create_task(self._answered(watch), name="streamrag watched question")
            try:
                watch.put(await watch.work)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
            except PipelineClosedError:
                return None
            except (ConfigurationError, PromptTooLongError) as error:  # this question's fault
                watch.fail(error)
            except Exception as error:  # whatever the engine raises, the others are answered, and this one again
                watch.error = (
                    error if isinstance(error, StreamRagError) else BackendError(f"the engine failed: {error!r:.300}")
                )
                watch.due_s = time.monotonic() + max(watch.every_s, RETRY_S)
            finally:
                watch.work = None
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
        async with self._session.ask_ahead(watch.question, params) as stream:
            async for _ in stream:
                pass
        answer = stream.result
        if by_token:
            if not answer.token_ids or answer.token_ids[0] not in by_token:
                raise BackendError("the engine gave none of the answers that there may be")
            answer = replace(answer, text=by_token[answer.token_ids[0]], finish_reason="stop")
        assert answer.version is not None
        return WatchedAnswer(
            watch.question, answer.text, answer.version, time.monotonic() - began_s, answer.gap, answer
        )

    def _first_tokens(self, answers: tuple[str, ...]) -> dict[int, str]:
        """Answers by the token that each begins with.

        :raises ConfigurationError: two begin alike, or one has no tokens.
        """
        by_token: dict[int, str] = {}
        for text in answers:
            first = next(iter(self._backend.model.tokenizer.encode(text)), None)
            if first is None:
                raise ConfigurationError(f"the answer {text!r} has no tokens: choose another")
            if first in by_token:
                raise ConfigurationError(
                    f"the answers {by_token[first]!r} and {text!r} begin with the same token: choose others"
                )
            by_token[first] = text
        return by_token
