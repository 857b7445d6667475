"""What more than one folder of tests uses."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from streamrag.testing import make_tiny_llama
from tests.backends.vllm.forked_engines import fork_engines, spawn_engines

# How long an example takes depends on what else the machine does.
settings.register_profile("streamrag", deadline=None, max_examples=40)
settings.register_profile("fuzz", deadline=None, max_examples=3_000)  # with --hypothesis-profile
settings.load_profile("streamrag")

# The threads of vLLM's CPU backend spin while they wait for each other, each bound to a core. With models as small as
# these, several take six times the CPU time of one. Read when torch is imported, here and in processes started here.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")

# Haystack tells its makers of every run otherwise. Read when it is imported.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

# Looking for garbage takes a quarter of the time in which vLLM is imported, so it waits until all tests are.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()  # what was imported stays
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some modules complain of what is left when Python ends


LONGEST = ("engine", "tests/test_vllm_releases.py", "tests/engine/test_fuzz.py", "tests/scripts/test_vllm_suite.py")
"""What `pytest -n` gives out first, longest first. xdist gives files of few tests out last, and these few take minutes:
at the end of the run, one process had the first of these files for 95 s, and the others had nothing left to do."""


class OneWithEngines(LoadScopeScheduling):
    """For `pytest -n`: one process has all files with tests that start an engine: two engines at a time would be slow,
    and take too much memory. The tests of another file stay together too: they share indexes, servers and imports."""

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.partition("::")[0]
        return "engine" if "mark.engine" in (self.config.rootpath / name).read_text() else name

    def _assign_work_unit(self, node: Any) -> None:
        first = next((scope for scope in LONGEST if scope in self.workqueue), None)
        if first:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWithEngines:
    return OneWithEngines(config, log)


@pytest.fixture(autouse=True)
def one_process_has_the_engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and request.node.get_closest_marker("engine"):
        shared = tmp_path_factory.getbasetemp().parent / "have-engines"
        shared.mkdir(exist_ok=True)
        (shared / worker).touch()
        assert [path.name for path in shared.iterdir()] == [worker]


@pytest.fixture(autouse=True, scope="session")
def engines_are_forked() -> Iterator[None]:
    """For engines that a test starts itself. Those of programs that it starts import vLLM in each process."""
    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch)
        yield


@pytest.fixture
def engines_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes `engines_are_forked`, for tests of how an engine starts for users."""
    spawn_engines(monkeypatch)


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """For tests that parse much: CPython 3.11 fails if the collector runs code meanwhile (AST recursion depth)."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Let this process, and the programs that a test starts, react to signals that stop programs.

    `nohup` has them ignore SIGHUP, the background job of a shell SIGINT, some supervisors SIGTERM, and what is ignored
    is inherited. Only for a test: the run itself shall go on when its terminal is closed.
    """
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that every test shares; nobody writes into its folder."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
async def nothing_is_left_behind() -> AsyncIterator[None]:
    """Fails the test if it leaves a task, or (as a ResourceWarning, which is an error) a process, pipe or socket."""
    before = asyncio.all_tasks()
    gc.freeze()  # to look only at what the test makes is ten times quicker
    yield
    left = {task.get_name() for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    assert left == set()
    gc.collect()
    gc.unfreeze()
