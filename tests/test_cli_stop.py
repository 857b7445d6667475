"""The program when it is stopped: by Ctrl-C, by a signal, by its terminal, by force, and while it imports."""

import fcntl
import importlib
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrag.cli.output import Output
from streamrag.cli.progress import StepLines

PROGRAM = [sys.executable, "-c", "from streamrag.cli import main; raise SystemExit(main())"]
MANY = ["bench", "simulate", "--workload", "crawler", "--qps", "4", "--seeds", "1", "--processes", "2"]
PAUSE_S = 0.05
"""Between two looks at all processes, which take the time that these need to get on."""

pytestmark = pytest.mark.usefixtures("default_signals")


class Running:
    """A program, and all that it starts."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._psutil = importlib.import_module("psutil")
        self.family: set[Any] = set()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` is met. Only pytest's timeout ends a wait here: machines may be slow."""
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(PAUSE_S)

    def remember(self) -> set[Any]:
        """All processes below the program, ever."""
        self.family |= set(self._psutil.Process(self.process.pid).children(recursive=True))
        return self.family

    def stop(self, number: signal.Signals) -> str:
        """What the program had printed to stderr, when it is gone and everything with it."""
        self.remember()
        self.process.send_signal(number)
        _, written = self.process.communicate()
        while any(self._is_alive(each) for each in self.family):
            time.sleep(PAUSE_S)
        return written or ""

    def _is_alive(self, process: Any) -> bool:
        try:
            return bool(process.is_running() and process.status() != self._psutil.STATUS_ZOMBIE)
        except self._psutil.NoSuchProcess:
            return False


@contextmanager
def running(*command: str, temporary: Path, **options: Any) -> Iterator[Running]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen([*PROGRAM, *command], env=environment, text=True, **options) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


@pytest.fixture
def silent_site() -> Iterator[str]:
    """The address of a site that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The programs' temporary folder."""
    (tmp_path / "t").mkdir()
    return tmp_path / "t"


def record(site: str, tmp_path: Path) -> list[str]:
    return ["record", "Why?", "--url", site, "--allow-private", "--output", str(tmp_path / "trace.jsonl")]


def workers_are_ready(program: Running) -> Callable[[], bool]:
    return lambda: sum("worker_main" in " ".join(each.cmdline()) for each in program.remember()) == 2


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_crawl_stopped_by_any_signal_leaves_no_process(
    tmp_path: Path, temporary: Path, silent_site: str, number: signal.Signals, status: int
) -> None:
    with running(*record(silent_site, tmp_path), temporary=temporary) as program:
        program.until(workers_are_ready(program))
        written = program.stop(number)
    assert program.process.returncode == status
    if number != signal.SIGKILL:
        assert written.endswith("streamrag: stopped\n")
        assert "Traceback" not in written
        assert os.listdir(temporary) == []


def test_the_next_crawl_removes_what_a_killed_one_left(tmp_path: Path, temporary: Path, silent_site: str) -> None:
    with running(*record(silent_site, tmp_path), temporary=temporary) as program:
        program.until(workers_are_ready(program))
        program.stop(signal.SIGKILL)
    (left,) = os.listdir(temporary)
    with running(*record(silent_site, tmp_path), temporary=temporary) as program:
        program.until(lambda: left not in os.listdir(temporary))
        program.stop(signal.SIGTERM)
    assert os.listdir(temporary) == []


