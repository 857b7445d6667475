"""Engines in processes that a server forks, which imports vLLM once for all tests that a process runs.

They start in a quarter of the time. Only for tests: the threads of workers are not bound to cores. How an engine starts
for users is tested in `test_start`, and by the programs that tests start.
"""

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.context import SpawnProcess
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from multiprocessing.popen_forkserver import Popen as ForkedPopen
from multiprocessing.popen_spawn_posix import Popen as SpawnedPopen
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest

from streamrag.backends.vllm.client import processes

EXECUTOR = "tests.backends.vllm.forking_executor"

make_config = processes.make_config


def fork_engines(patch: pytest.MonkeyPatch) -> None:
    """Have the engines that this process starts forked, and their workers from them, until `patch` is undone."""
    set_forkserver_preload([EXECUTOR, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    patch.setattr(processes, "make_config", make_forking_config)
    patch.setattr(SpawnProcess, "_Popen", staticmethod(start))


def spawn_engines(patch: pytest.MonkeyPatch) -> None:
    """Undo `fork_engines`, until `patch` is undone."""
    patch.setattr(processes, "make_config", make_config)
    patch.setattr(SpawnProcess, "_Popen", staticmethod(SpawnedPopen))


def make_forking_config(model: str, engine_args: Mapping[str, Any]) -> Any:
    return make_config(model, {"distributed_executor_backend": f"{EXECUTOR}.ForkingExecutor", **engine_args})


def start(process: Any) -> Any:
    """Start a process, as `SpawnProcess._Popen` does, but fork it if it is an engine's.

    The server does not get the temporary folder of the engine with which it starts: simulated cells are forked from it
    too, when that folder is gone.
    """
    if not process.name.startswith("EngineCore"):
        return SpawnedPopen(process)
    with mock.patch.dict(os.environ):
        for name in ("TMPDIR", "VLLM_RPC_BASE_PATH"):
            os.environ.pop(name, None)
        ensure_running()
    process._target = InThisPlace(process._target)
    return ForkedPopen(process)


class InThisPlace:
    """What an engine's process runs, with the environment of the process that makes this, and not longer than it."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self._environment = dict(os.environ)

    def __call__(self, **kwargs: Any) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        tempfile.tempdir = None  # found anew, from TMPDIR
        with open(os.environ["STREAMRAG_SPAWN_LOG"], "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=end_after, args=(parent,), daemon=True).start()
        self._run(**kwargs)


def end_after(parent: BaseProcess) -> None:
    """End this process after the one that asked for it. `watch_parent` would watch the server, which forked it."""
    parent.join()
    os._exit(1)
