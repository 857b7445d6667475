"""Moves this process's memory into huge pages, which Linux gives to programs that ask, or to all if set to "always"."""

import ctypes
import time
from pathlib import Path

MADV_COLLAPSE = 25  # madvise(2); since Linux 6.1
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def collapse_memory(within_s: float = 5.0) -> int:
    """Move this process's own memory into huge pages, and return their number. Meant for a thread.

    It is for Python's objects, which lie in small pages even where malloc asks for huge ones. Between two tokens, a
    model on the same CPU drives them and the page tables out of the caches. Memory that is allocated later stays as it
    is. Returns 0 where the kernel has no huge pages or cannot move into them, and where they are set to "never".

    within_s: seconds after which the rest stays as it is. A GiB takes about three.
    """
    try:
        if "[never]" in (SETTINGS / "enabled").read_text():
            return 0
        size = int((SETTINGS / "hpage_pmd_size").read_text())
        mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return 0
    madvise, num_pages, deadline_s = ctypes.CDLL(None).madvise, 0, time.monotonic() + within_s
    for addresses, access, _, _, inode, *_ in mappings:
        if access != "rw-p" or inode != "0":  # shared, or of a file
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-start // size) * size, end - size + 1, size):
            if time.monotonic() > deadline_s:
                return num_pages
            num_pages += madvise(ctypes.c_void_p(page), ctypes.c_size_t(size), MADV_COLLAPSE) == 0
    return num_pages
