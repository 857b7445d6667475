"""The number of KV blocks that host memory has room for.

The scheduler and the workers compute it independently and must agree, so it depends on the machine's total memory, not
on the free memory. A worker that can allocate less reports that.
"""

import os
from pathlib import Path

HOST_SHARE = 0.25  # default share of the host's memory for all workers together
MOST_TIMES_DEVICE = 6
"""Most host memory by default, in multiples of the device's KV cache: few programs have more concurrent streams."""
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_host_blocks(host_kv_bytes: int | None, block_bytes: int, num_device_blocks: int, num_workers: int) -> int:
    """Return how many blocks fit into `host_kv_bytes`, or by default a worker's share, at most 6 times the device's."""
    if host_kv_bytes is not None:
        return host_kv_bytes // block_bytes
    num_bytes = int(HOST_SHARE * host_bytes()) // num_workers
    return min(num_bytes // block_bytes, MOST_TIMES_DEVICE * num_device_blocks)


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container that this process runs in."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit for path in CGROUP_LIMITS if (limit := _read(path)))])


def _read(path: Path) -> int | None:
    """Return the bytes in a file of a cgroup's limit; None if there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such group, or its limit is "max"
        return None
