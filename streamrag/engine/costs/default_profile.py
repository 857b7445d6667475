"""The profile of a running engine: the one that it was given, if it fits, or what is assumed of one nobody measured."""

from typing import Literal

from streamrag.engine.costs.device_speeds import speed_of_cpu, speed_of_cuda
from streamrag.engine.costs.step_profiles import AnalyticProfile, ModelShape, StepProfile
from streamrag.errors import ConfigurationError

DEFAULT_NAME = "analytic default"


def check_fits(
    profile: StepProfile,
    *,
    block_size: int,
    tensor_parallel_size: int,
    block_bytes: int | None = None,
    is_overlapped: bool | None = None,
    model: str = "the engine",
) -> None:
    """Whether what `profile` says can be true of an engine. What is None is not compared.

    `block_bytes` are those of one device, `is_overlapped` is as in `CopyCosts`: true of CUDA, false of a CPU.

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
    """The shape of a Llama-like model by its configuration: weights are counted, biases and norms are not."""
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
    kv_tokens: int = 0,
    block_size: int = 16,
    is_async: bool = True,
) -> AnalyticProfile:
    """Return the profile of an engine that was not measured: its model's FLOPs and bytes at its device's speed.

    `device_name` is as CUDA tells it, `num_cores` are those that each rank has on a CPU.
    """
    is_cuda = device == "cuda"
    speed = speed_of_cuda(device_name, model.weight_bytes / model.num_params) if is_cuda else speed_of_cpu(num_cores)
    return AnalyticProfile(
        name=DEFAULT_NAME,
        device=f"{tensor_parallel_size} x {device_name or speed.name}",
        tensor_parallel_size=tensor_parallel_size,
        model=model,
        peak_flops=speed.peak_flops,
        efficiency=0.5,
        bandwidth_bytes_per_s=speed.bandwidth_bytes_per_s,
        overhead_s=0.008,
        kv_tokens=kv_tokens,
        block_size=block_size,
        is_async=is_async,
        host_bandwidth_bytes_per_s=speed.host_bandwidth_bytes_per_s,
        host_latency_s=1e-4,
        is_overlapped=is_cuda,
        provenance={"source": f"assumed from the model's shape and the data sheet of {speed.name}; not measured"},
    )
