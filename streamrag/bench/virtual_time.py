# mypy: disable-error-code="override"
# What is refused takes any arguments.
"""An asyncio event loop on which waiting takes no time: when nothing is ready, the clock jumps to the next timer.

    run_virtual(main())        # loop.time() starts at 0; asyncio.sleep(3600) returns at once, an hour later

The code that runs on it is the code that runs on the wall clock. Two runs do the same in the same order. A wait for the
real world (sockets, threads, processes) is refused, because in virtual time it would never end.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from streamrag.errors import ConfigurationError

T = TypeVar("T")

MOST_TURNS_AT_ONE_TIME = 200_000
"""Turns of the loop without any passing of time, after which some task certainly spins."""


class DeadlockError(RuntimeError):
    """All tasks wait, and no timer will wake any: a fault of the program."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop with a clock of its own. `is_virtual` tells which kind of time this is."""

    is_virtual = True

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._num_turns = 0
        self._selector = self  # what asyncio asks what to wait for, and how long

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Called by asyncio once a turn; None when there is neither anything ready nor a timer."""
        if timeout is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise DeadlockError(f"at {self._now_s:.6f} s of virtual time all tasks wait for each other: {waiting}")
        if timeout > 0:
            self._now_s += timeout
            self._num_turns = 0
        self._num_turns += 1
        if self._num_turns > MOST_TURNS_AT_ONE_TIME:
            self._num_turns = 0  # what is cancelled now may still clean up
            raise DeadlockError(f"virtual time stands still at {self._now_s:.6f} s: some task spins without waiting")
        return []

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing: a loop in virtual time waits for no files or sockets."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):  # type: ignore[attr-defined]
            _refuse("another thread")
        return self.call_soon(callback, *args, **kwargs)  # Ctrl-C comes this way

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
    raise ConfigurationError(f"nothing can wait for {what} in virtual time; run this on the wall clock")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time.

    :raises DeadlockError: all tasks wait and there is no timer, or time stands still.
    :raises ConfigurationError: something waits for the real world.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
