"""Questions that are kept answered, all those of a session: Flash Queries, after arXiv 2605.13784, section 3.9."""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from streamrag.core import SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PipelineClosedError, PromptTooLongError, StreamRagError
from streamrag.kinds import is_number, is_whole, short
from streamrag.sessions.asking import Asked, asked
from streamrag.sessions.watch import Watch, WatchedAnswer
from streamrag.tasks import cancel_regardless, is_cancelled
from streamrag.telemetry import Answer

if TYPE_CHECKING:
    from streamrag.sessions.session import Session

RETRY_S = 1.0
"""After an attempt that failed."""


class Watches:
    """All registered questions of a session, answered one after the other by one task.

    After each new version, in order of priority; when another version stands before all are answered, those that were
    left go first among their equals, so that none starves.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
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
        if not is_number(every_s) or every_s < 0:
            raise ConfigurationError(f"every_s={short(every_s)} must be a number of seconds, 0 or more")
        if not is_whole(priority):
            raise ConfigurationError(f"priority={short(priority)} must be a whole number")
        given = SamplingParams(max_tokens=64) if params is None else params
        watch = Watch(self, asked(question, answers, given, with_gap), float(every_s), int(priority))
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

    def answer_to(self, asked: Asked, version: int) -> Answer | None:
        """The answer that was computed ahead for this very question and version, if there is one."""
        for watch in self._watches:
            if watch.newest is None or watch.version != version or not asked.key[-1]:
                continue
            if watch.asked.key == asked.key and watch.asked.with_gap >= asked.with_gap:
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
            now = asyncio.get_running_loop().time()
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
                watch.due_s = asyncio.get_running_loop().time() + max(watch.every_s, RETRY_S)
            finally:
                watch.work = None
        return None

    async def _answered(self, watch: Watch) -> WatchedAnswer:
        began_s = time.monotonic()
        async with self._session.ask_ahead(watch.asked) as stream:
            async for _ in stream:
                pass
        answer = stream.result
        assert answer.version is not None
        return WatchedAnswer(
            watch.question, answer.text, answer.version, time.monotonic() - began_s, answer.gap, answer
        )
