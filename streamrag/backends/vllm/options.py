"""The options of the scheduler: the client checks and writes them, the engine's processes read them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.engine.eviction import EvictionMode, check_eviction
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError
from streamrag.support.messages import is_number, is_whole, short

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What `additional_config={"streamrag": {...}}` of the engine's arguments may say.

    :raises ConfigurationError: there is no such eviction, memory or file.
    """

    policy: str = DEFAULT_POLICY
    """See `streamrag.engine.make_policy`. It orders those of a class, and there is but one where no sessions are."""
    class_ageing_s: float | None = 4.0
    """See `streamrag.engine.classes`; None serves data and questions of sessions as `policy` does all."""
    can_partial_evict: bool | None = None
    """See `streamrag.engine.Limits`; None where host memory holds the KV of all, and for prompts that only grow."""
    num_partial_tokens: int | None = 2_048
    """See `streamrag.engine.Limits`; None fills every step."""
    partial_step_s: float = 0.05
    """See `streamrag.engine.Pace`."""
    sizes_steps: bool = True
    """Whether complete prompts have steps of the length that suits them all; see `streamrag.engine.step_size`. Else
    each is as long as the engine's token budget allows."""
    late_binding: bool = True
    """See `streamrag.engine.Limits.is_early`; it matters with asynchronous scheduling, which plans a step ahead."""
    low_water: float = 0.1
    """See `streamrag.engine.Limits.num_blocks_kept_free`, as a share of the KV blocks."""
    data_high_water: float | None = None
    """Share of the KV blocks that may be held where data of sessions are still computed, 0.95 say. None for all."""
    max_data_tokens: int | None = None
    """See `streamrag.engine.Limits`, 1,024 say; None for no such limit."""
    kv_budget: float | None = None
    """Share of the KV blocks that complete prompts and their answers may come to need, 0.5 say; those that would go
    beyond wait for others to end. None for no such limit."""
    looks_up_again: bool = True
    """Whether a stream that holds KV is looked up in the prefix cache again before each step that computes it, because
    its prompt may have grown, and others have computed the same. It needs attention of one kind, and no KV connector
    but ours."""
    groups_prefills: bool = False
    """Whether requests whose next tokens are the same compute them once; see `streamrag.engine.groups`. It needs what
    `looks_up_again` needs."""
    eviction: EvictionMode = "cost"
    """What becomes of a victim's KV: see `streamrag.engine.eviction`. Without our KV connector it is recomputed."""
    host_kv_bytes: int | None = None
    """Host memory for KV, of each worker; None for a share of the machine's: see `host_size`."""
    num_host_blocks: int | None = None
    """Overrides `host_kv_bytes`: KV blocks that host memory holds."""
    profile: str | None = None
    """Hardware profile by which costs are compared, by name or path; None for one made from the model's shape."""
    records: str | None = None
    """A file to which the record of every request that ends is appended; see `streamrag.records.read_records`."""
    tells_kv_use: bool = False
    """Whether the stats of each step have a `KvUse`, among those of KV connectors: vLLM has no other place for more."""

    def __post_init__(self) -> None:
        check_eviction(self.eviction)
        for name in ("data_high_water", "kv_budget"):
            share = getattr(self, name)
            if share is not None and (not is_number(share) or not 0 < share <= 1):
                raise ConfigurationError(f"{name}={short(share)} must be a share over 0 and at most 1, or None")
        most = self.max_data_tokens
        if most is not None and (not is_whole(most) or most < 1):
            raise ConfigurationError(f"max_data_tokens={short(most)} must be a whole number, at least 1, or None")
        given = self.host_kv_bytes
        if given is not None and (not isinstance(given, int) or given <= 0):
            raise ConfigurationError(
                f"host_kv_bytes={self.host_kv_bytes!r} must be a positive number of bytes; "
                'for none, leave it out and set eviction="recompute"'
            )
        if self.records is not None and (not isinstance(self.records, str) or not self.records):
            raise ConfigurationError(f"records={self.records!r}: give the path of a file, as text")

    @classmethod
    def of(cls, config: "VllmConfig") -> "SchedulerOptions":
        given = config.additional_config
        return cls.named(given.get(KEY, {}) if isinstance(given, dict) else {})

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> "SchedulerOptions":
        """:raises ConfigurationError: there is no option of such a name, or it cannot have that value."""
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise ConfigurationError(f"additional_config[{KEY!r}] has {sorted(unknown)}; it may have {names}")
        return cls(**values)
