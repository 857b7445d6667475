"""The event loop in which a pipeline or a source lives, for callers in any thread and any loop.

What streamrag starts belongs to one event loop. Frameworks call from everywhere: from programs without a loop, from
threads beside a loop, from one loop after another.
"""

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, aclosing, closing, suppress
from functools import partial
from typing import Any, Self, TypeVar

from streamrag.adapters.life import CLOSED, End, Life, Reading
from streamrag.adapters.loop_thread import LoopThread, current_loop
from streamrag.clock import monotonic
from streamrag.core import Source
from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.pipeline import FORKED, Pipeline
from streamrag.starting import start_all
from streamrag.support.messages import short
from streamrag.support.tasks import run_regardless

LOOK_S = 1.0
"""Who waits for another event loop looks every so many seconds whether it still runs: its end is told to nobody."""

BLOCKED_S = 30.0
"""A loop that has not turned for so many seconds is taken to be blocked, perhaps by a wait for this very call."""

BLOCKED = (
    "the event loop that it was started in has not turned for {:.0f} s: something blocks it, perhaps a wait for this "
    "call, as LangChain's batch waits for its threads: use the framework's async methods there"
)

T = TypeVar("T")


class Home:
    """Where something lives that `start` starts and `aclose` stops; both are called in its event loop.

    The loop is that of whoever calls `settle`, or the one that `running_in` names because somebody else has started it,
    who then closes it too; where several are the first at once, `claim` names the loop of one. Otherwise the first call
    starts a thread with a loop of its own, which ends with `close`, or when nobody refers to this any more. It is of
    one process: in a fork, which has no such thread, calls are refused, and there is nothing to close.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        aclose: Callable[[], Awaitable[None]],
        *,
        running_in: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None,
        claim: Callable[[asyncio.AbstractEventLoop], asyncio.AbstractEventLoop] = lambda loop: loop,
    ) -> None:
        self._life = Life(start, aclose)
        self._running_in = running_in
        self._claim = claim
        self._guard = threading.RLock()  # a generator that is collected takes it too, in whatever thread that is
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: LoopThread | None = None
        self._end: Future[None] | None = None
        self._is_closed = False
        self._process_id: int | None = None
        """Where it has a loop."""

    @classmethod
    def of_pipeline(cls, pipeline: Pipeline) -> "Home":
        """That of a pipeline, which may run already."""
        return cls(pipeline.start, pipeline.aclose, running_in=lambda: pipeline.loop, claim=pipeline.claim)

    @classmethod
    def of_source(cls, source: Source, *, is_owned: bool = True) -> "Home":
        """That of a source, which is started and closed if it must be, and is not somebody else's.

        :raises ConfigurationError: it is no source.
        """
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"source={short(source)} is no source: it has no method 'stream'")
        if not is_owned:
            return cls(_nothing, _nothing)
        started = AsyncExitStack()
        return cls(partial(_start_source, source, started), started.aclose)

    def start(self) -> None:
        """Start what lives here."""
        self.run(_nothing)

    async def settle(self) -> None:
        """Start what lives here; in this event loop, unless it has a home already."""
        self._raise_forked()
        with self._guard:
            self._raise_closed()
            here = asyncio.get_running_loop()
            if self._loop is None and self._running_in() is None and self._claim(here) is here:
                self._process_id = os.getpid()
                self._loop = here
        await self.arun(_nothing)

    def close(self) -> None:
        """Stop what was started here, and what is read through this, and wait until it has ended.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        """
        if self._end is None or not self._end.done():
            _raise_own(self._loop)
        with suppress(PipelineClosedError):  # its loop has ended meanwhile, or this is a fork
            if (ending := self._ended()) is not None and current_loop() is not ending[1]:
                _waited_for(*ending)

    async def aclose(self) -> None:
        """The same, without blocking the event loop."""
        with suppress(PipelineClosedError):
            if (ending := self._ended()) is not None:
                await run_regardless(_awaited(*ending), "streamrag close")

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
        reading = Reading(self._life, make)
        waits = True
        try:
            while not isinstance(item := _waited_for(self._submit(loop, reading.ask), loop), End):
                yield item
        except PipelineClosedError:  # it has ended, or nothing is to be waited for there
            waits = False
            raise
        finally:
            with suppress(PipelineClosedError):
                if not sys.is_finalizing():
                    closed = self._submit(loop, partial(self._life.do, reading.aclose))
                    if waits and current_loop() is not loop:  # where this may be collected, too
                        _waited_for(closed, loop)

    async def aiterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """The same, without blocking this loop; cancelling this cancels that."""
        loop = self._home()
        reading = Reading(self._life, make)
        waits = True
        try:
            while not isinstance(item := await self._next(loop, reading), End):
                yield item
        except PipelineClosedError:
            waits = False
            raise
        finally:
            with suppress(PipelineClosedError):
                closed = self._submit(loop, partial(self._life.do, reading.aclose))
                if waits:
                    await run_regardless(_awaited(closed, loop), "streamrag close")

    async def _next(self, loop: asyncio.AbstractEventLoop, reading: Reading[T]) -> T | End:
        if asyncio.get_running_loop() is loop:
            return await reading.next()
        return await _awaited(self._submit(loop, reading.ask), loop)

    def _home(self) -> asyncio.AbstractEventLoop:
        self._raise_forked()
        with self._guard:
            self._raise_closed()
            return self._running_in() or self._loop or self._begun()

    def _begun(self) -> asyncio.AbstractEventLoop:
        """That of a new thread, unless somebody else starts what lives here just now."""
        thread = LoopThread()
        if (loop := self._claim(thread.loop)) is not thread.loop:
            thread.stop()
            return loop
        weakref.finalize(self, thread.drop, self._life.ended)
        self._process_id = os.getpid()
        self._thread, self._loop = thread, loop
        return loop

    def _raise_forked(self) -> None:
        """Before anything else: another thread may have held the guard when the process was forked."""
        if self._process_id not in (None, os.getpid()):
            raise PipelineClosedError(FORKED)

    def _raise_closed(self) -> None:
        if self._is_closed:
            raise PipelineClosedError(CLOSED)

    def _submit(self, loop: asyncio.AbstractEventLoop, begin: Callable[["Future[T]"], None]) -> "Future[T]":
        """What `begin` will be told, in that loop."""
        self._raise_forked()
        with self._guard:  # what is submitted before the thread is told to stop, it still does
            if not self._is_closed and loop.is_running():
                return _called(loop, begin)
        raise PipelineClosedError(CLOSED)

    def _ended(self) -> "tuple[Future[None], asyncio.AbstractEventLoop] | None":
        """The end of what was started here or is read, which begins now; None if there is nothing, or its loop has
        ended.
        """
        self._raise_forked()
        with self._guard:
            self._is_closed = True
            if self._thread is not None:
                self._thread.stop(self._life.ended)
                return self._thread.ended, self._thread.loop
            loop = self._loop or self._running_in()
            if loop is None or not loop.is_running():
                return None
            if self._end is None or self._end.cancelled():  # by a Ctrl-C, before it had begun
                end = self._life.stopped if self._loop is None else self._life.ended
                self._end = _called(loop, partial(self._life.do, end))
            return self._end, loop


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


async def _nothing() -> None:
    """Starts or closes what need not be."""


async def _one(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    yield await work()


async def _start_source(source: Source, started: AsyncExitStack) -> None:
    started.push_async_callback((await start_all([source], lambda line: None)).aclose)


def _called(loop: asyncio.AbstractEventLoop, begin: Callable[["Future[T]"], None]) -> "Future[T]":
    told: Future[T] = Future()
    try:
        loop.call_soon_threadsafe(begin, told)
    except RuntimeError:  # it has ended just now
        raise PipelineClosedError(CLOSED) from None
    return told


def _waited_for(future: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    begun_s = monotonic()
    try:
        while not wait([future], LOOK_S).done:
            _raise_still(future, loop, monotonic() - begun_s)
        return future.result()
    finally:
        future.cancel()  # after a Ctrl-C


async def _awaited(future: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    begun_s = monotonic()
    waiting = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
            _raise_still(future, loop, monotonic() - begun_s)
        return waiting.result()
    finally:
        if not waiting.cancel() and not waiting.cancelled():
            waiting.exception()  # which nobody else asks for, if this is cancelled


def _raise_still(future: "Future[Any]", loop: asyncio.AbstractEventLoop, waited_s: float) -> None:
    if not loop.is_running() and not future.done():
        raise PipelineClosedError(CLOSED)
    if waited_s >= BLOCKED_S and not future.running() and not future.done():
        raise PipelineClosedError(BLOCKED.format(waited_s))


def _raise_own(loop: asyncio.AbstractEventLoop | None) -> None:
    if loop is not None and current_loop() is loop:
        raise ConfigurationError(
            "this call would wait for the event loop that it was made in: use the framework's async method; "
            "in LangChain, use ainvoke, astream or abatch"
        )