def test_a_terminal_that_is_closed_stops_the_program(tmp_path: Path, temporary: Path, silent_site: str) -> None:
    ours, theirs = pty.openpty()
    with running(
        *record(silent_site, tmp_path),
        temporary=temporary,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as program:
        os.close(theirs)
        program.until(workers_are_ready(program))
        program.remember()
        os.close(ours)
        program.process.wait()
    assert program.process.returncode == 129
    assert os.listdir(temporary) == []


def test_a_signal_stops_a_background_job_that_ignores_ctrl_c(tmp_path: Path, temporary: Path, silent_site: str) -> None:
    with running(
        *record(silent_site, tmp_path),
        temporary=temporary,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as program:
        program.until(workers_are_ready(program))
        program.process.send_signal(signal.SIGINT)
        written = program.stop(signal.SIGTERM)
    assert program.process.returncode == 143
    assert written.endswith("streamrag: stopped\n")
    assert os.listdir(temporary) == []


def test_a_program_started_with_nohup_does_not_end_with_the_terminal(
    tmp_path: Path, temporary: Path, silent_site: str
) -> None:
    with running(
        *record(silent_site, tmp_path),
        temporary=temporary,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as program:
        program.until(workers_are_ready(program))
        program.process.send_signal(signal.SIGHUP)
        assert program.stop(signal.SIGTERM).endswith("streamrag: stopped\n")
    assert program.process.returncode == 143


def test_an_index_that_is_being_built_is_given_up_on_a_signal(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("A document about nothing in particular.")
    command = ["index", "build", str(tmp_path / "documents"), "--out", str(tmp_path / "index")]
    with running(*command, temporary=temporary) as program:
        program.until(lambda: any("worker_main" in " ".join(each.cmdline()) for each in program.remember()))
        written = program.stop(signal.SIGTERM)
    assert program.process.returncode == 143
    assert written.endswith("streamrag: stopped\n")
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "t"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_while_it_starts_leaves_no_process(
    tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    with running(*MANY, "--output", str(tmp_path / "out"), temporary=temporary) as program:
        program.until(lambda: any("forkserver" in " ".join(each.cmdline()) for each in program.remember()))
        program.stop(number)
    assert program.process.returncode in (-9, 143)


@pytest.mark.long
def test_a_benchmark_that_is_killed_takes_its_cells_with_it(tmp_path: Path, temporary: Path) -> None:
    with running(*MANY, "--output", str(tmp_path / "out"), temporary=temporary) as program:
        program.until(lambda: len(program.remember()) >= 4)  # a tracker, a server, and two cells
        program.stop(signal.SIGKILL)


IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            os.kill(os.getpid(), signal.{signal})
sys.meta_path.insert(0, Finder())
from streamrag.cli import main
main(["ask", "Why?", "--model", "none"])
"""


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_program_that_is_stopped_while_it_imports_says_so_and_no_more(number: str, status: int) -> None:
    code = IMPORTING.format(signal=number)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "streamrag: stopped\n")


NOT_ENDING = """
import threading
import streamrag.cli.program
def run(argv):
    threading.Thread(target=threading.Event().wait).start()
    raise KeyboardInterrupt("as far as it came")
streamrag.cli.program.run = run
from streamrag.cli import main
main()
"""


@pytest.mark.parametrize(("command", "status"), [(["serve", "--print-config"], 0), (["serve", "--check"], 1)])
def test_a_program_runs_exit_handlers_and_leaves_the_teardown_out(command: list[str], status: int) -> None:
    code = f"""
import atexit, sys
from streamrag.cli import run_and_exit
class Object:
    def __del__(self):
        print("torn down", flush=True)
kept = Object()
atexit.register(print, "exit handlers")
sys.argv[1:] = {command!r}
run_and_exit()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("exit handlers\n")


def test_a_stopped_program_does_not_wait_for_threads_that_never_end() -> None:
    ran = subprocess.run([sys.executable, "-c", NOT_ENDING], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (130, "streamrag: stopped. as far as it came\n")


# ------------------------------------------------------------------------------------------------ where nobody watches


def test_a_line_for_each_step_and_now_and_then_one_within_it(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 9.9, 10.0, 10.1, 15.0, 21.0])
    lines = StepLines(Output(), clock=lambda: next(times))
    for step, count in [
        ("reading", "0 of 9"),
        ("reading", "1 of 9"),
        ("reading", "2 of 9"),
        ("reading", "3 of 9"),
        ("embedding [all]", ""),
        ("embedding [all]", ""),
        ("reading", "4 of 9"),
    ]:
        lines.show(step, count)
    assert capsys.readouterr().out == "reading, 0 of 9\nreading, 3 of 9\nembedding [all]\nreading, 4 of 9\n"


def test_step_lines_are_not_printed_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    StepLines(Console(force_terminal=True)).show("reading")
    assert capsys.readouterr().out == ""


def test_a_command_whose_stderr_is_piped_says_what_it_does(tmp_path: Path, temporary: Path, silent_site: str) -> None:
    with running(*record(silent_site, tmp_path), temporary=temporary) as program:
        program.until(workers_are_ready(program))
        written = program.stop(signal.SIGTERM)
    assert "starting 2 crawl workers\n" in written
