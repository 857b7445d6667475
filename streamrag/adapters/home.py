"""The event loop in which a pipeline or a source lives, for callers in any thread and any loop.

What streamrag starts belongs to one event loop. Frameworks call from everywhere: from programs without a loop, from
threads beside a loop, from one loop after another.
"""

import asyncio
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar

from streamrag.adapters.loop_thread import LoopThread, current_loop
from streamrag.core import Source, Startable
from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.kinds import short
from streamrag.pipeline import Pipeline
from streamrag.tasks import cancel_regardless, is_cancelled, run_regardless

CLOSED = "it has been closed, or the event loop that it was started in has ended: make a new one"

T = TypeVar("T")


class _End:
    """Stands for the end of what is iterated."""


class Home:
    """Where something lives that `start` starts and `aclose` stops; both are called in its event loop.

    The loop is that of whoever calls `settle`, or the one that `running_in` names because somebody else has started it,
    who then closes it too. Otherwise the first call starts a thread with a loop of its own, which ends with `close`,
    or when nobody refers to this any more.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        aclose: Callable[[], Awaitable[None]],
        *,
        running_in: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None,
    ) -> None:
        self._life = _Life(start, aclose)
        self._running_in = running_in
        self._guard = threading.RLock()  # a generator that is collected takes it too, in whatever thread that is
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: LoopThread | None = None
        self._end: Future[None] | None = None
        self._is_closed = False

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> "Home":
        """That of a pipeline, which may run already."""
        return cls(pipeline.start, pipeline.aclose, running_in=lambda: pipeline.loop)

    @classmethod
    def of_source(cls, source: Source, *, is_owned: bool = True) -> "Home":
        """That of a source, which is started and closed if it must be, and is not somebody else's.

        :raises ConfigurationError: it is no source.
        """
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"source={short(source)} is no source: it has no method 'stream'")
        if is_owned and isinstance(source, Startable):
            return cls(partial(source.start, lambda line: None), source.aclose)
        return cls(_nothing, _nothing)

    def start(self) -> None:
        """Start what lives here."""
        self.run(_nothing)

    async def settle(self) -> None:
        """Start what lives here; in this event loop, unless it has a home already."""
        with self._guard:
            self._raise_closed()
            if self._loop is None and self._running_in() is None:
                self._loop = asyncio.get_running_loop()
        await self.arun(_nothing)

    def close(self) -> None:
        """Stop what was started here, and wait until it has ended.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        """
        if self._end is None or not self._end.done():
            _raise_own(self._loop)
        if (end := self._ended()) is not None:
            end.result()

    async def aclose(self) -> None:
        """The same, without blocking the event loop."""
        if (end := self._ended()) is not None:
            await run_regardless(_awaited(end), "streamrag close")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work()` returns or raises, awaited in the home's loop. Errors as of `iterate`."""
        with closing(self.iterate(partial(_one, work))) as found:
            return next(found)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """The same, without blocking this loop; cancelling this cancels that."""
        async with aclosing(self.aiterate(partial(_one, work))) as found:
            return await anext(found)

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """What `make()` yields, made in the home's loop.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        :raises PipelineClosedError: it has been closed, or its loop has ended.
        """
        loop = self._home()
        _raise_own(loop)
        pulled = _Pulled(self._life, make())
        try:
            while not isinstance(item := _waited_for(self._submit(loop, pulled.next())), _End):
                yield item
        finally:
            with suppress(PipelineClosedError):
                if not sys.is_finalizing():
                    closed = self._submit(loop, pulled.aclose())
                    if current_loop() is not loop:  # where this may be collected, too
                        _waited_for(closed)

    async def aiterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """The same, without blocking this loop; cancelling this cancels that."""
        loop = self._home()
        if asyncio.get_running_loop() is loop:
            await self._life.started()
            async with aclosing(make()) as items:
                async for item in items:
                    yield item
            return
        pulled = _Pulled(self._life, make())
        try:
            while not isinstance(found := await _awaited(self._submit(loop, pulled.next())), _End):
                yield found
        finally:
            with suppress(PipelineClosedError):
                await run_regardless(_awaited(self._submit(loop, pulled.aclose())), "streamrag close")

    def _home(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            self._raise_closed()
            if (loop := self._running_in() or self._loop) is None:
                self._thread = LoopThread(self._life.ended)
                weakref.finalize(self, self._thread.drop)
                loop = self._loop = self._thread.loop
            return loop

    def _raise_closed(self) -> None:
        if self._is_closed:
            raise PipelineClosedError(CLOSED)

    def _submit(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._guard:  # what is submitted before the thread is told to stop, it still does
            if not self._is_closed and loop.is_running():
                with suppress(RuntimeError):  # it has ended just now
                    return asyncio.run_coroutine_threadsafe(work, loop)
        work.close()
        raise PipelineClosedError(CLOSED)

    def _ended(self) -> "Future[None] | None":
        """The end of what was started here, which begins now; None if there is nothing, or its loop has ended."""
        with self._guard:
            self._is_closed = True
            if self._thread is not None:
                self._thread.stop()
                return self._thread.ended
            if self._end is None and self._loop is not None and self._loop.is_running():
                self._end = asyncio.run_coroutine_threadsafe(self._life.ended(), self._loop)
            return self._end


class Housed:
    """What starts with its first call, or with a block, sync or async, and is stopped at the block's end."""

    home: Any

    async def __aenter__(self) -> Self:
        await self.home.settle()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.home.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.home.close()

    def close(self) -> None:
        """Stop what the first call has started."""
        self.home.close()

    async def aclose(self) -> None:
        """The same, for callers in an event loop."""
        await self.home.aclose()


class _Life:
    """Started once, when it is needed; ended after everything that is read of it. All in one event loop."""

    def __init__(self, start: Callable[[], Awaitable[None]], aclose: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._aclose = aclose
        self._starting = asyncio.Lock()
        self._is_started = False
        self.pulled: set[_Pulled[Any]] = set()

    async def started(self) -> None:
        async with self._starting:
            if not self._is_started:
                await self._start()
                self._is_started = True

    async def ended(self) -> None:
        await asyncio.gather(*(each.aclose() for each in self.pulled), return_exceptions=True)
        await self._aclose()


class _Pulled(Generic[T]):
    """An async generator that is read from another thread, each step in a task of its own."""

    def __init__(self, life: _Life, items: AsyncGenerator[T, None]) -> None:
        self._life = life
        self._items = items
        self._lock = asyncio.Lock()
        self._step: asyncio.Task[Any] | None = None

    async def next(self) -> T | _End:
        async with self._lock:
            self._step = asyncio.current_task()
            await self._life.started()
            self._life.pulled.add(self)
            try:
                return await anext(self._items)
            except StopAsyncIteration:
                return _End()

    async def aclose(self) -> None:
        """Cancels the step that is under way."""
        if self._step is not None:
            await cancel_regardless([self._step])
        async with self._lock:
            await self._items.aclose()
            self._life.pulled.discard(self)


async def _nothing() -> None:
    """Starts or closes what need not be."""


async def _one(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    yield await work()


def _waited_for(future: "Future[T]") -> T:
    try:
        return future.result()
    except CancelledError:
        raise PipelineClosedError(CLOSED) from None
    finally:
        future.cancel()  # after a Ctrl-C


async def _awaited(future: "Future[T]") -> T:
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise PipelineClosedError(CLOSED) from None


def _raise_own(loop: asyncio.AbstractEventLoop | None) -> None:
    if loop is not None and current_loop() is loop:
        raise ConfigurationError(
            "this call would wait for the event loop that it was made in: use the framework's async method; "
            "in LangChain, use ainvoke, astream or abatch"
        )
