"""Limits of a worker process: memory on Linux, CPU time everywhere."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrag.sources.workers.worker_main import OUT_OF_MEMORY


def data_bytes() -> int | None:
    """Return the memory of this process as Linux counts it for RLIMIT_DATA, or None elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:"))


def limit_memory(num_more_bytes: int) -> None:
    """Make allocations fail when this process takes `num_more_bytes` more memory than now; only on Linux."""
    if num_bytes := data_bytes():
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = num_bytes + num_more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextmanager
def memory_limited(num_more_bytes: int) -> Iterator[None]:
    """Limit memory as `limit_memory` does during the block."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(num_more_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def job_limits(cpu_s: float, num_more_bytes: int) -> Iterator[None]:
    """End this process if the block takes more CPU time or memory, with an exit code that tells the pool which.

    SIGPROF ends the process, because code in C cannot be interrupted otherwise.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # an ignored signal is inherited from the parent
    limit_memory(num_more_bytes)  # relative to the memory that earlier jobs have leaked
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the process's state is unknown, so the next job gets a new worker
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
