"""Memory limits of a worker process, on Linux; elsewhere there is no limit."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def data_bytes() -> int | None:
    """Return the memory of this process as Linux counts it for RLIMIT_DATA, or None elsewhere."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData:"))


def limit_memory(num_more_bytes: int) -> None:
    """Make allocations fail when this process takes `num_more_bytes` more memory than now."""
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
