"""The main program of a worker process, which `worker_process.WorkerProcess` runs as a script.

Both directions carry frames: two big-endian uint32 lengths, a JSON header, then raw bytes (only to the worker). Nothing
is unpickled, because workers read hostile pages: their answers are only data.
"""

import importlib
import json
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

LENGTHS = struct.Struct(">II")
MAX_MESSAGE_CHARS = 2000
OUT_OF_MEMORY = 83  # exit code for exceeding the memory limit; exceeding the CPU limit ends a worker with SIGPROF
WORN = "is_worn"  # a field that is true in a worker's last answer

Handler: TypeAlias = Callable[[dict[str, Any], bytes], dict[str, Any]]
"""A function from a job's header and body to the answer's header. Its optional method `is_worn` says after each job
whether the worker should be replaced."""


def write_frame(pipe: BinaryIO, header: dict[str, Any]) -> None:
    encoded = json.dumps(header).encode()
    pipe.write(LENGTHS.pack(len(encoded), 0) + encoded)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Return the next frame, or None if the other side has closed the pipe."""
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


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes for jobs and answers; for libraries, stdin becomes /dev/null and stdout becomes stderr."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return jobs, answers


def main() -> None:
    """Serve jobs until the pool closes standard input or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent closes the pipe
    jobs, answers = _take_over_pipes()
    first = read_frame(jobs)
    if first is None:
        return
    header = first[0]
    sys.path[:] = header["sys_path"]
    from streamrag.support.parent_death import end_with_parent, watch_parent  # needs sys.path

    watch_parent(header["parent"])  # for kernels that cannot signal its death
    end_with_parent(header["parent"])
    try:
        module, _, name = header["handler"].partition(":")
        handle: Handler = getattr(importlib.import_module(module), name)(**header["options"])
    except Exception as error:  # the parent reports it
        traceback.print_exc()
        write_frame(answers, _describe(error))
        return
    write_frame(answers, {})
    is_worn: Callable[[], bool] = getattr(handle, WORN, bool)
    while (job := read_frame(jobs)) is not None:
        try:
            answer = handle(*job)
            write_frame(answers, {**answer, WORN: True} if is_worn() else answer)
        except Exception as error:  # the job failed, but the worker is intact
            write_frame(answers, {**_describe(error), WORN: is_worn()})


if __name__ == "__main__":
    main()
