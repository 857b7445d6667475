"""A runner of cells in parallel: each cell runs in its own process, which writes the result to a file."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.errors import StreamRagError
from streamrag.support.parent_death import end_with_parent
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.store import CellStore, cell_key

MIN_GAP_S = 0.1  # minimum seconds between two progress reports of a cell
PATIENCE_S = 10.0
"""Seconds for an interrupted cell to shut down, before it is killed; a real engine has to stop its own processes."""
PARENT = "STREAMRAG_PARENT"


@dataclass(frozen=True, slots=True)
class CellStarted:
    """The cell's process has been started."""

    settings: CellSettings


@dataclass(frozen=True, slots=True)
class CellProgressed:
    """A report that `num_done` of the cell's `num_total` requests have been answered."""

    settings: CellSettings
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True)
class CellFinished:
    """The cell's result has been written."""

    settings: CellSettings


@dataclass(frozen=True, slots=True)
class CellFailed:
    """The cell failed without a result."""

    settings: CellSettings
    error: str
    log: Path
    """File with the output of the cell's process, including the traceback."""


CellEvent: TypeAlias = CellStarted | CellProgressed | CellFinished | CellFailed


def run_cell(settings: CellSettings, **options: Any) -> CellResult:
    """Run one cell in this process, in virtual or wall time, with these options, and return its result."""
    if settings.clock == "virtual":
        from streamrag_bench import simulate as clock  # imports vLLM: seconds
    else:
        from streamrag_bench import wall as clock  # type: ignore[no-redef]
    return clock.run_cell(settings, **options)


def run_cells(
    cells: Sequence[CellSettings], store: CellStore, *, num_processes: int, keep_steps: bool = False
) -> Generator[CellEvent, None, None]:
    """Run all cells, also those in the store already, at most `num_processes` at a time, and yield their events.

    Each process stores its result. A failed cell does not stop the others. Closing the generator ends all processes.
    """
    todo = list(reversed(cells))
    running: list[_Running] = []
    try:
        while todo or running:
            while todo and len(running) < num_processes:
                started = _start(todo.pop(), store, keep_steps)
                running.append(started)
                yield CellStarted(started.settings)
            ready = set(wait([end for each in running for end in (each.connection, each.process.sentinel)]))
            for each in [each for each in running if ready & {each.connection, each.process.sentinel}]:
                event = each.read()
                if not isinstance(event, CellProgressed):
                    running.remove(each)
                    each.close()
                yield event
    finally:
        _stop(running)


@dataclass(frozen=True, slots=True)
class _Running:
    """A cell's process that has been started, with the parent's end of its pipe, and its log."""

    settings: CellSettings
    process: ForkServerProcess | SpawnProcess
    connection: Connection
    log: Path

    def read(self) -> CellEvent:
        """Return the next event in the pipe; if there is none, wait for the process's end, and return `CellFailed`."""
        with suppress(EOFError):
            if self.connection.poll():
                event: CellEvent = self.connection.recv()
                return event
        self.process.join()
        return CellFailed(self.settings, f"its process died ({_cause(self.process.exitcode)})", self.log)

    def close(self) -> None:
        """Wait for the process's end, and free its pipe."""
        self.process.join()
        self.connection.close()
        self.process.close()


def _cause(exitcode: int | None) -> str:
    """Describe why a process died, by its exit code."""
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}; out of memory?"
    return f"exit status {exitcode}"


def _start(settings: CellSettings, store: CellStore, keep_steps: bool) -> _Running:
    """Start the cell's process, with SIGINT blocked until it is ready, and return it with our end of its pipe.

    The process opens and removes its log, of which only the path is returned.
    """
    logs = store.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{cell_key(settings)}.log"
    context = _context(settings.clock)
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(settings, store.folder, keep_steps, log, theirs))
    # The process inherits the mask, and unblocks SIGINT when it is ready to handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[PARENT] = str(os.getpid())  # for the fork server, which the first simulated cell starts
    try:
        process.start()
    finally:
        del os.environ[PARENT]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # so that the pipe ends with the process
    return _Running(settings, process, ours, log)


def _context(clock: str) -> ForkServerContext | SpawnContext:
    """Return the start method: spawn for wall time, else a fork server that has imported vLLM, which takes seconds."""
    if clock == "wall":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["streamrag_bench.cell_worker_main"])
    return context


def _stop(running: Sequence[_Running]) -> None:
    """Interrupt the processes and their children, wait `PATIENCE_S` in total, kill the rest, and close them all."""
    for each in running:
        _signal(each.process, signal.SIGINT)
    until_s = time.monotonic() + PATIENCE_S
    try:
        for each in running:
            each.process.join(max(until_s - time.monotonic(), 0.0))
    finally:  # also when a second Ctrl-C ends the wait
        for each in running:
            _signal(each.process, signal.SIGKILL)
            each.close()


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal to the process and its children, or to the process alone before it has a group; not if ended."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        if process.is_alive():  # before its call of setpgid
            os.kill(process.pid, number)


def _work(settings: CellSettings, folder: Path, keep_steps: bool, log: Path, connection: Connection) -> None:
    """Run one cell as the main function of its process, write its result to the store, and send `CellFinished`.

    An error is sent as `CellFailed`; Ctrl-C exits with status 130. Output goes to `log`, which is removed on success.
    The process has its own group, so that Ctrl-C in the terminal reaches it only through the parent.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.pid if settings.clock == "wall" else None)  # None: with the fork server
    os.setpgid(0, 0)
    with log.open("w") as written:  # an engine's log would break the progress bar
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        result = run_cell(settings, keep_steps=keep_steps, progress=_Reporter(settings, connection))
        CellStore(folder).write(result)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        while isinstance(error, ExceptionGroup):  # report the first failed task
            error = error.exceptions[0]
        text = str(error) if isinstance(error, StreamRagError) else f"{type(error).__name__}: {error}"
        connection.send(CellFailed(settings, text, log))
        return
    log.unlink()
    connection.send(CellFinished(settings))


class _Reporter:
    """A `CellProgress` that sends the progress to the parent, at most once per `MIN_GAP_S`."""

    def __init__(self, settings: CellSettings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._last_s = -MIN_GAP_S

    def __call__(self, num_done: int, num_total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= MIN_GAP_S or num_done == num_total:
            self._last_s = now_s
            self._connection.send(CellProgressed(self._settings, num_done, num_total))
