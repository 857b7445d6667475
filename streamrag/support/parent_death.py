"""Processes that end with the one that started them, whatever ends that one."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def end_with_parent(parent: int | None, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process as soon as its parent is gone; at once, if `parent` is gone already.

    Another `signal_number` is for a process that then ends others, and itself.

    `parent` is the process that started this one, None where that is not known. It holds across `exec`, and while C
    code holds the interpreter; children of this process have to do the same. To the kernel the parent is the *thread*
    that started this process. Does nothing but look at `parent` where the kernel is not Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
