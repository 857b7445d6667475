"""Processes that end when their parent ends, for whatever reason."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int | None, signal_number: int = signal.SIGKILL) -> None:
    """Have the Linux kernel send this process a signal when its parent ends; exit now if `parent` has ended already.

    Elsewhere, only the check of `parent` is done. The setting survives `exec` and works while C code holds the GIL, but
    child processes do not inherit it. To the kernel, the parent is the *thread* that started this process.

    parent: the id of the parent process, or None if unknown.
    signal_number: another signal lets the process first end its own children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
