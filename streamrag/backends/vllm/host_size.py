"""The number of KV blocks that host memory has room for.

Scheduler and workers reckon it each for themselves and must agree, so that it follows from what the machine has, not
from what happens to be free. Where there is less when it is taken, a worker takes less and says so.
"""

import os
from pathlib import Path

HOST_SHARE = 0.25
"""Share of the host's memory that all workers take together, where nobody says."""
MOST_TIMES_DEVICE = 6
"""Most host memory, in KV caches of the device: few have more streams than that at one time."""
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_host_blocks(host_kv_bytes: int | None, block_bytes: int, num_device_blocks: int, num_workers: int) -> int:
    """Return the blocks of one worker; `host_kv_bytes` as given by the user, None for a share of this machine."""
    if host_kv_bytes is not None:
        return host_kv_bytes // block_bytes
    num_bytes = int(HOST_SHARE * host_bytes()) // num_workers
    return min(num_bytes // block_bytes, MOST_TIMES_DEVICE * num_device_blocks)


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container that this process is in."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit for path in CGROUP_LIMITS if (limit := _read(path)))])


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such group, or it says "max"
        return None
