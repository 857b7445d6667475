"""A pool of worker processes for work that would block the event loop: parsing pages, embedding, searching.

Each worker does one job at a time. If a job exceeds its time or its caller is cancelled, its worker is killed and
replaced, without an effect on other jobs. `FairQueue` schedules jobs by the worker time that each query, and within a
query each host, has used.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import anyio

from streamrag.errors import WorkerError
from streamrag.sources.workers.fair_queue import FairQueue
from streamrag.sources.workers.fair_queue import Share as Share
from streamrag.sources.workers.worker_main import OUT_OF_MEMORY
from streamrag.sources.workers.worker_process import CANCEL_GRACE_S, WorkerProcess
from streamrag.sources.workers.worker_process import WorkerJobError as WorkerJobError
from streamrag.sources.workers.worker_process import WorkerStartError as WorkerStartError
from streamrag.sources.workers.worker_process import WorkerTimeoutError as WorkerTimeoutError
from streamrag.support.tasks import wait_shielded

T = TypeVar("T")

_Slot: TypeAlias = asyncio.Task[WorkerProcess]
"""A place for a worker: the task that starts it."""

_LIMITS = {-signal.SIGPROF: "computing time", OUT_OF_MEMORY: "memory"}  # what a worker exceeded, by its exit code


class WorkerLimitError(WorkerError):
    """A job exceeded its handler's limit of CPU time or memory, which ended its worker."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: a job took more {what} than it may, and its worker was replaced")
        self.what = what  # "computing time" or "memory"


def _started(slot: _Slot) -> WorkerProcess | None:
    """Return the worker of a slot; None if it is starting or failed to."""
    return None if not slot.done() or slot.cancelled() or slot.exception() else slot.result()


