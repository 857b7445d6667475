"""One question that is kept answered, as its owner holds it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from streamrag.errors import PipelineClosedError, StreamRagError
from streamrag.sessions.asking import Asked
from streamrag.support.tasks import Broadcast
from streamrag.telemetry import Answer

if TYPE_CHECKING:
    from streamrag.sessions.watching import Watches


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
    """Confidence: how much more likely the answer's first token was than the next best, in log-probability; of a few
    answers, the chosen one than the next best, as far as they were computed. None if it was not asked for."""
    answer: Answer


class Watch(AsyncIterator[WatchedAnswer]):
    """One registered question. Iterate it for its answers, each when it differs from the one before.

    A reader that is slow misses answers that were overtaken, and gets the newest. `aclose` ends it.
    """

    def __init__(
        self, watches: "Watches", asked: Asked, every_s: float, priority: int, name: str | None = None
    ) -> None:
        self.asked = asked
        self.name = name
        self.priority = priority
        self.every_s = every_s
        self.newest: WatchedAnswer | None = None
        """The answer to the newest version that it was computed for."""
        self.num_answered = 0
        self.error: StreamRagError | None = None
        """Why the last attempt failed; it is made again with the next data."""
        self.due_s = 0.0
        self._watches = watches
        self._unread: WatchedAnswer | None = None
        self._told: str | None = None
        """What the reader has read last."""
        self.work: asyncio.Task[None] | None = None
        """Under way, to answer it."""
        self._news = Broadcast()
        self._is_closed = False

    @property
    def question(self) -> str:
        """As it was asked."""
        return self.asked.question

    @property
    def version(self) -> int:
        """Of `newest`; -1 before there is one."""
        return -1 if self.newest is None else self.newest.version

    def put(self, answered: WatchedAnswer) -> None:
        """A new answer."""
        self.newest = answered
        self.num_answered += 1
        self.error = None
        self._unread = answered if answered.text != self._told else None
        self._news.wake()

    async def at_least(self, version: int) -> WatchedAnswer:
        """The answer to this version of the data, or to a newer one, once it is there.

        :raises PipelineClosedError: the watch ended first.
        :raises StreamRagError: the question cannot be answered at all.
        """
        while self.newest is None or self.version < version:
            if self._is_closed:
                if self.error is not None:
                    raise self.error
                raise PipelineClosedError("the watch ended before that version was answered")
            await self._news.wait()
        return self.newest

    async def aclose(self) -> None:
        """The question is no longer answered ahead, nor when its session is resumed."""
        self.end()

    def end(self) -> None:
        """The same, at once."""
        self._watches.forget(self)
        self.stop()

    def stop(self, error: StreamRagError | None = None) -> None:
        """End the watch for now: a session that is resumed has it again, if it has a name.

        error: why it cannot be answered at all, for whoever iterates.
        """
        if self._is_closed:
            return
        self.error = error
        self._is_closed = True
        self._news.wake()
        self._watches.remove(self)
        if self.work is not None:
            self.work.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchedAnswer:
        while self._unread is None:
            if self._is_closed:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            await self._news.wait()
        answered, self._unread = self._unread, None
        self._told = answered.text
        return answered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()
