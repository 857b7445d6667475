"""The options of the scheduler: the client checks and writes them, the engine's processes read them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, CountOrZero, NonEmptyText, PositiveFraction, validated

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@validated
@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options in `additional_config={"streamrag": {...}}` of the engine's arguments.

    :raises ConfigurationError: an option cannot have that value.
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
    data_high_water: PositiveFraction | None = None
    """Share of the KV blocks that may be held where data of sessions are still computed, 0.95 say. None for all."""
    max_data_tokens: Count | None = None
    """See `streamrag.engine.Limits`, 1,024 say; None for no such limit."""
    kv_budget: PositiveFraction | None = None
    """Share of the KV blocks that complete prompts and their answers may come to need, 0.5 say; those that would go
    beyond wait for others to end. None for no such limit."""
    looks_up_again: bool = True
    """Whether a stream that holds KV is looked up in the prefix cache again before each step that computes it, because
    its prompt may have grown, and others have computed the same. It needs attention of one kind, and no KV connector
    but ours."""
    groups_prefills: bool = False
    """Whether requests whose next tokens are the same compute them once; see `streamrag.engine.rules`. It needs what
    `looks_up_again` needs."""
    eviction: EvictionMode = "cost"
    """The fate of a victim's KV: see `streamrag.engine.eviction`. Without our KV connector it is recomputed."""
    host_kv_bytes: Count | None = None
    """Host memory for KV, of each worker; None for a share of the machine's: see `host_size`."""
    num_host_blocks: CountOrZero | None = None
    """Overrides `host_kv_bytes`: KV blocks that host memory holds."""
    profile: str | None = None
    """Hardware profile by which costs are compared, by name or path; None for one made from the model's shape."""
    records: NonEmptyText | None = None
    """A file to which the record of every request that ends is appended; see `streamrag.records.read_records`."""
    tells_kv_use: bool = False
    """Whether the stats of each step have a `KvUse`, among those of KV connectors: vLLM has no other place for more."""

    @classmethod
    def of(cls, config: "VllmConfig") -> "SchedulerOptions":
        """Return the options in an engine's configuration."""
        given = config.additional_config
        return cls.named(given.get(KEY, {}) if isinstance(given, dict) else {})

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> "SchedulerOptions":
        """Return the options of these names and values.

        :raises ConfigurationError: there is no option of such a name, or it cannot have that value.
        """
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise ConfigurationError(f"additional_config[{KEY!r}] has {sorted(unknown)}; it may have {names}")
        return cls(**values)
