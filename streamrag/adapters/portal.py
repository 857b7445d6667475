"""A portal to the event loop in which a pipeline or a source lives, for callers in any thread and any loop.

What streamrag starts belongs to one event loop. Frameworks call from everywhere: from programs without a loop, from
threads beside a loop, from one loop after another. Why this is not anyio's `BlockingPortal`: see DECISIONS.md.
"""

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, aclosing, closing, suppress
from functools import partial
from typing import Any, Self, TypeVar

from streamrag.adapters.portal_tasks import CLOSED, END, Reading, Tenant, current_loop, end_dropped, start_loop_thread
from streamrag.core import Source
from streamrag.core.lifecycle import start_all
from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.pipeline import FORKED, Pipeline
from streamrag.support.clock import monotonic
from streamrag.support.messages import short
from streamrag.support.tasks import run_regardless

LOOK_S = 1.0
"""Seconds between looks, while waiting for another event loop, whether that loop still runs: nothing tells its end."""

BLOCKED_S = 30.0
"""Seconds without a turn after which a loop counts as blocked, perhaps by a wait for this very call."""

BLOCKED = (
    "the event loop that it was started in has not turned for {:.0f} s: something blocks it, perhaps a wait for this "
    "call, as LangChain's batch waits for its threads: use the framework's async methods there"
)

T = TypeVar("T")


