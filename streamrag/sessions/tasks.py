"""The tasks of a session, which end with it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from streamrag.errors import BackendError, DeadlineExceededError, PipelineClosedError
from streamrag.sessions.ingestion import CLOSED
from streamrag.support.tasks import cancel_and_wait, end_or_leave

T = TypeVar("T")


class SessionTasks:
    """The running tasks of the session `name`. Each runs foreign code in an inner task, which can be left behind."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def start(
        self, work: Callable[[], Coroutine[Any, Any, T]], what: str, deadline_s: float | None = None
    ) -> "asyncio.Task[T]":
        """Return a new task that runs `work` and returns its result. `what` names the task in errors.

        The task raises DeadlineExceededError after `deadline_s` seconds, PipelineClosedError when the session is
        closed, and BackendError if `work` ends with a CancelledError although the task was not stopped.
        """
        task = asyncio.create_task(self._run(work, what, deadline_s), name=f"streamrag {what} of {self._name}")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their end; these, and any started later, raise PipelineClosedError."""
        self._is_closed = True
        try:
            await asyncio.sleep(0)  # a task must have started to raise the right error
        finally:
            await cancel_and_wait(list(self._tasks))

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller raises it, unless it has left

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]], what: str, deadline_s: float | None) -> T:
        """Return the result of `work` from an inner task, or raise its error or as `start` says. Stop the inner task in
        any case; leave one behind that does not stop."""
        self._check_open(what)
        task = asyncio.create_task(work(), name=f"streamrag work on a {what}")
        try:
            await asyncio.wait([task], timeout=deadline_s)
        except asyncio.CancelledError:
            self._check_open(what)
            raise
        finally:
            is_late = not task.done()
            await end_or_leave(task, f"a {what} of {self._name} that was stopped")
        if is_late:
            raise DeadlineExceededError(f"the {what}'s deadline of {deadline_s:g} s passed")
        if task.cancelled():
            raise BackendError(f"a {what} of {self._name} failed: a CancelledError, although it was not stopped")
        return task.result()

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise PipelineClosedError(f"the {what} was stopped before its end: {CLOSED}") from None
