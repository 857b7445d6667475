"""The parent's side of a worker process: start it, send it jobs, and end it with all of its child processes."""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from streamrag.errors import WorkerError
from streamrag.sources.workers import worker_main
from streamrag.sources.workers.worker_main import LENGTHS, WORN
from streamrag.support.tasks import wait_shielded

CANCEL_GRACE_S = 0.5
"""Seconds that a process or job may take to end before it is killed. Most jobs are shorter than starting a worker."""

START_TIMEOUT_S = 300.0  # importing PyTorch on a busy machine can take a minute
MAX_ANSWER_BYTES = 1 << 26
NUM_STDERR_LINES = 20


class WorkerJobError(WorkerError):
    """A job raised an exception in its worker, which stays usable."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind  # name of the exception's class in the worker
        self.message = message


class WorkerStartError(WorkerJobError):
    """A handler that could not be created."""


class WorkerTimeoutError(WorkerError):
    """A job exceeded its timeout, and its worker was killed."""


class WorkerProcess:
    """A worker process, as its parent sees it. It does one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.name = name
        self.is_idle = True
        """Whether no job is running. After an interrupted job it stays false, and the worker can only be killed."""
        self._is_worn = False
        self._last_lines: deque[str] = deque(maxlen=NUM_STDERR_LINES)
        self._stderr = asyncio.create_task(self._keep_last_lines(process.stderr), name=f"{name} stderr")
        self._gone: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, first_frame: Mapping[str, Any], *, env: Mapping[str, str], name: str) -> "WorkerProcess":
        """Start a process, and wait until it has created the handler that `first_frame` names.

        :raises WorkerStartError: creating the handler failed.
        :raises WorkerError: the process died, or was not ready in time.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", worker_main.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,  # its children can be killed with it, and it does not receive Ctrl-C
        )
        worker = cls(process, name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.ask({**first_frame, "sys_path": sys.path, "parent": os.getpid()})
        except WorkerJobError as error:
            await worker.end(CANCEL_GRACE_S)
            raise WorkerStartError(error.kind, error.message + worker.last_words) from None
        except TimeoutError:
            await worker.end()
            raise WorkerTimeoutError(f"{name} was not ready after {START_TIMEOUT_S:g} s{worker.last_words}") from None
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def is_usable(self) -> bool:
        """Whether the worker can take a job."""
        return self.is_idle and not self._is_worn and self.process.returncode is None

    @property
    def last_words(self) -> str:
        """The last lines that the worker printed, for a message."""
        return "; it printed last:\n" + "\n".join(self._last_lines) if self._last_lines else ""

    async def _keep_last_lines(self, stderr: asyncio.StreamReader) -> None:
        while block := await stderr.read(1 << 16):
            self._last_lines.extend(line[:500] for line in block.decode(errors="replace").splitlines())

    async def ask(self, header: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        """Send a job and return its answer. Concurrent calls are not allowed.

        :raises WorkerJobError: the job raised an exception.
        :raises WorkerError: the process died or broke the protocol, and was ended.
        """
        assert self.is_idle
        encoded = json.dumps(header).encode()
        self.is_idle = False
        try:
            self._stdin.write(LENGTHS.pack(len(encoded), len(body)) + encoded)
            self._stdin.write(body)
            await self._stdin.drain()
            answer_bytes, _ = LENGTHS.unpack(await self._stdout.readexactly(LENGTHS.size))
            if answer_bytes > MAX_ANSWER_BYTES:
                raise ValueError(f"it answers {answer_bytes} bytes")
            answer: dict[str, Any] = json.loads(await self._stdout.readexactly(answer_bytes))
        except ValueError as error:
            await self.end()
            raise WorkerError(f"{self.name} (process {self.process.pid}) broke the protocol: {error}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.end(CANCEL_GRACE_S)
            died = f"{self.name} (process {self.process.pid}) died with exit code {self.process.returncode}"
            raise WorkerError(died + self.last_words) from error
        self.is_idle = True
        self._is_worn = bool(answer.pop(WORN, False))
        if "error" in answer:
            raise WorkerJobError(answer["error"], answer["message"])
        return answer

    def kill(self) -> None:
        """Kill the process and its children without waiting for their end."""
        if self.process.returncode is None:  # otherwise the process id may be reused
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, grace_s: float = 0) -> None:
        """Close the process's input, kill the process after `grace_s`, and wait for its end and that of its children.

        Must not be called during `ask`. Cancellation shortens the grace period only.
        """
        self._stdin.close()
        self._gone = self._gone or asyncio.create_task(self._wait_until_gone(), name=f"{self.name} end")
        try:
            await asyncio.wait([self._gone], timeout=grace_s if self.process.returncode is None else CANCEL_GRACE_S)
        finally:
            if not self._gone.done():  # the process, or a child that holds its pipes, is alive
                self._kill_group()
            await wait_shielded([self._gone])

    async def _wait_until_gone(self) -> None:
        """Wait until the process has ended, and its pipes are closed by its children too."""
        with suppress(OSError):
            await self._stdout.read()  # in Python 3.11, wait() waits for the end of every pipe, too
        await asyncio.wait([self._stderr])
        await self.process.wait()
        with suppress(OSError):
            await self._stdin.wait_closed()
