"""Profiles without measurements, from data sheets; and the check whether a given profile fits an engine."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from streamrag.engine.costs.step_profiles import AnalyticProfile, ModelShape, StepProfile
from streamrag.errors import ConfigurationError

DEFAULT_NAME = "analytic default"


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of one device by its data sheet.

    Peaks are dense, of 16-bit products. Host bandwidths are what pinned copies reach on the link in each direction:
    about 50 GB/s on PCIe Gen5 x16, 24 on Gen4 x16.
    """

    name: str
    peak_flops: float
    bandwidth_bytes_per_s: float
    host_bandwidth_bytes_per_s: float


# The first one whose name is among the words of the device's name counts, so longer names come before shorter ones.
CUDA_DEVICES = (
    DeviceSpeed("GB200", 2_500e12, 8.0e12, 350e9),
    DeviceSpeed("B200", 2_250e12, 8.0e12, 50e9),
    DeviceSpeed("GH200", 989e12, 4.0e12, 350e9),
    DeviceSpeed("H200", 989e12, 4.8e12, 50e9),
    DeviceSpeed("H100 PCIe", 756e12, 2.0e12, 50e9),
    DeviceSpeed("H100", 989e12, 3.35e12, 50e9),
    DeviceSpeed("H20", 148e12, 4.0e12, 50e9),
    DeviceSpeed("A100", 312e12, 1.55e12, 24e9),
    DeviceSpeed("L40S", 362e12, 864e9, 24e9),
    DeviceSpeed("L40", 181e12, 864e9, 24e9),
    DeviceSpeed("A40", 149.7e12, 696e9, 24e9),
    DeviceSpeed("A10", 125e12, 600e9, 24e9),
    DeviceSpeed("A10G", 70e12, 600e9, 24e9),
    DeviceSpeed("L4", 121e12, 300e9, 24e9),
    DeviceSpeed("T4", 65e12, 300e9, 12e9),
)
OTHER_CUDA_DEVICE = DeviceSpeed("another GPU", 60e12, 500e9, 12e9)
"""The assumed speed of a GPU that is not listed: a slow one."""
FULL_PRECISION = 1 / 16
"""Peak of 32-bit products, as a share of the 16-bit peak."""

CORE_FLOPS = 40e9
"""FLOPs per second of one CPU core, with 32 bits."""
CPU_BANDWIDTH_BYTES_PER_S = 10e9
CPU_COPY_BYTES_PER_S = 4e9


def check_fits(
    profile: StepProfile,
    *,
    block_size: int,
    tensor_parallel_size: int,
    block_bytes: int | None = None,
    is_overlapped: bool | None = None,
    model: str = "the engine",
) -> None:
    """Check that `profile` can describe an engine with these properties. None is not compared, nor are unknown copies.

    block_bytes: bytes of a KV block on one device.
    is_overlapped: whether copies and computation overlap: true on CUDA, false on a CPU.

    :raises ConfigurationError: it cannot; the message has all reasons.
    """
    copies = profile.copies
    reasons = []
    if profile.block_size != block_size:
        reasons.append(f"its KV blocks have {profile.block_size} tokens, not {block_size}")
    if profile.tensor_parallel_size != tensor_parallel_size:
        reasons.append(f"its tensor_parallel_size is {profile.tensor_parallel_size}, not {tensor_parallel_size}")
    if copies and block_bytes is not None and copies.block_bytes != block_bytes:
        reasons.append(
            f"a KV block of its model takes {copies.block_bytes:,} bytes on a device, not {block_bytes:,}: "
            "it is of another model, or of another dtype"
        )
    if copies and is_overlapped is not None and copies.is_overlapped != is_overlapped:
        theirs, ours = ("a GPU", "a CPU") if copies.is_overlapped else ("a CPU", "a GPU")
        reasons.append(f"it is of {theirs}, and this is {ours}")
    if reasons:
        raise ConfigurationError(
            f"profile {profile.name!r} does not fit {model}: {'; '.join(reasons)}. "
            "Give none, or measure one with:  streamrag profile --model MODEL"
        )


def decoder_shape(
    name: str,
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
) -> ModelShape:
    """Return the shape of a Llama-like model with an output layer of its own, without biases and norms."""
    attention = hidden_size * head_dim * 2 * (num_heads + num_kv_heads)
    num_params = num_layers * (attention + 3 * hidden_size * intermediate_size) + 2 * vocab_size * hidden_size
    return ModelShape(
        name=name,
        num_params=num_params,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        weight_bytes=num_params * dtype_bytes,
        kv_bytes_per_token=2 * num_layers * num_kv_heads * head_dim * dtype_bytes,
    )


def default_profile(
    model: ModelShape,
    *,
    device: Literal["cpu", "cuda"],
    device_name: str = "",
    num_cores: int = 1,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    is_async: bool = True,
) -> AnalyticProfile:
    """Return the profile of an engine that was not measured: FLOPs at half the device's peak, bytes at its bandwidth.

    device_name: the name of the GPU as CUDA reports it. A GPU that is not listed counts as a slow one.
    num_cores: CPU cores of each rank.
    """
    is_cuda = device == "cuda"
    speed = _cuda_speed(device_name, model.weight_bytes / model.num_params) if is_cuda else _cpu_speed(num_cores)
    return AnalyticProfile(
        name=DEFAULT_NAME,
        device=f"{tensor_parallel_size} x {device_name or speed.name}",
        tensor_parallel_size=tensor_parallel_size,
        model=model,
        peak_flops=speed.peak_flops,
        efficiency=0.5,
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s,
        overhead_s=0.008,
        kv_tokens=0,
        block_size=block_size,
        is_async=is_async,
        host_bandwidth_bytes_per_s=speed.host_bandwidth_bytes_per_s,
        host_latency_s=1e-4,
        is_overlapped=is_cuda,
        provenance={"source": f"assumed from the model's shape and the data sheet of {speed.name}; not measured"},
    )


def _cuda_speed(device_name: str, dtype_bytes: float) -> DeviceSpeed:
    listed = (speed for speed in CUDA_DEVICES if re.search(rf"\b{speed.name}\b", device_name))
    speed = next(listed, OTHER_CUDA_DEVICE)
    return replace(speed, peak_flops=speed.peak_flops * FULL_PRECISION) if dtype_bytes >= 4 else speed


def _cpu_speed(num_cores: int) -> DeviceSpeed:
    return DeviceSpeed(f"{num_cores} cores", num_cores * CORE_FLOPS, CPU_BANDWIDTH_BYTES_PER_S, CPU_COPY_BYTES_PER_S)
