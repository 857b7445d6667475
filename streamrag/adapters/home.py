"""The event loop in which a pipeline or a source lives, for callers in any thread and any loop.

What streamrag starts belongs to one event loop. Frameworks call from everywhere: from programs without a loop, from
threads beside a loop, from one loop after another.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from typing import Any, Generic, Self, TypeVar

from streamrag.errors import ConfigurationError, PipelineClosedError
from streamrag.tasks import cancel_regardless, is_cancelled, run_regardless

CLOSED = "it has been closed, or the event loop that it was started in has ended: make a new one"
CLOSE_S = 10.0
"""Most seconds that a program waits for the end of something that it has dropped without closing it."""

T = TypeVar("T")


class _End:
    """Stands for the end of what is iterated."""


class Home:
    """Where something lives that `start` starts and `aclose` stops; both are called in its event loop.

    The loop is that of whoever enters this with `async with`, or the one that `running_in` names because somebody else
    has started it. Otherwise the first call starts a thread with a loop of its own, which ends with `close()`, or when
    nobody refers to this any more.
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
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: _LoopThread | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        with self._guard:
            self._raise_closed()
            if self._thread is None and self._running_in() is None:
                self._loop = asyncio.get_running_loop()
        if self._loop is not None:
            await self._life.started()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        self._home()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what was started here, and wait until it has ended."""
        self._refuse()
        if self._thread is not None:
            self._thread.stop()
            self._thread.ended.result()

    async def aclose(self) -> None:
        """The same, without blocking the event loop."""
        self._refuse()
        if self._thread is not None:
            self._thread.stop()
            await asyncio.wrap_future(self._thread.ended)
        elif self._loop is not None:
            await self._life.ended()

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """What `make()` yields, made in the home's loop.

        :raises ConfigurationError: this is the loop's own thread, which would wait for itself.
        """
        loop = self._home()
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                raise ConfigurationError(
                    "a call that is not async would wait for its own event loop: use ainvoke, astream or abatch here"
                )
        pulled = _Pulled(self._life, make())
        try:
            while not isinstance(item := self._wait_for(loop, pulled.next()), _End):
                yield item
        finally:
            with suppress(PipelineClosedError):
                self._wait_for(loop, pulled.aclose())

    async def aiterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """What `make()` yields, made in the home's loop; cancelling this cancels that."""
        loop = self._home()
        if asyncio.get_running_loop() is loop:
            await self._life.started()
            async with aclosing(make()) as items:
                async for item in items:
                    yield item
            return
        pulled = _Pulled(self._life, make())
        try:
            while not isinstance(found := await self._call(loop, pulled.next()), _End):
                yield found
        finally:
            with suppress(PipelineClosedError):
                await run_regardless(self._call(loop, pulled.aclose()), "streamrag close")

    def _home(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            self._raise_closed()
            if (loop := self._running_in() or self._loop) is not None:
                return loop
            if self._thread is None:
                self._thread = _LoopThread(self._life)
                weakref.finalize(self, self._thread.drop)
            return self._thread.loop

    def _refuse(self) -> None:
        with self._guard:
            self._is_closed = True

    def _raise_closed(self) -> None:
        if self._is_closed:
            raise PipelineClosedError(CLOSED)

    def _submit(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._guard:  # what is submitted before the thread is told to stop, it still does
            try:
                self._raise_closed()
                return asyncio.run_coroutine_threadsafe(work, loop)
            except RuntimeError as error:  # the loop is closed
                work.close()
                raise PipelineClosedError(CLOSED) from error
            except PipelineClosedError:
                work.close()
                raise

    def _wait_for(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(loop, work)
        try:
            return future.result()
        except CancelledError:
            raise PipelineClosedError(CLOSED) from None
        finally:
            future.cancel()  # after a Ctrl-C

    async def _call(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(loop, work))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise PipelineClosedError(CLOSED) from None


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


class _LoopThread:
    """A thread with an event loop that runs until it is told to stop. The program does not wait for it."""

    def __init__(self, life: _Life) -> None:
        self.ended: Future[None] = Future()
        self._life = life
        ready: Future[asyncio.AbstractEventLoop] = Future()
        threading.Thread(target=self._run, args=(ready,), name="streamrag loop", daemon=True).start()
        self.loop = ready.result()

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopping.set)

    def drop(self) -> None:
        """Stop, when nobody is there any more to close it; at the program's end, too."""
        self.stop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with suppress(TimeoutError):
                self.ended.exception(CLOSE_S)

    def _run(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        try:
            asyncio.run(self._live(ready))
        except BaseException as error:  # raised where somebody waits for the end
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    async def _live(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        self._stopping = asyncio.Event()
        ready.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        await self._life.ended()
