"""What adapters share: parts that live on one event loop, used from threads and from other loops, and what a query of a
pipeline gives in the order in which frameworks want it."""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from streamrag.core import Append, Chunk, Source, Startable, Update
from streamrag.errors import ConfigurationError
from streamrag.handle import EventStream
from streamrag.modes.context import UpdateMode
from streamrag.retrieving import Retrieval
from streamrag.telemetry import Answer, Answered, ContextComplete, TokensGenerated

T = TypeVar("T")

_END: Any = object()


class Host:
    """Where coroutines run: on the loop that `home` tells; while it tells none, on the caller's.

    A caller that has no loop gets one of the host's own, in a thread. With `is_apart`, so does everybody.
    """

    def __init__(self, home: Callable[[], asyncio.AbstractEventLoop | None], *, is_apart: bool = False) -> None:
        self._home = home
        self._is_apart = is_apart
        self._lock = threading.Lock()
        self._own: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises; cancelling this cancels it."""
        here = asyncio.get_running_loop()
        loop = self._home() or (self._started() if self._is_apart else here)
        if loop is here:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _running(loop, work)))

    def blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises, waited for in this thread.

        :raises ConfigurationError: this thread is the one that would have to run it.
        """
        loop = _running(self._home() or self._started(), work)
        if loop is _current():
            work.close()
            raise ConfigurationError(
                "this call would wait for the event loop that it was made in: use the framework's async method"
            )
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C; otherwise it is done
            raise

    async def items(self, found: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Those of `found`, which is closed with this."""
        try:
            while (item := await self.awaited(_next(found))) is not _END:
                yield item
        finally:
            await self.awaited(_close(found))

    def blocking_items(self, found: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Those of `found`, which is closed with this."""
        try:
            while (item := self.blocking(_next(found))) is not _END:
                yield item
        finally:
            self._close_somehow(found)

    def close(self) -> None:
        """End the thread, if there is one."""
        with self._lock:
            loop, thread, self._own, self._thread = self._own, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _close_somehow(self, found: AsyncGenerator[T, None]) -> None:
        """A generator may be collected in any thread, and when nothing runs any more."""
        loop = self._home() or self._own
        if loop is None or not loop.is_running() or sys.is_finalizing():
            return
        closed = asyncio.run_coroutine_threadsafe(_close(found), loop)
        if loop is not _current():
            closed.result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._own is None:
                self._own = asyncio.new_event_loop()
                is_running = threading.Event()
                self._own.call_soon(is_running.set)
                self._thread = threading.Thread(target=self._own.run_forever, name="streamrag adapter", daemon=True)
                self._thread.start()
                is_running.wait()
            return self._own


class HostedSource:
    """A source for callers with and without an event loop. If it must be started, it is, on a loop of its own, by the
    first query; `close` closes it."""

    def __init__(self, source: Source) -> None:
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"{source!r} is no source: it has no method 'stream'")
        self._source = source
        self._startable = source if isinstance(source, Startable) else None
        self.host = Host(lambda: None, is_apart=self._startable is not None)
        self._starting = asyncio.Lock()
        self._is_started = False

    async def found(self, query: str) -> tuple[Chunk, ...]:
        """Everything that the source finds. To be run by `host`."""
        if self._startable is not None:
            async with self._starting:
                if not self._is_started:
                    await self._startable.start(lambda line: None)
                    self._is_started = True
        chunks: tuple[Chunk, ...] = ()
        retrieval = Retrieval(self._source, query)
        try:
            async for event in retrieval.events():
                if isinstance(event, Append | Update):
                    chunks = UpdateMode().fold(chunks, event)
        finally:
            await retrieval.aclose()
        return chunks

    def close(self) -> None:
        """Close the source, if it was started."""
        if self._startable is not None and self._is_started:
            self._is_started = False
            self.host.blocking(self._startable.aclose())
        self.host.close()


class Asked:
    """One query of a pipeline: the passages of its prompt first, then its tokens, and the whole answer."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self.answer: Answer | None = None

    async def context(self) -> tuple[Chunk, ...]:
        """The passages, once retrieval is complete."""
        async for event in self._events:
            if isinstance(event, ContextComplete):
                return event.chunks
        raise AssertionError("a query ends with an answer or an error")

    async def tokens(self) -> AsyncGenerator[TokensGenerated, None]:
        """The rest of the query; closing this stops it."""
        async with self._events:
            async for event in self._events:
                if isinstance(event, TokensGenerated):
                    yield event
                elif isinstance(event, Answered):
                    self.answer = event.answer


@dataclass(frozen=True, slots=True)
class FoundChunk(Chunk):
    """A chunk that knows what it was made of, for those who want that back."""

    origin: Any = field(default=None, compare=False, repr=False)


async def _next(found: AsyncIterator[T]) -> T:
    return await anext(found, _END)


async def _close(found: AsyncGenerator[Any, None]) -> None:
    await found.aclose()


def _running(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
    if not loop.is_running():
        work.close()
        raise ConfigurationError("the pipeline was started on an event loop that does not run any more: make a new one")
    return loop


def _current() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
