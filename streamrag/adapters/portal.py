"""A portal to the event loop of a pipeline or a source, for callers in any thread and any loop.

A started pipeline or source belongs to one event loop, but frameworks call it from code without a loop, from other
threads, and from several loops. `docs/contributing/decisions/seams.md` says why not by anyio's `BlockingPortal`.
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

from streamrag.adapters.portal_tasks import (
    CLOSED,
    END,
    PortalResource,
    Reading,
    current_loop,
    end_dropped,
    start_loop_thread,
)
from streamrag.core import Source
from streamrag.core.lifecycle import start_all
from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.pipeline import FORKED, Pipeline
from streamrag.support.clock import monotonic
from streamrag.support.messages import short_repr
from streamrag.support.tasks import run_shielded

LOOK_S = 1.0  # seconds between checks whether the other event loop still runs: there is no notification of its end

BLOCKED_S = 30.0  # seconds without an iteration after which a loop counts as blocked, perhaps by a wait for this call

BLOCKED = (
    "the event loop that it was started in has been blocked for {:.0f} s, perhaps by a wait for this call, as in "
    "LangChain's batch: use the framework's async methods in that loop"
)

T = TypeVar("T")

_claiming = threading.RLock()  # reentrant: garbage collection may end a portal, and begin another, in any thread
_claimed: "weakref.WeakKeyDictionary[Pipeline, asyncio.AbstractEventLoop]" = weakref.WeakKeyDictionary()
"""The event loop that a portal has chosen for each pipeline that is not started yet. All portals share it."""


def claim_loop(pipeline: Pipeline, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Return the event loop to use: the pipeline's own, or a running one claimed before, or `loop`. Thread-safe."""
    with _claiming:
        claimed = _claimed.get(pipeline)
        if claimed is None or not claimed.is_running():
            _claimed[pipeline] = claimed = loop
        return pipeline.loop or claimed


