"""One worker process, seen from its caller: starting it, asking it, and leaving nothing of it behind."""

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
from streamrag.support.tasks import wait_regardless

CANCEL_GRACE_S = 0.5
"""How long what was told to end may take before it is killed. Most jobs are shorter than starting a worker."""

START_TIMEOUT_S = 300.0
"""Generous: importing PyTorch on a busy machine has been seen to take a minute."""

MAX_ANSWER_BYTES = 1 << 26

NUM_STDERR_LINES = 20


class WorkerJobError(WorkerError):
    """A job raised in its worker, which lives on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        """Name of the exception's class in the worker."""
        self.message = message


class WorkerStartError(WorkerJobError):
    """The handler raised while it was made."""


class WorkerTimeoutError(WorkerError):
    """A job took longer than it was given; its worker was killed."""


class WorkerProcess:
    """One process, and the pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process = process
        self.name = name
        self.is_in_step = True
        """False from sending a job until its answer has been read. A worker left so can only be killed."""
        self._is_worn = False
        self._last_lines: deque[str] = deque(maxlen=NUM_STDERR_LINES)
        self._stderr = asyncio.create_task(self._keep_last_lines(), name=f"{name} stderr")
        self._gone: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, first_frame: Mapping[str, Any], *, env: Mapping[str, str], name: str) -> "WorkerProcess":
        """A process that has made its handler. `first_frame` names it; `env` is added to the environment.

        :raises WorkerStartError: what the handler raised while it was made.
        :raises WorkerError: the process died, or was not ready in time.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", worker_main.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,  # to be killed with all that it starts; and Ctrl-C is for us
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
        return self.is_in_step and not self._is_worn and self.process.returncode is None

    @property
    def last_words(self) -> str:
        return "; it printed last:\n" + "\n".join(self._last_lines) if self._last_lines else ""

    def _pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout

    async def _keep_last_lines(self) -> None:
        assert self.process.stderr
        while block := await self.process.stderr.read(1 << 16):
            self._last_lines.extend(line[:500] for line in block.decode(errors="replace").splitlines())

    async def ask(self, header: Mapping[str, Any], body: bytes = b"") -> dict[str, Any]:
        """The answer to one job. One call at a time.

        :raises WorkerJobError: the job raised.
        :raises WorkerError: the process died or broke the protocol; nothing is left of it.
        """
        assert self.is_in_step
        stdin, stdout = self._pipes()
        encoded = json.dumps(header).encode()
        self.is_in_step = False
        try:
            stdin.write(LENGTHS.pack(len(encoded), len(body)) + encoded)
            stdin.write(body)
            await stdin.drain()
            answer_bytes, _ = LENGTHS.unpack(await stdout.readexactly(LENGTHS.size))
            if answer_bytes > MAX_ANSWER_BYTES:
                raise ValueError(f"it answers {answer_bytes} bytes")
            answer: dict[str, Any] = json.loads(await stdout.readexactly(answer_bytes))
        except ValueError as error:
            await self.end()
            raise WorkerError(f"{self.name} (process {self.process.pid}) broke the protocol: {error}") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.end(CANCEL_GRACE_S)
            died = f"{self.name} (process {self.process.pid}) died with exit code {self.process.returncode}"
            raise WorkerError(died + self.last_words) from error
        self.is_in_step = True
        self._is_worn = bool(answer.pop(WORN, False))
        if "error" in answer:
            raise WorkerJobError(answer["error"], answer["message"])
        return answer

    def kill(self) -> None:
        """Kill the process and all that it started, without waiting for them to end."""
        if self.process.returncode is None:  # from then on the number may belong to another process
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, grace_s: float = 0) -> None:
        """Close the process's input, kill it if it has not ended in `grace_s`, and wait until nothing of it is left.

        Not while `ask` waits for an answer. Cancelling cuts the grace short, and not the rest.
        """
        self._pipes()[0].close()
        self._gone = self._gone or asyncio.create_task(self._wait_until_gone(), name=f"{self.name} end")
        try:
            await asyncio.wait([self._gone], timeout=grace_s if self.process.returncode is None else CANCEL_GRACE_S)
        finally:
            if not self._gone.done():  # its group lives: if not the process, something that holds its pipes
                self._kill_group()
            await wait_regardless([self._gone])

    async def _wait_until_gone(self) -> None:
        stdin, stdout = self._pipes()
        with suppress(OSError):
            await stdout.read()  # in Python 3.11, wait() also waits for every pipe to end
        await asyncio.wait([self._stderr])
        await self.process.wait()
        with suppress(OSError):
            await stdin.wait_closed()
