"""No engine starts with host memory for KV where a trial of its copies fails, however it fails."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.client import host_memory, processes
from streamrag.backends.vllm.client.arguments import kv_transfer_config, scheduler_args
from streamrag.backends.vllm.client.host_memory import CopyTrial, try_host_memory, without_faulty_host_memory
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.errors import ConfigurationError

vllm = pytest.importorskip("vllm")

FACTS = {"vllm": "0.32.0", "driver": "580.159.04", "device": "NVIDIA H200"}
READY = "print({ready!r}, flush=True)\n"
RIGHT = READY
CODE = host_memory.CODE

Probe = Callable[[str], None]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probe:
    """Have the trial's process run this code, on a machine with a GPU and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_memory, "_cuda_facts", lambda: FACTS)
    return lambda code: monkeypatch.setattr(host_memory, "CODE", code)


def kept_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "streamrag" / "host-memory").glob("*"))


@pytest.mark.long
@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_the_real_trial_succeeds_with_tensors_of_a_cpu(probe: Probe, tmp_path: Path) -> None:
    assert "main({ready!r})" in CODE
    probe(CODE.replace("main({ready!r})", "main({ready!r}, 'cpu')"))
    assert await try_host_memory() == CopyTrial(None)
    (kept,) = kept_files(tmp_path)
    assert json.loads(kept.read_text()) == {"facts": FACTS, "why_not": None}


@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize(
    ("code", "why_not", "is_kept"),
    [
        (READY + "import os; os.kill(os.getpid(), 11)", "ended by signal 11, Segmentation fault", True),
        (READY + "import os; os.abort()", "ended by signal 6, Aborted", True),
        (READY + "print('RuntimeError: CUDA error: resource already mapped'); raise SystemExit(1)", "mapped", True),
        (READY + "raise ValueError('wrong bytes')", "ValueError: wrong bytes", True),
        (READY + "raise SystemExit(3)", "ready to copy", True),
        (READY + "print('OutOfMemoryError: none left'); raise SystemExit(2)", "none left", False),
        (READY + "import os; os.kill(os.getpid(), 9)", "ended by signal 9, Killed", False),
        ("raise ImportError('no libcuda')", "ImportError: no libcuda", False),
        ("pass", "status 0", False),
        (READY.replace("{ready!r}", "'x' * 1_000_000") + "raise SystemExit(1)", "x", False),
    ],
)
async def test_a_trial_that_fails_says_why_and_is_repeated_only_if_it_may_succeed(
    probe: Probe, tmp_path: Path, code: str, why_not: str, is_kept: bool
) -> None:
    probe(code)
    verdict = await try_host_memory()
    assert verdict is not None
    assert verdict.why_not is not None
    assert why_not in verdict.why_not
    assert len(kept_files(tmp_path)) == is_kept
    probe(RIGHT)
    again = await try_host_memory()
    assert again == (verdict if is_kept else CopyTrial(None))
    assert await try_host_memory(anew=True) == CopyTrial(None)
    assert await try_host_memory() == CopyTrial(None)


@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize("ignores", ["", "import os; os.close(1); os.close(2)\n"], ids=["silent", "closes its output"])
@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_trial_that_hangs_is_ended_at_its_limit(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ignores: str, is_ready: bool
) -> None:
    monkeypatch.setattr(host_memory, "WORK_LIMIT_S", 0.2)
    monkeypatch.setattr(host_memory, "START_LIMIT_S", 60.0 if is_ready else 0.2)
    probe((READY if is_ready else "") + ignores + "import signal; signal.pause()")
    why_not = "its copies did not end within 0.2 s" if is_ready else "it did not begin within 0.2 s"
    assert await try_host_memory() == CopyTrial(why_not, is_final=is_ready)
    assert len(kept_files(tmp_path)) == is_ready


@pytest.mark.usefixtures("nothing_is_left_behind")
@pytest.mark.parametrize("beginning", ["", READY], ids=["while it starts", "while it copies"])
async def test_cancelling_the_start_ends_the_process(probe: Probe, tmp_path: Path, beginning: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    probe(beginning + f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); signal.pause()")
    trial = asyncio.create_task(try_host_memory())
    pid = int(await asyncio.to_thread(pipe.read_text))
    os.kill(pid, 0)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert kept_files(tmp_path) == []


@pytest.mark.usefixtures("nothing_is_left_behind")
async def test_a_trial_cancelled_at_any_await_leaves_no_process(probe: Probe) -> None:
    probe(READY + "import signal; signal.pause()")
    num_turns = 0
    while num_turns < 40:  # from the first await to the wait for the process
        trial = asyncio.create_task(try_host_memory())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        num_turns += 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{}",
        b'{"facts": 1, "why_not": null}',
        b'{"facts": FACTS, "why_not": 3}',
        b"[" * 100_000,
    ],
)
async def test_a_damaged_file_is_as_none(probe: Probe, tmp_path: Path, content: bytes) -> None:
    probe(RIGHT)
    await try_host_memory()
    (kept,) = kept_files(tmp_path)
    kept.write_bytes(content.replace(b"FACTS", json.dumps(FACTS).encode()))
    probe(READY + "raise ValueError('tried again')")
    verdict = await try_host_memory()
    assert verdict == CopyTrial("ValueError: tried again")
    assert json.loads(kept.read_text())["why_not"] == "ValueError: tried again"