class LoopPortal:
    """A portal that runs calls in the event loop of its resource, which `start` starts and `aclose` stops in that loop.

    The loop is the one that `running_in` returns, if the resource was started elsewhere and is closed there; or that
    of the first caller of `settle`. Otherwise the first call starts a thread with its own loop, which ends with `close`
    or when the portal is garbage-collected. `claim` resolves races between several first callers: it returns the
    winner's loop. Calls in a forked process raise `PipelineClosedError`.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        aclose: Callable[[], Awaitable[None]],
        *,
        running_in: Callable[[], asyncio.AbstractEventLoop | None] = lambda: None,
        claim: Callable[[asyncio.AbstractEventLoop], asyncio.AbstractEventLoop] = lambda loop: loop,
    ) -> None:
        self._resource = PortalResource(start, aclose)
        self._running_in = running_in
        self._claim = claim
        self._guard = threading.RLock()  # reentrant: a garbage-collected generator takes it in any thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Future[None] | None = None
        self._is_closed = False
        self._process_id: int | None = None
        """The process of the loop."""

    @classmethod
    def to_pipeline(cls, pipeline: Pipeline) -> "LoopPortal":
        """Return a portal to a pipeline, which may have been started in another loop."""
        claim = partial(claim_loop, pipeline)
        return cls(pipeline.start, pipeline.aclose, running_in=lambda: pipeline.loop, claim=claim)

    @classmethod
    def to_source(cls, source: Source, *, is_owned: bool = True) -> "LoopPortal":
        """Return a portal to a source, which it starts and closes if it `is_owned`.

        :raises ConfigurationError: `source` is a class, or has no method `stream`.
        """
        if isinstance(source, type) or not callable(getattr(source, "stream", None)):
            raise ConfigurationError(f"source={short_repr(source)} is not a source: it has no method 'stream'")
        started = AsyncExitStack()

        async def start() -> None:
            if is_owned:
                started.push_async_callback((await start_all([source], lambda line: None)).aclose)

        return cls(start, started.aclose)

    def start(self) -> None:
        """Start the resource, in a thread with its own loop unless it has a loop already."""
        self.run(_do_nothing)

    async def settle(self) -> None:
        """Start the resource and wait, unless it is started; in this loop, unless resource or portal has another.

        :raises PipelineClosedError: the portal has been closed, or its loop has ended or is blocked.
        """
        self._check_open()
        with self._guard:
            here = asyncio.get_running_loop()
            if self._loop is None and self._running_in() is None and self._claim(here) is here:
                self._process_id = os.getpid()
                self._loop = here
        await self.arun(_do_nothing)

    def close(self) -> None:
        """Stop all iterations for good, and the resource if the portal started it, and wait for their end. Idempotent.

        If the loop has ended, or in a forked process, nothing is stopped.

        :raises ConfigurationError: the caller is in the portal's loop, and would wait for itself.
        """
        if self._end is None or not self._end.done():
            _check_not_in(self._loop)
        with suppress(PipelineClosedError):  # the loop has ended, or this is a forked process
            if (ending := self._begin_end()) is not None and current_loop() is not ending[1]:
                _wait_for(*ending)

    async def aclose(self) -> None:
        """Close the portal like `close`, without blocking the event loop."""
        with suppress(PipelineClosedError):
            if (ending := self._begin_end()) is not None:
                await run_shielded(_await(*ending), "streamrag close")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` in the portal's loop, and return the result. Raises like `iterate`."""
        with closing(self.iterate(partial(_one, work))) as results:
            return next(results)

    async def arun(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` in the portal's loop without blocking this loop. Cancelling cancels `work()`."""
        async with aclosing(self.aiterate(partial(_one, work))) as results:
            return await anext(results)

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """Start the resource if necessary, create an async generator with `make()` in its loop, and yield the items.

        At the end, or when closed, close the async generator, and wait for that unless the loop cannot run it.

        :raises ConfigurationError: the caller is in the portal's loop, and would wait for itself.
        :raises PipelineClosedError: the portal has been closed, or its loop has ended or is blocked.
        """
        loop = self._open_loop()
        _check_not_in(loop)
        reading = Reading(self._resource, make)
        waits = True
        try:
            while (item := _wait_for(self._submit(loop, reading.next), loop)) is not END:
                yield item
        except PipelineClosedError:  # the loop has ended or is blocked: do not wait for it
            waits = False
            raise
        finally:
            with suppress(PipelineClosedError):
                if not sys.is_finalizing():
                    closed = self._submit(loop, reading.aclose)
                    if waits and current_loop() is not loop:  # garbage collection may run this in the loop
                        _wait_for(closed, loop)

    async def aiterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Iterate like `iterate` without blocking, also in the portal's own loop. Cancelling cancels the generator."""
        loop = self._open_loop()
        is_here = asyncio.get_running_loop() is loop
        reading = Reading(self._resource, make)
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
                    await run_shielded(_await(closed, loop), "streamrag close")

    def _check_open(self) -> None:
        """Raise PipelineClosedError if the portal is closed, or this is a forked process."""
        self._check_process()
        if self._is_closed:
            raise PipelineClosedError(CLOSED)

    def _check_process(self) -> None:
        """Raise in a forked process. Call this before taking the guard, which may have been held during the fork."""
        if self._process_id not in (None, os.getpid()):
            raise PipelineClosedError(FORKED)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the resource or portal; without one, start a thread's, or return that of a faster caller.

        Raises as `_check_open`. The thread ends with the resource, at the latest when the portal is garbage-collected.
        """
        self._check_open()
        with self._guard:
            if (loop := self._running_in() or self._loop) is not None:
                return loop
            own, stop = start_loop_thread()
            if (loop := self._claim(own)) is not own:  # another caller won the race
                own.call_soon_threadsafe(stop)
                return loop
            self._resource.on_ended = stop
            self._process_id = os.getpid()
            self._loop = own
            weakref.finalize(self, end_dropped, self._resource, own, os.getpid())
            return own

    def _submit(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin `work()` in the loop; return its future. Raises PipelineClosedError if the portal or loop has ended."""
        self._check_process()
        with self._guard:  # work that is submitted before `_begin_end` still runs
            if not self._is_closed and loop.is_running():
                return self._resource.submit(loop, work)
        raise PipelineClosedError(CLOSED)

    def _begin_end(self) -> "tuple[Future[None], asyncio.AbstractEventLoop] | None":
        """Close the portal for good, and begin to stop its iterations, and the resource if the portal started it.

        Return the end's future and its loop, the same at each call, unless Ctrl-C cancelled the end before it began.
        Return None if there is no end yet and no running loop. Raises PipelineClosedError in a forked process.
        """
        self._check_process()
        with self._guard:
            self._is_closed = True
            loop = self._loop or self._running_in()
            if self._end is None or self._end.cancelled():  # cancelled by Ctrl-C before it began
                if loop is None or not loop.is_running():
                    return None
                is_started_here = self._loop is not None
                end = self._resource.end if is_started_here else self._resource.end_reads
                self._end = self._resource.submit(loop, end)
            assert loop is not None
            return self._end, loop


class PortalOwner:
    """A base class of adapters that start with the first call or a `with` block, and stop with the block or `close`."""

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
        """Stop what the adapter has started."""
        self.portal.close()

    async def aclose(self) -> None:
        """Stop what the adapter has started, without blocking the event loop."""
        await self.portal.aclose()


async def _do_nothing() -> None:
    pass


async def _one(work: Callable[[], Awaitable[T]]) -> AsyncGenerator[T, None]:
    yield await work()


def _wait_for(outcome: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    """Block until the outcome is there, and return its result, or raise its error. Ctrl-C cancels work not begun.

    :raises PipelineClosedError: the loop has ended, or has not begun the work for `BLOCKED_S`.
    """
    begin_s = monotonic()
    try:
        while not wait([outcome], LOOK_S).done:
            _check_turning(outcome, loop, monotonic() - begin_s)
        return outcome.result()
    finally:
        outcome.cancel()  # after a Ctrl-C


async def _await(outcome: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    """Return or raise the outcome as `_wait_for` does, without blocking. Cancelling cancels work that has not begun."""
    begin_s = monotonic()
    waiting = asyncio.wrap_future(outcome)
    try:
        while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
            _check_turning(outcome, loop, monotonic() - begin_s)
        return waiting.result()
    finally:
        if not waiting.cancel() and not waiting.cancelled():
            waiting.exception()  # marks the exception as retrieved, if this was cancelled


def _check_turning(outcome: "Future[Any]", loop: asyncio.AbstractEventLoop, waited_s: float) -> None:
    """Raise PipelineClosedError if, without an outcome, the loop has ended or not begun the work in `BLOCKED_S`."""
    if not loop.is_running() and not outcome.done():
        raise PipelineClosedError(CLOSED)
    if waited_s >= BLOCKED_S and not outcome.running() and not outcome.done():
        raise PipelineClosedError(BLOCKED.format(waited_s))


def _check_not_in(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise ConfigurationError if the caller is in this loop, which it would block."""
    if loop is not None and current_loop() is loop:
        raise ConfigurationError(
            "this call would block the event loop that it waits for: use the framework's async method; "
            "in LangChain, use ainvoke, astream or abatch"
        )
