"""A file of what the processes of a vLLM engine print, which is searched for the reason of a failure.

vLLM reports "Engine core initialization failed. See root cause above" to the process that started the engine, and
prints the cause in another process. Some causes reach no logger: a missing library, the output of a crash.
"""

import logging
import multiprocessing.spawn
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FATAL = re.compile(r"^.*(failed to start\.|fatal error\.|WorkerProc failed\.).*\n(?=Traceback)", re.MULTILINE)
OF_THIS_PROCESS = re.compile(r"^(WARNING|ERROR|CRITICAL) vllm[\w.]*: ", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):\n"
# Processes print concurrently: a line that does not begin with an exception's name is from another process.
EXCEPTION = re.compile(r"^[\w.]+(:.*)?$(\n(?!Process |During handling|The above exception).+){0,4}", re.MULTILINE)

SCRIPT = Path(__file__).with_name("spawned_python.sh")

MAX_REASON_CHARS = 1000
NUM_LAST_LINES = 5


class EngineLog:
    """A file for the vLLM warnings of this process, and for the output of redirected processes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "vllm.log"
        self.path.write_bytes(b"")
        self._handler = logging.FileHandler(self.path, encoding="utf-8", errors="replace")
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger("vllm").addHandler(self._handler)

    def close(self) -> None:
        logging.getLogger("vllm").removeHandler(self._handler)
        self._handler.close()

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Redirect processes that multiprocessing spawns inside to the file, and end them with the spawning thread.

        What they spawn is redirected too, and ends with the process that spawned it. A script replaces the interpreter,
        redirects the output and becomes the interpreter, as vLLM does to bind processes to NUMA nodes. Its arguments
        are in the environment. Where the script may not be executed, processes print to the terminal, and end when vLLM
        ends them.
        """
        python = os.fsdecode(multiprocessing.spawn.get_executable())
        environment = {
            "STREAMRAG_SPAWN_PYTHON": python,
            "STREAMRAG_SPAWN_LOG": str(self.path.absolute()),
            "STREAMRAG_SPAWN_PARENT": str(os.getpid()),
            "STREAMRAG_SPAWN_IS_FIRST": "1",  # for what this process spawns, but not for what that spawns
        }
        os.environ.update(environment)
        if os.access(SCRIPT, os.X_OK):
            multiprocessing.spawn.set_executable(str(SCRIPT))
        try:
            yield
        finally:
            multiprocessing.spawn.set_executable(python)
            for name in environment:
                os.environ.pop(name, None)

    def fatal_error(self) -> str | None:
        """Return the text of the first exception that ended a process; None if none is logged."""
        text = self._text()
        if not (fatal := FATAL.search(text)):
            return None
        following = text[fatal.end() :]
        ends = [end.start() for pattern in (FATAL, OF_THIS_PROCESS) if (end := pattern.search(following))]
        return last_exception(following[: min(ends, default=None)])

    def last_lines(self) -> str:
        lines = [line for line in self._text().splitlines() if line.strip()]
        return "\n".join(lines[-NUM_LAST_LINES:])[-MAX_REASON_CHARS:]

    def _text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")


def last_exception(text: str) -> str | None:
    """Return the last exception of the last traceback, to which the earlier ones led."""
    _, traceback, last = text.rpartition(TRACEBACK)
    exception = EXCEPTION.search(last) if traceback else None
    return exception.group()[:MAX_REASON_CHARS] if exception else None