class WorkerPool:
    """A fixed number of worker processes, which are replaced when they die.

    handler: `"module:name"` of a callable that takes `options` as keywords and returns a `worker_main.Handler`.
    env: additional environment variables of the processes.
    """

    def __init__(
        self,
        handler: str,
        options: Mapping[str, Any],
        *,
        size: int,
        name: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert size >= 1
        self.size = size
        self.name = name
        self._first_frame = {"handler": handler, "options": dict(options)}
        self._env = dict(env or {})
        self._slots: set[_Slot] = set()
        self._free: FairQueue[_Slot] = FairQueue(size)
        self.num_busy = 0  # number of jobs that hold a worker, or wait for it to start
        self._tasks: set[asyncio.Task[Any]] = set()  # running jobs and ending workers
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def process_ids(self) -> list[int]:
        """Process ids of all workers that have started."""
        return [worker.process.pid for slot in self._slots if (worker := _started(slot))]

    async def start(self) -> None:
        """Start all workers and wait until they are ready.

        :raises WorkerStartError: creating the handler failed.
        :raises WorkerError: a worker died before it was ready, or the pool was closed meanwhile.
        """
        assert not self._is_open, f"{self.name} is started already"
        self._is_open = True
        self._free = FairQueue(self.size)
        slots = [self._new_slot() for _ in range(self.size)]
        for slot in slots:
            self._free.put(slot)
        try:
            done, _ = await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
            if not self._is_open:
                raise self._closed()
            for slot in done:
                slot.result()
        except BaseException:
            await self.aclose()
            raise

    async def run(
        self,
        header: Mapping[str, Any],
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        share: Share | None = None,
        part: str = "",
    ) -> dict[str, Any]:
        """Have a worker do a job, and return its answer. If cancelled, the job has a moment to end before it is killed.

        timeout_s: seconds for the job, without the time until a worker is free.
        share: the share of the job's query.
        part: the job's part of the query, such as a host.

        :raises WorkerJobError: the job raised an exception.
        :raises WorkerTimeoutError: the job took longer than `timeout_s`.
        :raises WorkerLimitError: the job exceeded its handler's limits.
        :raises WorkerError: the worker died, or the pool was closed.
        """
        share = share or Share()
        slot, worker = await self._take(share, part)
        job = self._spawn(self._work(slot, worker, share, part, partial(worker.ask, header, body), timeout_s), "job")
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                try:
                    await asyncio.wait([job], timeout=CANCEL_GRACE_S)
                finally:  # also if cancelled again meanwhile
                    job.cancel()
                await asyncio.wait([job])
            raise

    async def aclose(self) -> None:
        """Stop all workers, killing busy ones. Does nothing if not started."""
        if self._is_open:
            self._is_open = False
            self._free.close()
            self._closing = asyncio.create_task(self._end_all(), name=f"{self.name} close")
        if self._closing:
            await wait_shielded([self._closing])

    async def _end_all(self) -> None:
        """Kill busy workers, let idle ones end, and wait for all of them and their jobs."""
        slots, self._slots = self._slots, set()
        for slot in slots:
            if (worker := _started(slot)) and not worker.is_idle:
                worker.kill()
            slot.cancel()
        await asyncio.wait(slots)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(worker.end(CANCEL_GRACE_S) for slot in slots if (worker := _started(slot))))

    def _spawn(self, work: Coroutine[Any, Any, T], what: str) -> "asyncio.Task[T]":
        """Return a new task for `work`; closing the pool waits for its end."""
        task = asyncio.create_task(work, name=f"{self.name} {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _new_slot(self) -> _Slot:
        """Add and return a slot, whose worker starts in the background."""
        starting = WorkerProcess.start(self._first_frame, env=self._env, name=self.name)
        slot = asyncio.create_task(starting, name=f"{self.name} start")
        self._slots.add(slot)
        return slot

    async def _take(self, share: Share, part: str) -> tuple[_Slot, WorkerProcess]:
        """Return a free slot and its worker at the job's turn; replace a dead one. Raise if that fails or if closed."""
        slot = await self._free.get(share, part) if self._is_open else None
        if slot is None:
            raise self._closed()
        self.num_busy += 1
        if slot.done() and not ((worker := _started(slot)) and worker.is_usable):
            slot = self._replace(slot)
        try:
            await asyncio.wait([slot])
        except asyncio.CancelledError:
            self._give_back(slot, share, part)
            raise
        if self._is_open and (worker := _started(slot)):
            return slot, worker
        self._give_back(slot, share, part)
        raise self._closed() if not self._is_open else slot.exception() or self._closed()

    def _give_back(self, slot: _Slot, share: Share, part: str) -> None:
        self.num_busy -= 1
        self._free.give_back(slot, share, part)

    def _replace(self, slot: _Slot) -> _Slot:
        """Return a new slot; the old one's worker is killed, and waited for in the background."""
        self._slots.discard(slot)
        if worker := _started(slot):
            worker.kill()
            self._spawn(worker.end(), "end")
        return self._new_slot()

    async def _work(
        self,
        slot: _Slot,
        worker: WorkerProcess,
        share: Share,
        part: str,
        ask: Callable[[], Awaitable[dict[str, Any]]],
        timeout_s: float | None,
    ) -> dict[str, Any]:
        """Return the answer of `ask`, or translate its error; at the end free the slot, with a new worker if needed.

        A job that exceeds a limit marks its share as stopped.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await ask()
        except TimeoutError:
            share.was_stopped = True
            raise WorkerTimeoutError(f"{self.name} took longer than {timeout_s:g} s and was replaced") from None
        except WorkerJobError:
            raise
        except WorkerError:
            if not self._is_open:
                raise self._closed() from None
            if what := _LIMITS.get(worker.process.returncode or 0):
                share.was_stopped = True
                raise WorkerLimitError(self.name, what) from None
            raise
        finally:
            if self._is_open and not worker.is_usable:
                slot = self._replace(slot)
            self._give_back(slot, share, part)

    def _closed(self) -> WorkerError:
        return WorkerError(f"{self.name} is closed")
