import importlib.util
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrag.backends.vllm.client.log import EngineLog

WORKER_FAILED = """\
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
WorkerProc failed to start.
Traceback (most recent call last):
  File "/x/vllm/model_loader.py", line 7, in load
    open(name)
FileNotFoundError: weights

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/vllm/v1/executor/multiproc_executor.py", line 900, in worker_main
    worker = WorkerProc(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
safetensors._safetensors_rust.SafetensorError: Error while deserializing header
  in the second shard
"""
CORE_FAILED = """\
EngineCore failed to start.
Traceback (most recent call last):
  File "/x/vllm/v1/engine/core.py", line 1482, in run_engine_core
    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
Exception: WorkerProc initialization failed due to an exception in a background process.
Process EngineCore:
Traceback (most recent call last):
  File "/x/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
Exception: WorkerProc initialization failed due to an exception in a background process.
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EngineLog]:
    log = EngineLog(tmp_path)
    yield log
    log.close()


def test_the_exception_that_came_first_is_the_reason(log: EngineLog) -> None:
    log.path.write_text(WORKER_FAILED + CORE_FAILED)
    assert log.fatal_error() == (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header\n  in the second shard"
    )


def test_output_of_multiprocessing_is_not_part_of_the_fatal_error(log: EngineLog) -> None:
    log.path.write_text(CORE_FAILED)
    assert log.fatal_error() == (
        "Exception: WorkerProc initialization failed due to an exception in a background process."
    )


def test_lines_of_another_process_are_not_part_of_the_fatal_error(log: EngineLog) -> None:
    before, header, after = CORE_FAILED.rpartition("Traceback (most recent call last):\n")
    said = "Worker proc VllmWorker-0 died unexpectedly (exit code: 0), shutting down executor.\n"
    log.path.write_text(before + header + said + after)
    assert log.fatal_error() == (
        "Exception: WorkerProc initialization failed due to an exception in a background process."
    )


def test_lines_of_this_process_about_the_end_are_not_the_fatal_error(log: EngineLog) -> None:
    log.path.write_text(
        "EngineCore encountered a fatal error.\n"
        "Traceback (most recent call last):\n  File core.py\nRuntimeError: a cause\n"
        "ERROR vllm.v1.engine.async_llm: AsyncLLM output_handler failed.\n"
        "Traceback (most recent call last):\n  File async_llm.py\nEngineDeadError: see above\n"
    )
    assert log.fatal_error() == "RuntimeError: a cause"


@pytest.mark.parametrize("text", ["", "a warning\n", "Traceback (most recent call last):\nOSError: handled\n"])
def test_a_log_without_fatal_error_has_no_reason(log: EngineLog, text: str) -> None:
    log.path.write_text(text)
    assert log.fatal_error() is None


def test_an_endless_message_is_cut(log: EngineLog) -> None:
    log.path.write_text(f"EngineCore failed to start.\nTraceback (most recent call last):\nValueError: {'x' * 9999}\n")
    assert len(log.fatal_error() or "") == 1000
    assert len(log.last_lines()) == 1000


def test_vllms_warnings_in_this_process_are_kept_too(log: EngineLog) -> None:
    logging.getLogger("vllm.engine").warning("a setting is ignored")
    assert log.last_lines() == "WARNING vllm.engine: a setting is ignored"
    log.close()
    logging.getLogger("vllm.engine").warning("not ours any more")
    assert log.last_lines() == "WARNING vllm.engine: a setting is ignored"


def test_the_output_of_a_spawned_process_and_of_its_children_is_kept(
    log: EngineLog, capfd: pytest.CaptureFixture[str]
) -> None:
    python = multiprocessing.spawn.get_executable()
    with log.redirected():
        process = multiprocessing.get_context("spawn").Process(
            target=os.system, args=("echo from below; echo bad >&2",)
        )
        process.start()
    process.join(20)
    assert process.exitcode == 0
    assert log.last_lines() == "from below\nbad"
    assert capfd.readouterr() == ("", "")
    assert multiprocessing.spawn.get_executable() == python


def test_a_preloaded_libgomp_knows_all_cores(log: EngineLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM's workers on a CPU. What libgomp takes for the number of cores says whether its threads may spin."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    libraries = [
        *Path(torch.origin).parent.glob("lib/libgomp*"),
        *Path(torch.origin).parents[1].glob("torch.libs/libgomp*"),
    ]
    cores = sorted(os.sched_getaffinity(0))
    if not libraries or len(cores) == 1:
        pytest.skip("needs a torch with libgomp, and two cores")
    code = "import ctypes; print(ctypes.CDLL(None).omp_get_num_procs())"
    monkeypatch.setenv("LD_PRELOAD", str(libraries[0]))
    monkeypatch.setenv("GOMP_CPU_AFFINITY", " ".join(map(str, cores)))
    with log.redirected():
        process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
        process.start()
    process.join(20)
    assert log.last_lines() == str(len(cores))


class WhenItIsImported:
    """Becomes whether the new process looks for garbage while it imports what it is to run."""

    def __reduce__(self) -> Any:
        return eval, ("__import__('gc').isenabled()",)


def test_a_spawned_process_looks_for_garbage_as_soon_as_it_runs(log: EngineLog) -> None:
    code = "import gc; print(was, gc.isenabled())"
    with log.redirected():
        process = multiprocessing.get_context("spawn").Process(target=exec, args=(code, {"was": WhenItIsImported()}))
        process.start()
    process.join(20)
    assert log.last_lines() == "False True"


ENDS = """
import atexit, sys
class Last:
    def __del__(self):
        print("taken apart")
sys.last = Last()
atexit.register(print, "about to end", end="")
print("runs")
raise error
"""


@pytest.mark.parametrize(("error", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (KeyboardInterrupt(), 1)])
def test_a_spawned_process_does_what_is_to_be_done_at_its_end_and_is_not_taken_apart(
    log: EngineLog, error: BaseException, code: int
) -> None:
    with log.redirected():
        process = multiprocessing.get_context("spawn").Process(target=exec, args=(ENDS, {"error": error}))
        process.start()
    process.join(20)
    assert process.exitcode == code
    printed = log.path.read_text()
    assert printed.startswith("runs\n")
    assert printed.endswith("about to end")
    assert "taken apart" not in printed


def test_processes_start_with_the_usual_python_where_scripts_may_not_run(
    log: EngineLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with log.redirected():
        assert os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable


def sleep(config: bytes) -> None:
    time.sleep(1000)


def start_from_a_thread_that_ends(pipe: Any) -> None:
    """Spawn a process as vLLM 0.33 spawns workers, and say whether it outlives the thread."""
    more_than_a_pipe_holds = bytes(1 << 20)  # so the thread does not end before the process has started
    child = multiprocessing.get_context("spawn").Process(target=sleep, args=[more_than_a_pipe_holds])
    thread = threading.Thread(target=child.start)
    thread.start()
    thread.join()
    child.join(2)
    pipe.send((child.pid, child.is_alive()))
    time.sleep(1000)


def test_a_worker_outlives_the_thread_that_started_it_and_ends_with_its_process(log: EngineLog) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with log.redirected():
        core = context.Process(target=start_from_a_thread_that_ends, args=[theirs])
        core.start()
    pid, is_alive = ours.recv()
    core.kill()
    core.join()
    assert is_alive
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
