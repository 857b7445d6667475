"""A worker's handler that does whatever a test asks for."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from streamrag.sources.workers.worker_main import OUT_OF_MEMORY, Handler


def make(*, fault: str = "", folder: str = "") -> Handler:
    """`folder` is where the test can see what the worker is doing."""
    if fault == "raises":
        raise LookupError("no such handler part")
    if fault == "dies":
        print("the last thing it said", file=sys.stderr, flush=True)
        os._exit(3)
    if fault == "hangs":
        Path(folder, f"starting-{os.getpid()}").touch()
        time.sleep(1000)
    if fault == "dies once":
        marker = Path(folder, "died")
        if not marker.exists():
            marker.touch()
            os._exit(3)
    return _Handler() if fault == "wears out" else handle


class _Handler:
    """Is worn after any job that says so, even if it fails."""

    def __init__(self) -> None:
        self._is_worn = False

    def __call__(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        self._is_worn = header.get("is_hard", False)
        return handle(header, body)

    def is_worn(self) -> bool:
        return self._is_worn


def handle(header: dict[str, Any], body: bytes) -> dict[str, Any]:
    if path := header.get("touch"):
        Path(path).touch()
    match header["do"]:
        case "echo":
            return {"header": header, "num_bytes": len(body), "pid": os.getpid()}
        case "raise":
            raise ZeroDivisionError("as asked")
        case "die":
            print("I was told to die", file=sys.stderr, flush=True)
            os._exit(7)
        case "wait":
            while not Path(header["until"]).exists():
                time.sleep(0.01)
            return {"pid": os.getpid()}
        case "hold the interpreter":
            ctypes.PyDLL(None).sleep(1000)
        case "compute":
            signal.setitimer(signal.ITIMER_PROF, 0.1)
            while True:
                pass
        case "take memory":
            os._exit(OUT_OF_MEMORY)
        case "print":
            print("{}" * 1000, flush=True)
            return {"pid": os.getpid()}
        case "answer nonsense":
            return {"object": object()}
        case "answer much":
            return {"text": "x" * header["num_chars"]}
        case "leave a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(header["pid_file"]).write_text(str(child.pid))
            return {"child": child.pid}
    raise AssertionError(header)
