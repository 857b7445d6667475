"""Whether KV can go to host memory here: tried once per machine, in a process that may die of it.

On an H200, the first copies of KV ended every engine (bench/studies/gpu/README.md). So on CUDA an engine starts with
host memory only where a trial of the same copies has succeeded.
"""

import asyncio
import hashlib
import importlib
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.client.arguments import KV_TRANSFER
from streamrag.backends.vllm.version import DISTRIBUTIONS
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import open_regular, parse_json
from streamrag.support.files import cache_folder, write_atomic
from streamrag.support.tasks import run_shielded
from streamrag.support.versions import __version__, installed_versions

log = logging.getLogger("streamrag.vllm")

WORKER = Path(__file__).parents[1] / "worker"
CODE = """\
from streamrag.support.parent_death import end_with_parent
end_with_parent({parent})
from streamrag.backends.vllm.worker import host_probe
host_probe.main({ready!r})
"""
READY = "ready to copy"
START_LIMIT_S = 120.0  # importing PyTorch and vLLM can take a minute
WORK_LIMIT_S = 5.0
KILL_LIMIT_S = 5.0
OTHERS_FAULTS = (2, -signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that say nothing about copies: no memory left on the device, or killed from outside."""


class CopyTrial(NamedTuple):
    """The outcome of a trial. `is_final` is whether another trial here would have the same."""

    why_not: str | None
    is_final: bool = True


async def without_faulty_host_memory(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's arguments; without host memory for KV, and with a warning, where its copies fail."""
    transfer = engine_args.get("kv_transfer_config")
    name = transfer.get("kv_connector") if isinstance(transfer, Mapping) else getattr(transfer, "kv_connector", None)
    verdict = await try_host_memory() if name == KV_TRANSFER["kv_connector"] else None
    if verdict is None or verdict.why_not is None:
        return dict(engine_args)
    log.warning(
        "Host memory for KV is not used, because a trial of its copies failed: %s. Evicted KV is recomputed, with the "
        "same answers. `streamrag doctor` tries again; eviction='recompute' leaves out trial and warning",
        verdict.why_not,
    )
    config = engine_args.get("additional_config") or {}
    others = {name: value for name, value in engine_args.items() if name != "kv_transfer_config"}
    return others | {"additional_config": {**config, KEY: {**config.get(KEY, {}), "eviction": "recompute"}}}


async def try_host_memory(*, anew: bool = False) -> CopyTrial | None:
    """Return the verdict on copies between the CUDA device and host memory, unless `anew` the one that was kept.

    None on a CPU, where nothing can fail. If cancelled, the trial's process is ended. Import vLLM before.
    """
    facts = await anyio.to_thread.run_sync(_cuda_facts)
    if facts is None:
        return None
    if not anew and (kept := await anyio.to_thread.run_sync(_read, facts)):
        return kept
    verdict = await _run_probe()
    if verdict.is_final:
        await anyio.to_thread.run_sync(_write, facts, verdict)
    return verdict


def _cuda_facts() -> dict[str, str] | None:
    """Return what a verdict depends on; None on a CPU. Ask NVML, since CUDA must not be initialised in this process."""
    current = importlib.import_module("vllm.platforms").current_platform
    if not current.is_cuda_alike():
        return None
    code = b"".join((WORKER / name).read_bytes() for name in ("device_copies.py", "host_copier.py", "host_probe.py"))
    facts = {
        **installed_versions(*DISTRIBUTIONS, "torch"),
        "streamrag": f"{__version__} {hashlib.sha256(code).hexdigest()[:16]}",
        "kernel": platform.release(),
        "allocator": " ".join(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF", "") for kind in ("", "CUDA_")),
    }
    with suppress(Exception):  # no NVML, or no device: then no verdict is kept
        nvml = importlib.import_module("vllm.utils.import_utils").import_pynvml()
        nvml.nvmlInit()
        try:
            facts |= {"driver": str(nvml.nvmlSystemGetDriverVersion()), "device": current.get_device_name()}
        finally:
            nvml.nvmlShutdown()
    return facts


def _file(facts: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "host-memory" / f"{digest}.json"


def _read(facts: Mapping[str, str]) -> CopyTrial | None:
    """Return the verdict that was kept for these facts; None without one, or if its file is damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, RuntimeError), open_regular(_file(facts)) as file:
        kept = parse_json(file.read())
        if kept["facts"] == facts and isinstance(kept["why_not"], str | None):
            return CopyTrial(kept["why_not"])
    return None


def _write(facts: Mapping[str, str], verdict: CopyTrial) -> None:
    """Keep a verdict, if the device is known and the file can be written."""
    with suppress(OSError, ConfigurationError, RuntimeError):
        if "device" in facts:
            _file(facts).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(_file(facts), json.dumps({"facts": facts, "why_not": verdict.why_not}, indent=1) + "\n")


async def _run_probe() -> CopyTrial:
    """Run `worker.host_probe` within its limits. At the end, or if cancelled, its process has ended."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", CODE.format(parent=os.getpid(), ready=READY)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # it does not receive Ctrl-C, and can be killed with its children
        )
    except OSError as error:
        return CopyTrial(f"its process did not start: {error}", is_final=False)
    assert process.stdout
    is_ready, text = False, b""
    try:
        async with asyncio.timeout(START_LIMIT_S) as limit:
            while block := await process.stdout.read(1 << 16):
                text += block
                if not is_ready and READY.encode() in text:
                    is_ready = True
                    limit.reschedule(asyncio.get_running_loop().time() + WORK_LIMIT_S)
                text = text[-2000:]
            code = await process.wait()
    except TimeoutError:
        limit_s, what = (WORK_LIMIT_S, "its copies did not end") if is_ready else (START_LIMIT_S, "it did not begin")
        return CopyTrial(f"{what} within {limit_s:g} s", is_ready)
    finally:
        await run_shielded(_end(process, process.stdout), "trial of host memory ends")
    if is_ready and code == 0:
        return CopyTrial(None)
    last = (text.decode(errors="replace").strip().splitlines() or [f"its process ended with status {code}"])[-1]
    why_not = f"its process was ended by signal {-code}, {signal.strsignal(-code)}" if code < 0 else last
    return CopyTrial(why_not, is_ready and code not in OTHERS_FAULTS)


async def _end(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
    """Kill a process that has not ended, and wait for its end, but not longer than for one that hangs in the driver."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_LIMIT_S):
                while await stdout.read(1 << 16):  # in Python 3.11, wait() waits for the end of every pipe, too
                    pass
                await process.wait()
