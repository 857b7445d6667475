"""Async iterators that own the task of a running query.

The task never refers to its iterator, so that an iterator that is dropped is garbage-collected and stops its query.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, Self, TypeAlias, TypeVar

from streamrag.core import AnswerChunk
from streamrag.errors import StreamRagError
from streamrag.support.tasks import wait_shielded
from streamrag.telemetry import Answer, Answered, QueryEvent, TokensGenerated

MAX_UNREAD_EVENTS = 4096  # unread events after which a query waits for its caller (backpressure)

STOPPED = "there is no result: the query was stopped before its end"

T = TypeVar("T")

Emit: TypeAlias = Callable[[QueryEvent], Awaitable[None]]
OnEvent: TypeAlias = Callable[[QueryEvent], None]
"""A function that is called in the query's task with each event when it occurs. It must not raise."""
StartQuery: TypeAlias = Callable[[Emit], "asyncio.Task[Answer]"]


def _ignore(event: QueryEvent) -> None: ...


def _end(events: "asyncio.Queue[QueryEvent | None]") -> None:
    """Wake a reader that waits for an event after the last one."""
    if not events.full():
        events.put_nowait(None)


class QueryHandle(AsyncIterator[T], Generic[T]):
    """An async iterator over the items of a query, which starts with the first item that is requested.

    As an async context manager it stops the query when the block is left. Without one, a query whose loop was left
    early is stopped when the handle is garbage-collected, with a ResourceWarning.
    """

    def __init__(self, start: StartQuery) -> None:
        self._start = start
        self._on_event: OnEvent = _ignore
        self._task: asyncio.Task[Answer] | None = None
        self._is_stopped = False
        self._answer: Answer | None = None
        self._events: asyncio.Queue[QueryEvent | None] | None = None
        """The unread events. None, which is put back, stands for the end; a full queue has none."""

    def observe(self, on_event: OnEvent) -> Self:
        """Call `on_event` with each event of this unstarted query, before the event can be read. Return this handle."""
        assert self._task is None, "the query has started"
        self._on_event = on_event
        return self

    @property
    def result(self) -> Answer:
        """The whole answer to the query. Raises what the query raised, or StreamRagError if it runs or was stopped."""
        if self._answer is not None:
            return self._answer
        if self._task is None or not self._task.done():
            raise StreamRagError("there is no result yet: iterate the stream to its end first")
        if self._task.cancelled():
            raise StreamRagError(STOPPED)
        return self._task.result()

    def take_events(self) -> list[QueryEvent]:
        """Return the events that have not been read yet, up to `MAX_UNREAD_EVENTS`, and count them as read."""
        events: list[QueryEvent] = []
        while self._events is not None and not self._events.empty():
            if (event := self._events.get_nowait()) is None:
                _end(self._events)
                break
            events.append(event)
        return events

    async def aclose(self) -> None:
        """Stop the query, if it still runs, and wait for its end without raising its error. Drop unread events."""
        self.stop()
        if self._task is not None:
            await wait_shielded([self._task])

    def stop(self) -> None:
        """Begin to stop the query, if it still runs, without waiting for its end. Drop unread events."""
        if self._task is not None:
            self._is_stopped = self._is_stopped or not self._task.done()
            self._task.cancel()
            self._drop_events()

    def _ensure_started(self) -> "asyncio.Queue[QueryEvent | None]":
        """Start the query at the first call; return its events. If starting raises, the next call tries again."""
        if self._events is None:
            on_event = self._on_event
            events: asyncio.Queue[QueryEvent | None] = asyncio.Queue(MAX_UNREAD_EVENTS)

            async def emit(event: QueryEvent) -> None:
                on_event(event)
                await events.put(event)
                if events.qsize() > 1:  # the reader is behind
                    await asyncio.sleep(0)

            self._task = self._start(emit)
            self._task.add_done_callback(lambda _: _end(events))
            self._events = events
        return self._events

    def _drop_events(self) -> None:
        if self._events is not None:
            self.take_events()
            _end(self._events)

    async def _next_event(self) -> QueryEvent:
        """Return the next event; at the end raise the query's error, or StopAsyncIteration if there is none or `aclose`
        stopped it; StreamRagError if other code cancelled its task. If this call is cancelled, stop the query."""
        events = self._ensure_started()
        assert self._task is not None
        try:
            event = None if self._task.done() and events.empty() else await events.get()
            if not events.empty():
                await asyncio.sleep(0)
        except BaseException:  # cancelled: do not leave the query running
            await self.aclose()
            raise
        if event is None or self._is_stopped:
            _end(events)
            if not self._is_stopped:
                if self._task.cancelled():  # by foreign code, which must not look like a normal end
                    raise StreamRagError(STOPPED)
                self._task.result()  # raises what the query raised
            raise StopAsyncIteration
        if isinstance(event, Answered):
            self._answer = event.answer
        return event

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        self._ensure_started()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """Stop a query that still runs, with a ResourceWarning, from whichever thread."""
        task = getattr(self, "_task", None)
        if task is None:
            return
        loop = task.get_loop()
        if task.done() or loop.is_closed():
            return
        loop.call_soon_threadsafe(task.cancel)
        warnings.warn(
            f"{type(self).__name__} was dropped while its query was running, and stops it now; "
            "use `async with pipeline.stream(query) as stream:` to leave a loop early",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )


class AnswerStream(QueryHandle[AnswerChunk]):
    """An async iterator over the answer's chunks as they are generated, and a context manager that ends the query.

    The query starts with the block, or with the first chunk that is requested.
    """

    async def __anext__(self) -> AnswerChunk:
        while True:
            event = await self._next_event()
            if isinstance(event, TokensGenerated):
                return event.chunk


class EventStream(QueryHandle[QueryEvent]):
    """An async iterator over the query's events, in order; `Answered` is the last. Otherwise like `AnswerStream`."""

    async def __anext__(self) -> QueryEvent:
        return await self._next_event()
