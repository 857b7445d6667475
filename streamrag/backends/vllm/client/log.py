"""A file of what the processes of a vLLM engine print, in which the reason of a failure is found.

vLLM says "Engine core initialization failed. See root cause above" to the process that started the engine, and prints
the cause in another. Some causes no logger sees: a library that is missing, the last words of a crash.
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
# Processes print at the same time: a line that does not begin with a name alone is another's, in between.
EXCEPTION = re.compile(r"^[\w.]+(:.*)?$(\n(?!Process |During handling|The above exception).+){0,4}", re.MULTILINE)

SCRIPT = Path(__file__).with_name("spawned_python.sh")

MAX_REASON_CHARS = 1000
NUM_LAST_LINES = 5


class EngineLog:
    """A file that takes the warnings of vLLM in this process, and all that processes print which it redirects."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        self.path = path or folder / "vllm.log"
        self.path.write_bytes(b"")
        self._handler = logging.FileHandler(self.path, encoding="utf-8", errors="replace")
        self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger("vllm").addHandler(self._handler)

    def close(self) -> None:
        logging.getLogger("vllm").removeHandler(self._handler)
        self._handler.close()

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Processes that multiprocessing spawns inside print to the file, and end with the thread that started them.

        So do those that they spawn themselves. The interpreter is replaced by a script that does this and becomes it;
        vLLM binds processes to NUMA nodes in the same way. Where the script may not run, they print to the terminal,
        and end when vLLM ends them. What the script is told it finds in the environment.
        """
        python = os.fsdecode(multiprocessing.spawn.get_executable())
        told = {
            "STREAMRAG_SPAWN_PYTHON": python,
            "STREAMRAG_SPAWN_LOG": str(self.path.absolute()),
            "STREAMRAG_SPAWN_PARENT": str(os.getpid()),
        }
        os.environ.update(told)
        if os.access(SCRIPT, os.X_OK):
            multiprocessing.spawn.set_executable(str(SCRIPT))
        try:
            yield
        finally:
            multiprocessing.spawn.set_executable(python)
            for name in told:
                os.environ.pop(name, None)

    def fatal_error(self) -> str | None:
        """The exception that ended a process, the first one if it ended others too; None if none is logged."""
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
    """The last exception of the last traceback; the ones before it led to it."""
    _, traceback, last = text.rpartition(TRACEBACK)
    found = EXCEPTION.search(last) if traceback else None
    return found.group()[:MAX_REASON_CHARS] if found else None
