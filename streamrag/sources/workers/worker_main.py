"""The inside of a worker process: this file is run as a script by `worker_process.WorkerProcess`.

Both directions carry frames: two big-endian uint32 lengths, a JSON header, then raw bytes (sent to the worker only).
Nothing is ever unpickled: a worker reads hostile pages, and what it answers is only data.
"""

import importlib
import json
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

LENGTHS = struct.Struct(">II")

MAX_MESSAGE_CHARS = 2000

OUT_OF_MEMORY = 83
"""Exit code of a worker whose handler gives up a job that takes more memory than it may. Over its CPU time, a handler
lets itself be killed by SIGPROF."""

Handler: TypeAlias = Callable[[dict[str, Any], bytes], dict[str, Any]]
"""A function that answers one job: (header, body) to header. If it has a method `is_worn`, that says after each job,
failed or not, whether the worker should be replaced."""

WORN = "is_worn"  # name of a field that is true in a worker's last answer


def write_frame(pipe: BinaryIO, header: dict[str, Any]) -> None:
    """Write a frame that has a header and no body."""
    encoded = json.dumps(header).encode()
    pipe.write(LENGTHS.pack(len(encoded), 0) + encoded)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, or None when the other side has closed the pipe."""
    lengths = pipe.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    header, body = pipe.read(header_bytes), pipe.read(body_bytes)
    if len(header) < header_bytes or len(body) < body_bytes:
        return None
    return json.loads(header), body


def _describe(error: BaseException) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)[:MAX_MESSAGE_CHARS]}


def _end_with_parent(parent: int) -> None:
    """End when the parent is killed, which cannot end a job that never ends; for kernels that do not do it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes for jobs and answers. What libraries print or start must not disturb them."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return jobs, answers


def main() -> None:
    """Serve jobs until the pool closes our standard input, which it also does by dying."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    jobs, answers = _take_over_pipes()
    first = read_frame(jobs)
    if first is None:
        return
    header = first[0]
    threading.Thread(target=_end_with_parent, args=[header["parent"]], daemon=True).start()
    sys.path[:] = header["sys_path"]
    from streamrag.support.parent_death import end_with_parent  # it can be found only now

    end_with_parent(header["parent"])
    try:
        module, _, name = header["handler"].partition(":")
        handle: Handler = getattr(importlib.import_module(module), name)(**header["options"])
    except Exception as error:  # any reason at all not to start is for the parent to tell
        traceback.print_exc()
        write_frame(answers, _describe(error))
        return
    write_frame(answers, {})
    is_worn: Callable[[], bool] = getattr(handle, WORN, bool)
    while (job := read_frame(jobs)) is not None:
        try:
            answer = handle(*job)
            write_frame(answers, {**answer, WORN: True} if is_worn() else answer)
        except Exception as error:  # the job failed, the worker is still good
            write_frame(answers, {**_describe(error), WORN: is_worn()})


if __name__ == "__main__":
    main()