class LoopPortal:
    """Runs calls in the event loop of something that `start` starts and `aclose` stops; both are called in that loop.

    The loop is that of the first caller of `settle`, or the one that `running_in` names because somebody else has
    started it, who then closes it too; where several callers are the first at once, `claim` names the loop of one.
    Otherwise the first call starts a thread with a loop of its own, which ends with `close`, or when the portal is
    collected. A portal is of one process: in a fork, calls are refused, and there is nothing to close.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        aclose: Callable[[], Awaitable[None]],
        *,
        running_in: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None,
        claim: Callable[[asyncio.AbstractEventLoop], asyncio.AbstractEventLoop] = lambda loop: loop,
    ) -> None:
        self._tenant = Tenant(start, aclose)
        self._running_in = running_in
        self._claim = claim
        self._guard = threading.RLock()  # a generator that is collected takes it too, in whatever thread that is
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Future[None] | None = None
        self._is_closed = False
        self._process_id: int | None = None
        """The process in which there is a loop."""

    @classmethod
    def to_pipeline(cls, pipeline: Pipeline) -> "LoopPortal":
        """Return a portal to a pipeline, which may be running already."""
        return cls(pipeline.start, pipeline.aclose, running_in=lambda: pipeline.loop, claim=pipeline.claim)

    @classmethod
    def to_source(cls, source: Source, *, is_owned: bool = True) -> "LoopPortal":
        """Return a portal to a source, which starts and closes it if the source `is_owned` and needs that.

        :raises ConfigurationError: it is no source.
        """
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"source={short(source)} is no source: it has no method 'stream'")
        started = AsyncExitStack()

        async def start() -> None:
            if is_owned:
                started.push_async_callback((await start_all([source], lambda line: None)).aclose)

        return cls(start, started.aclose)

    def start(self) -> None:
        """Start what lives behind the portal."""
        self.run(_nothing)

    async def settle(self) -> None:
        """Start what lives behind the portal; in this event loop, unless it has a loop already."""
        self._check_open()
        with self._guard:
            here = asyncio.get_running_loop()
            if self._loop is None and self._running_in() is None and self._claim(here) is here:
                self._process_id = os.getpid()
                self._loop = here
        await self.arun(_nothing)

    def close(self) -> None:
        """Stop what was started here, and what is read through the portal, and wait until it has ended.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        """
        if self._end is None or not self._end.done():
            _refuse_own(self._loop)
        with suppress(PipelineClosedError):  # its loop has ended meanwhile, or this is a fork
            if (ending := self._begin_end()) is not None and current_loop() is not ending[1]:
                _wait_for(*ending)

    async def aclose(self) -> None:
        """Do the same without blocking the event loop."""
        with suppress(PipelineClosedError):
            if (ending := self._begin_end()) is not None:
                await run_regardless(_await(*ending), "streamrag close")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work()` returns, awaited in the portal's loop. Errors as of `iterate`."""
        with closing(self.iterate(partial(_one, work))) as results:
            return next(results)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do the same without blocking this loop; cancelling this cancels `work()`."""
        async with aclosing(self.aiterate(partial(_one, work))) as results:
            return await anext(results)

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Yield what `make()` yields, made in the portal's loop.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        :raises PipelineClosedError: it has been closed, or its loop has ended.
        """
        loop = self._open_loop()
        _refuse_own(loop)
        reading = Reading(self._tenant, make)
        waits = True
        try:
            while (item := _wait_for(self._submit(loop, reading.next), loop)) is not END:
                yield item
        except PipelineClosedError:  # it has ended, or nothing is to be waited for there
            waits = False
            raise
        finally:
            with suppress(PipelineClosedError):
                if not sys.is_finalizing():
                    closed = self._submit(loop, reading.aclose)
                    if waits and current_loop() is not loop:  # where a garbage collection may run this, too
                        _wait_for(closed, loop)

    async def aiterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Do the same without blocking this loop; cancelling this cancels that."""
        loop = self._open_loop()
        is_here = asyncio.get_running_loop() is loop
        reading = Reading(self._tenant, make)
        waits = True
        try:
            while True:
                next_item = reading.next() if is_here else _await(self._submit(loop, reading.next), loop)
                if (item := await next_item) is END:
                    break
                yield item
        except PipelineClosedError:
            waits = False
            raise
        finally:
            with suppress(PipelineClosedError):
                closed = self._submit(loop, reading.aclose)
                if waits:
                    await run_regardless(_await(closed, loop), "streamrag close")

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise PipelineClosedError(CLOSED)

    def _check_process(self) -> None:
        """Raise in a fork, before the guard is taken: another thread may have held it when the process was forked."""
        if self._process_id not in (None, os.getpid()):
            raise PipelineClosedError(FORKED)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        """Return the portal's loop; that of a new thread if it has none."""
        self._check_open()
        with self._guard:
            if (loop := self._running_in() or self._loop) is not None:
                return loop
            own, stop = start_loop_thread()
            if (loop := self._claim(own)) is not own:  # somebody else starts it just now
                own.call_soon_threadsafe(stop)
                return loop
            self._tenant.on_ended = stop
            self._process_id = os.getpid()
            self._loop = own
            weakref.finalize(self, end_dropped, self._tenant, own, os.getpid())
            return own

    def _submit(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        self._check_process()
        with self._guard:  # what is submitted before the end still runs
            if not self._is_closed and loop.is_running():
                return self._tenant.submit(loop, work)
        raise PipelineClosedError(CLOSED)

    def _begin_end(self) -> "tuple[Future[None], asyncio.AbstractEventLoop] | None":
        """Begin to stop what was started here or is read; None if there is nothing, or its loop has ended."""
        self._check_process()
        with self._guard:
            self._is_closed = True
            loop = self._loop or self._running_in()
            if self._end is None or self._end.cancelled():  # by a Ctrl-C, before it had begun
                if loop is None or not loop.is_running():
                    return None
                is_started_here = self._loop is not None
                self._end = self._tenant.submit(loop, self._tenant.end if is_started_here else self._tenant.end_reads)
            assert loop is not None
            return self._end, loop


class PortalOwner:
    """A base class of adapters that start with the first call, or with a block, sync or async, and stop at its end."""

    portal: Any

    async def __aenter__(self) -> Self:
        await self.portal.settle()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.portal.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.portal.close()

    def close(self) -> None:
        """Stop what the first call has started."""
        self.portal.close()

    async def aclose(self) -> None:
        """Do the same, for callers in an event loop."""
        await self.portal.aclose()


async def _nothing() -> None:
    """Start or close what need not be."""


async def _one(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    yield await work()


# ------------------------------------------------------------------------------------------------ where the callers are


def _wait_for(outcome: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    begin_s = monotonic()
    try:
        while not wait([outcome], LOOK_S).done:
            _check_turning(outcome, loop, monotonic() - begin_s)
        return outcome.result()
    finally:
        outcome.cancel()  # after a Ctrl-C


async def _await(outcome: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    begin_s = monotonic()
    waiting = asyncio.wrap_future(outcome)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
            _check_turning(outcome, loop, monotonic() - begin_s)
        return waiting.result()
    finally:
        if not waiting.cancel() and not waiting.cancelled():
            waiting.exception()  # which nothing else retrieves, if this is cancelled


def _check_turning(outcome: "Future[Any]", loop: asyncio.AbstractEventLoop, waited_s: float) -> None:
    if not loop.is_running() and not outcome.done():
        raise PipelineClosedError(CLOSED)
    if waited_s >= BLOCKED_S and not outcome.running() and not outcome.done():
        raise PipelineClosedError(BLOCKED.format(waited_s))


def _refuse_own(loop: asyncio.AbstractEventLoop | None) -> None:
    if loop is not None and current_loop() is loop:
        raise ConfigurationError(
            "this call would wait for the event loop that it was made in: use the framework's async method; "
            "in LangChain, use ainvoke, astream or abatch"
        )
