# mypy: disable-error-code="override"
# Unsupported methods take any arguments.
"""An asyncio event loop in virtual time: when no task is ready, the clock jumps to the next timer.

    run_virtual(main())        # loop.time() starts at 0; asyncio.sleep(3600) returns at once, and the clock shows 3600

Code runs unchanged, and two runs execute the same steps in the same order. Waiting for sockets, threads or processes
raises an error, because such a wait would never end in virtual time.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from streamrag.errors import ConfigurationError

T = TypeVar("T")

MOST_TURNS_AT_ONE_TIME = 200_000  # iterations of the loop at one point in time, after which we report a busy loop


class DeadlockError(RuntimeError):
    """All tasks wait and no timer is scheduled: a bug in the program."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop with a virtual clock. `is_virtual` tells code which kind of clock it runs on."""

    is_virtual = True

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._num_turns = 0
        self._selector = self  # asyncio calls `_selector.select` once per iteration

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Advance the clock by `timeout` without waiting, and return no events.

        :raises DeadlockError: `timeout` is None, because no task is ready and no timer is set; or the clock stands
            still for `MOST_TURNS_AT_ONE_TIME` calls.
        """
        if timeout is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise DeadlockError(f"at {self._now_s:.6f} s of virtual time all tasks wait for each other: {waiting}")
        if timeout > 0:
            self._now_s += timeout
            self._num_turns = 0
        self._num_turns += 1
        if self._num_turns > MOST_TURNS_AT_ONE_TIME:
            self._num_turns = 0  # so that cancelled tasks can clean up
            raise DeadlockError(f"virtual time stands still at {self._now_s:.6f} s: a task runs a busy loop")
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
        """Schedule a callback from this thread; raise ConfigurationError in another one."""
        if self._thread_id not in (None, threading.get_ident()):  # type: ignore[attr-defined]
            _refuse("another thread")
        return self.call_soon(callback, *args, **kwargs)  # asyncio's Ctrl-C handler calls this

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("a network connection")

    create_datagram_endpoint = create_server = getaddrinfo = create_connection

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("a process")

    subprocess_shell = subprocess_exec

    def run_in_executor(self, *args: Any) -> NoReturn:
        _refuse("a thread or process pool (run_in_executor, asyncio.to_thread)")

    def add_reader(self, *args: Any) -> NoReturn:
        _refuse("a file or socket")

    add_writer = add_reader  # type: ignore[assignment]


def _refuse(what: str) -> NoReturn:
    """Raise ConfigurationError: nothing outside the loop can be waited for."""
    raise ConfigurationError(f"cannot wait for {what} in virtual time; run this code on the wall clock")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time, and return its result.

    :raises DeadlockError: all tasks wait and no timer is scheduled, or a task runs a busy loop.
    :raises ConfigurationError: a task waits for a socket, a thread or a process.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
