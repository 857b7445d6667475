"""Engines whose program is killed, or which are killed themselves. Linux's /proc says what is left."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio, sys
from streamrag.backends.vllm import VllmBackend

async def main() -> None:
    backend = VllmBackend(sys.argv[1], strategy=sys.argv[2], engine_args={"dtype": "float32"}, kv_cache_bytes=1 << 26)
    try:
        await backend.start(lambda line: None)
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        await backend.aclose()

if __name__ == "__main__":
    asyncio.run(main())
"""
SPAWNED = re.compile("--multiprocessing-fork|^VLLM::")
PAUSE_S = 0.05
"""Between two looks at all processes, which take the time that these need to get on."""

pytestmark = pytest.mark.engine


class Running:
    """A program with an engine, and all that it starts."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._psutil = importlib.import_module("psutil")  # vLLM needs it
        self.family: list[Any] = []

    def spawned(self) -> list[Any]:
        """The processes of the engine so far, its first one first."""
        self.family = self._psutil.Process(self.process.pid).children(recursive=True)
        commands = {each.pid: command(each) for each in self.family}
        # What has its parent's command is a fork that will become another program, such as `lscpu`.
        return [
            each
            for each in self.family
            if SPAWNED.search(commands[each.pid]) and commands[each.pid] != commands.get(parent(each))
        ]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Return what `condition` returns, once that is true. Only pytest's timeout ends a wait here."""
        while not (met := condition()):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(PAUSE_S)
        return met

    def all_ended(self) -> None:
        """Wait until all that were there when `spawned` was called last have ended."""
        while any(self._is_alive(each) for each in self.family):
            time.sleep(PAUSE_S)

    def _is_alive(self, process: Any) -> bool:
        try:
            return bool(process.is_running() and process.status() != self._psutil.STATUS_ZOMBIE)
        except self._psutil.NoSuchProcess:
            return False


def parent(process: Any) -> int | None:
    psutil = importlib.import_module("psutil")
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def command(process: Any) -> str:
    psutil = importlib.import_module("psutil")
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def shared_memory(processes: list[Any]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped."""
    maps = (Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
    return {Path(name) for text in maps for name in re.findall(r"/dev/shm/\S+", text)}


@contextmanager
def running(arguments: list[str], temporary: Path) -> Iterator[Running]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        program = Running(process)
        try:
            yield program
        finally:
            process.kill()
            process.communicate()
    program.all_ended()


@pytest.fixture
def program(tmp_path: Path, tiny_model: Path) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return [str(tmp_path / "program.py"), str(tiny_model)]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of the programs. Its name is short: paths of sockets may have 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def engine_folders(temporary: Path) -> list[str]:
    return [path.name for path in temporary.glob("streamrag-vllm-*")]


def test_a_killed_program_takes_its_engine_with_it_and_the_next_one_cleans_up(
    program: list[str], temporary: Path
) -> None:
    with running([*program, "warming"], temporary) as first:
        assert first.process.stdout
        assert first.process.stdout.readline() == "ready\n"
        spawned = first.spawned()
        assert len(spawned) == 2, "an engine core and a worker"
        shared = shared_memory(spawned)
        assert shared
        first.process.kill()
        first.process.communicate()
        first.all_ended()
        assert not any(path.exists() for path in shared)
    (left,) = engine_folders(temporary)

    with running([*program, "streaming"], temporary) as second:
        second.until(second.spawned)  # only just forked: nothing of vLLM is imported yet
        assert left not in engine_folders(temporary)
        assert len(engine_folders(temporary)) == 1
        second.process.kill()
        second.process.communicate()
        second.all_ended()


@pytest.mark.long
def test_an_engine_core_that_is_killed_while_it_starts_takes_its_worker_with_it(
    program: list[str], temporary: Path
) -> None:
    with running([*program, "streaming"], temporary) as started:
        core, worker = started.until(lambda: (found := started.spawned())[1:] and found)
        assert worker.ppid() == core.pid
        core.kill()
        _, written = started.process.communicate()
        assert "BackendError" in written
        started.all_ended()
    assert engine_folders(temporary) == []


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_the_command_line_closes_its_engine_on_a_signal(
    tiny_model: Path, temporary: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, which are all written when an engine starts
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        ask = ["-m", "streamrag", "ask", "Why?", "--url", url, "--allow-private", "--model", str(tiny_model)]
        with running(ask, temporary) as asking:
            assert asking.process.stderr
            lines = []
            while not lines or not lines[-1].startswith("ready in"):
                lines.append(asking.process.stderr.readline())
                assert lines[-1], lines
            asking.spawned()
            asking.process.send_signal(number)
            _, written = asking.process.communicate()
            asking.all_ended()
    assert asking.process.returncode == 143
    assert written.endswith("streamrag: stopped\n")
    assert "Traceback" not in written
    assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor")] == []
