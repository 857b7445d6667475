"""Facts about an engine: the model, the device, the limits of the configuration, and the size of host memory for KV."""

import importlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from vllm.config import VllmConfig


DTYPE_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Instruction sets that compute in a dtype, named as in `torch.cpu.get_capabilities`; the last of each are ARM's."""


ModelRunner: TypeAlias = Literal["V1", "V2"]
"""vLLM's two programs that run a model's steps. vLLM chooses by its environment, by Triton and by what V2 lacks."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about one engine. Quantities that its ranks divide among themselves are per rank."""

    model: str  # name without the parent folders
    dtype: str
    is_cuda: bool
    device: str  # CUDA's name of the device; for a CPU the number and kind of its cores
    num_cores: int
    tensor_parallel_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_dtype_bytes: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    model_runner: ModelRunner

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * self.kv_dtype_bytes


def num_allowed_cores() -> int:
    """Return the number of logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_capabilities() -> Mapping[str, Any]:
    """Return torch's CPU capabilities by name, with whether this CPU has them; empty without torch."""
    try:
        return dict(importlib.import_module("torch").cpu.get_capabilities())
    except ImportError:
        return {}


def emulated_dtypes(capabilities: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dtypes for which the CPU lacks instructions: it is several times slower than with float32."""
    known = {dtype: {capabilities.get(name) for name in names} for dtype, names in DTYPE_INSTRUCTIONS.items()}
    return tuple(dtype for dtype, found in known.items() if False in found and True not in found)


def describe_model_runner() -> str:
    """Describe which model runner vLLM chooses here, and why. Imports part of vLLM, which takes seconds."""
    is_v2 = importlib.import_module("vllm.envs").VLLM_USE_V2_MODEL_RUNNER
    if is_v2 is not None:
        return f"V{1 + is_v2}, by VLLM_USE_V2_MODEL_RUNNER"
    if importlib.import_module("vllm.triton_utils").HAS_TRITON:
        return "V2, but V1 with answer_ahead=True, whose drafts V2 does not take"
    return "V1, because vLLM has no Triton for this device"


def engine_facts(config: "VllmConfig") -> EngineFacts:
    """Return the facts about an engine of this configuration here. All layers must have standard attention."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import get_kv_cache_torch_dtype

    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    kv_dtype = get_kv_cache_torch_dtype(config.cache_config.cache_dtype, model.dtype)
    is_cpu = current_platform.is_cpu()
    num_cores = num_allowed_cores()
    cores = f"CPU, {num_cores} cores ({platform.machine()})"
    return EngineFacts(
        model=Path(model.model).name if Path(model.model).is_dir() else model.model,
        dtype=str(model.dtype).removeprefix("torch."),
        is_cuda=not is_cpu,
        device=cores if is_cpu else current_platform.get_device_name(),
        num_cores=num_cores,
        tensor_parallel_size=parallel.tensor_parallel_size,
        num_layers=model.get_num_layers(parallel),
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_dtype_bytes=kv_dtype.itemsize,
        block_size=config.cache_config.block_size,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        model_runner="V2" if config.use_v2_model_runner else "V1",
    )


HOST_SHARE = 0.25  # default share of the host's memory for all workers together
MOST_TIMES_DEVICE = 6
"""Most host memory by default, in multiples of the device's KV cache: few programs have more concurrent streams."""
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_host_blocks(host_kv_bytes: int | None, block_bytes: int, num_device_blocks: int, num_workers: int) -> int:
    """Return how many blocks fit into `host_kv_bytes`, or by default a worker's share, at most 6 times the device's.

    The scheduler and the workers compute it independently and must agree, so it depends on the machine's total memory,
    not on the free memory. A worker that can allocate less reports that.
    """
    if host_kv_bytes is not None:
        return host_kv_bytes // block_bytes
    num_bytes = int(HOST_SHARE * host_bytes()) // num_workers
    return min(num_bytes // block_bytes, MOST_TIMES_DEVICE * num_device_blocks)


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container that this process runs in."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit for path in CGROUP_LIMITS if (limit := _read(path)))])


def _read(path: Path) -> int | None:
    """Return the bytes in a file of a cgroup's limit; None if there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no such group, or its limit is "max"
        return None
