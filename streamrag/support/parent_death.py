"""Processes that end when their parent ends, for whatever reason."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # prctl(2)
POLL_S = 0.5


def end_with_parent(parent: int | None) -> None:
    """Have the Linux kernel kill this process when its parent ends; exit now if `parent` has ended already.

    Elsewhere, only the check of `parent` is done. The setting survives `exec` and works while C code holds the GIL, but
    child processes do not inherit it. To the kernel, the parent is the *thread* that started this process.

    parent: the id of the parent process, or None if unknown.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def watch_parent(parent: int) -> None:
    """Start a thread that ends this process, without cleaning up, within a second after the process `parent` ended.

    Works where `end_with_parent` cannot: the thread that started this process may end before the process does, and the
    system need not be Linux. C code that never gives up the GIL stops the thread.
    """

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=poll, name="watch parent", daemon=True).start()
