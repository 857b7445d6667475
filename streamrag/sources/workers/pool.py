"""Worker processes for what would block the event loop: parsing pages, embedding, searching.

Each worker does one job at a time. A job that overruns its time, or whose caller went away, costs its worker at most:
the worker is killed and another is started, and no other job notices.

Whose job is next goes by the time that workers have spent on each query's jobs, and within a query on each host's: see
`shares.FairQueue`.
"""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

import anyio

from streamrag.errors import WorkerError
from streamrag.sources.workers.shares import FairQueue
from streamrag.sources.workers.shares import Share as Share
from streamrag.sources.workers.worker_main import OUT_OF_MEMORY
from streamrag.sources.workers.worker_process import CANCEL_GRACE_S, WorkerProcess
from streamrag.sources.workers.worker_process import WorkerJobError as WorkerJobError
from streamrag.sources.workers.worker_process import WorkerStartError as WorkerStartError
from streamrag.sources.workers.worker_process import WorkerTimeoutError as WorkerTimeoutError
from streamrag.support.tasks import wait_regardless

T = TypeVar("T")

_Slot: TypeAlias = "asyncio.Task[WorkerProcess]"
"""The place of one worker: the task that starts it."""


_LIMITS = {-signal.SIGPROF: "computing time", OUT_OF_MEMORY: "memory"}
"""What a worker ran out of, by its exit code."""


class WorkerLimitError(WorkerError):
    """A job took more computing time or memory than its handler allows; its worker is gone."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: a job took more {what} than it may, and its worker was replaced")
        self.what = what
        """"computing time" or "memory"."""


def _started(slot: _Slot) -> WorkerProcess | None:
    return None if not slot.done() or slot.cancelled() or slot.exception() else slot.result()


class WorkerPool:
    """A fixed number of processes that answer jobs, started once and replaced when they die.

    `handler` is `"module:name"` of a callable which, given `options` as keywords, returns a `worker_main.Handler`.
    `env` is added to the environment of the processes only.
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
        # Getting a slot from the queue is the right to use it.
        self._free: FairQueue[_Slot] = FairQueue(size)
        self._num_busy = 0
        self._tasks: set[asyncio.Task[Any]] = set()  # jobs, and the ends of workers
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_busy(self) -> int:
        """Jobs that hold a worker, or wait for theirs to start."""
        return self._num_busy

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that are free or busy; not of those still starting."""
        return [worker.process.pid for slot in self._slots if (worker := _started(slot))]

    async def start(self) -> None:
        """Start all workers and wait until they are ready.

        :raises WorkerStartError: what the handler raised while it was made.
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
        """The worker's answer to one job; waits for a free worker first, which does not count towards `timeout_s`.

        `share` is that of the query which the job is for, and `part` what it is for within it, such as a host.
        Cancelling gives a job that is under way a moment to end, then kills its worker.

        :raises WorkerJobError: the job raised.
        :raises WorkerTimeoutError: the job took longer than `timeout_s`.
        :raises WorkerLimitError: the job took more than its handler allows.
        :raises WorkerError: the worker died, or the pool was closed.
        """
        share = share or Share()
        slot, worker = await self._take(share, part)
        job = self._spawn(self._work(slot, worker, share, part, header, body, timeout_s), "job")
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                try:
                    await asyncio.wait([job], timeout=CANCEL_GRACE_S)
                finally:  # cancelled once more, it is not waited for any longer
                    job.cancel()
                await asyncio.wait([job])
            raise

    async def aclose(self) -> None:
        """Stop all workers, busy ones at once. Does nothing when not started."""
        if self._is_open:
            self._is_open = False
            self._free.close()
            self._closing = asyncio.create_task(self._end_all(), name=f"{self.name} close")
        if self._closing:
            await wait_regardless([self._closing])

    async def _end_all(self) -> None:
        slots, self._slots = self._slots, set()
        for slot in slots:
            if (worker := _started(slot)) and not worker.is_in_step:
                worker.kill()
            slot.cancel()
        await asyncio.wait(slots)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(worker.end(CANCEL_GRACE_S) for slot in slots if (worker := _started(slot))))

    def _spawn(self, work: Coroutine[Any, Any, T], what: str) -> "asyncio.Task[T]":
        task = asyncio.create_task(work, name=f"{self.name} {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _new_slot(self) -> _Slot:
        starting = WorkerProcess.start(self._first_frame, env=self._env, name=self.name)
        slot = asyncio.create_task(starting, name=f"{self.name} start")
        self._slots.add(slot)
        return slot

    async def _take(self, share: Share, part: str) -> tuple[_Slot, WorkerProcess]:
        """A slot to use, its worker ready. A worker that died while it was free is nobody's error: it is replaced."""
        slot = await self._free.get(share, part) if self._is_open else None
        if slot is None:
            raise self._closed()
        self._num_busy += 1
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
        self._num_busy -= 1
        self._free.give_back(slot, share, part)

    def _replace(self, slot: _Slot) -> _Slot:
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
        header: Mapping[str, Any],
        body: bytes,
        timeout_s: float | None,
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await worker.ask(header, body)
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
