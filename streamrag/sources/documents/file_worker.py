"""A worker process that reads files which were not fetched but given, and so may take longer."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from streamrag.errors import WorkerError
from streamrag.sources.documents.reader import Content, Read, ReadingLimits, UnreadableError, crawl4ai_env, read
from streamrag.sources.workers.limits import job_limits
from streamrag.sources.workers.pool import WorkerJobError, WorkerLimitError, WorkerPool
from streamrag.support.temp_dirs import ScratchFolder, remove_left_behind

MAX_BYTES = 1 << 30  # of memory
LIMITS = ReadingLimits(max_cpu_s=120, max_chars=5_000_000, max_elements=500_000, max_pdf_pages=2000)
SCRATCH = "read"


@contextmanager
def file_worker() -> Iterator[Read]:
    """Yield a function that reads a file in a worker process, which runs from the first file to the end of the block.

    The function blocks the thread. It raises UnreadableError if the file is unreadable, exceeds a limit or ends the
    worker.
    """
    with ExitStack() as stack:

        @cache
        def start() -> Callable[[str, bytes], dict[str, Any]]:
            remove_left_behind(SCRATCH)
            scratch = ScratchFolder(SCRATCH)
            stack.callback(scratch.remove)
            env = crawl4ai_env(scratch.path)
            options = {"limits": LIMITS, "max_bytes": MAX_BYTES}
            pool = WorkerPool(f"{__name__}:FileReader", options, size=1, name="file reading worker", env=env)
            runner = stack.enter_context(asyncio.Runner())
            runner.run(pool.start())
            stack.callback(lambda: runner.run(pool.aclose()))
            return lambda kind, body: runner.run(pool.run({"kind": kind}, body))

        def read_file(body: bytes, kind: str) -> Content:
            ask = start()
            try:
                return Content(**ask(kind, body))
            except WorkerLimitError as error:
                limit = f"{MAX_BYTES >> 20} MiB" if error.what == "memory" else f"{LIMITS.max_cpu_s:g} s"
                raise UnreadableError(f"reading it takes more {error.what} than {limit}") from error
            except WorkerJobError as error:
                raise UnreadableError(error.message) from error
            except WorkerError as error:
                raise UnreadableError("the process that read it died") from error

        yield read_file


@dataclass
class FileReader:
    """A handler of the jobs of `file_worker`."""

    limits: list[Any]
    max_bytes: int

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        limits = ReadingLimits(*self.limits)
        charset = "" if job["kind"] == "html" else "utf-8"  # text was checked to be that, unless it has a mark
        with job_limits(limits.max_cpu_s, self.max_bytes):
            return {**asdict(read(body, job["kind"], limits, charset=charset)), "links": {}, "forwards": []}