@pytest.mark.parametrize("kind", ["a file for the folder", "a folder for the file", "a pipe for the file", "no home"])
async def test_a_cache_that_cannot_be_written_or_read_is_no_error(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = host_memory._file(FACTS)
    if kind == "a file for the folder":
        (tmp_path / "cache").write_text("")
    elif kind == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        path.parent.mkdir(parents=True)
        path.mkdir() if kind == "a folder for the file" else os.mkfifo(path)
        monkeypatch.setattr(host_memory, "write_atomic", refuse_to_write)
    probe(RIGHT)
    assert await try_host_memory() == CopyTrial(None)
    assert await try_host_memory() == CopyTrial(None)


def refuse_to_write(path: Path, content: str) -> None:
    raise ConfigurationError(f"{path} cannot be written: Read-only file system")


@pytest.mark.parametrize("name", ["vllm", "driver", "device"])
async def test_another_driver_device_or_version_is_tried_anew(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    probe(READY + "raise ValueError('old')")
    await try_host_memory()
    monkeypatch.setattr(host_memory, "_cuda_facts", lambda: FACTS | {name: "new"})
    probe(RIGHT)
    assert await try_host_memory() == CopyTrial(None)
    monkeypatch.setattr(host_memory, "_cuda_facts", lambda: FACTS)
    assert await try_host_memory() == CopyTrial("ValueError: old")


def test_the_facts_are_asked_of_nvml_and_without_it_no_verdict_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert host_memory._cuda_facts() is None  # on a CPU
    calls: list[str] = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: "580.159.04",
    )
    platform = SimpleNamespace(is_cuda_alike=lambda: True, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr("vllm.utils.import_utils.import_pynvml", lambda: nvml)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    facts = host_memory._cuda_facts()
    assert facts is not None
    assert calls == ["init", "shutdown"]
    assert (facts["driver"], facts["device"]) == ("580.159.04", "NVIDIA H200")
    assert {"torch", "streamrag", "kernel", "allocator"} < facts.keys()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: 1 / 0)
    without = host_memory._cuda_facts()
    assert without is not None
    assert "device" not in without
    host_memory._write(without, CopyTrial(None))
    assert kept_files(tmp_path) == []


@pytest.mark.parametrize("transfer", [lambda given: given, lambda given: kv_transfer_config()], ids=["dict", "object"])
async def test_a_failure_turns_host_memory_off_with_a_warning_even_if_it_was_asked_for(
    probe: Probe, caplog: pytest.LogCaptureFixture, transfer: Callable[[Any], Any]
) -> None:
    swap = SchedulerOptions(eviction="swap")
    args = scheduler_args("streaming", swap, {"additional_config": {"mine": 1}}, host_kv_bytes=9)
    args["kv_transfer_config"] = transfer(args["kv_transfer_config"])
    probe(READY + "raise ValueError('wrong bytes')")
    with caplog.at_level(logging.WARNING, "streamrag.vllm"):
        found = await without_faulty_host_memory({"seed": 3, **args})
    assert "kv_transfer_config" not in found
    assert (found["seed"], found["scheduler_cls"]) == (3, args["scheduler_cls"])
    options = args["additional_config"][KEY] | {"eviction": "recompute"}
    assert found["additional_config"] == {"mine": 1, KEY: options}
    assert args["additional_config"][KEY]["eviction"] == "swap"
    (warning,) = caplog.messages
    assert "wrong bytes. Evicted KV is recomputed, with the same answers. `streamrag doctor` tries again" in warning


async def test_without_host_memory_or_where_its_copies_work_nothing_changes(
    probe: Probe, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    probe(READY + "raise ValueError('not to be run')")
    for args in (
        {},
        scheduler_args("warming", SchedulerOptions(), {}),
        {"kv_transfer_config": {"kv_connector": "Nixl"}},
    ):
        assert await without_faulty_host_memory(args) == args
    assert await without_faulty_host_memory(scheduler_args("streaming", SchedulerOptions(eviction="recompute"), {}))
    assert kept_files(tmp_path) == []
    probe(RIGHT)
    args = scheduler_args("streaming", SchedulerOptions(), {})
    assert await without_faulty_host_memory(args) == args
    assert caplog.messages == []


async def test_every_engine_starts_with_what_the_trial_left(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    given: dict[str, Any] = {}

    def refuse(model: str, engine_args: dict[str, Any]) -> None:
        given.update(engine_args)
        raise ConfigurationError("far enough")

    probe(READY + "raise ValueError('wrong bytes')")
    monkeypatch.setattr(processes, "make_config", refuse)
    engine = processes.EngineProcesses(tiny_model)
    with pytest.raises(ConfigurationError, match="far enough"):
        await engine.start(scheduler_args("streaming", SchedulerOptions(), {}))
    await engine.aclose()
    assert given["additional_config"][KEY]["eviction"] == "recompute"
    assert "kv_transfer_config" not in given


async def test_the_process_ends_with_a_program_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begin, _ = CODE.split("from streamrag.backends")
    code = (
        begin + f"import signal; file = open({str(pipe)!r}, 'w'); print('begun', file=file, flush=True); signal.pause()"
    )
    program = f"import asyncio\nfrom streamrag.backends.vllm.client import host_memory\nhost_memory.CODE = {code!r}\n"
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program + "asyncio.run(host_memory._run_probe())",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with await asyncio.to_thread(pipe.open) as lines:
        assert await asyncio.to_thread(lines.readline) == "begun\n"
        parent.kill()
        await parent.wait()
        assert await asyncio.to_thread(lines.read) == ""  # the end of the last process that could write
