"""The options of the scheduler. The client validates and writes them; the engine's processes read them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.engine.rules.memory_rules import LOW_WATER
from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, CountOrZero, NonEmptyText, PositiveFraction, validated

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROPOSER = "streamrag.backends.vllm.worker.no_proposer.NoProposer"


def draft_config(num_tokens: int) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for drafts, of which a step verifies at most `num_tokens` per request."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_tokens}


@validated
@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options in `additional_config={"streamrag": {...}}` of the engine's arguments.

    :raises ConfigurationError: an option cannot have that value.
    """

    policy: str = DEFAULT_POLICY
    """Orders the requests of a class: see `streamrag.engine.make_policy`. Without sessions there is only one class."""
    class_ageing_s: float | None = 4.0
    """See `streamrag.engine.urgency_classes`; with None, `policy` orders data and questions of sessions together."""
    can_partial_evict: bool | None = None
    """See `streamrag.engine.rules.PartialEviction`; None allows it to growing prompts if host memory holds all KV."""
    num_partial_tokens: int | None = 2_048
    """Most tokens of partial prompts in a step, see `streamrag.engine.Pace`; None fills every step."""
    partial_step_s: float = 0.05
    """Seconds that a step of partial prompts should take at most; see `streamrag.engine.Pace`."""
    sizes_steps: bool = True
    """Whether to adapt the length of steps to the rate of complete prompts; see `streamrag.engine.step_size`. If not,
    each step is as long as the engine's token budget allows."""
    late_binding: bool = True
    """See `streamrag.engine.rules.LateBinding`. Matters with asynchronous scheduling, which plans a step ahead."""
    low_water: float = LOW_WATER
    """Share of the KV blocks that `streamrag.engine.rules.LowWater` keeps free."""
    data_high_water: PositiveFraction | None = None
    """Share of the KV blocks, 0.95 for example, above which data of sessions are not computed. None for no limit."""
    max_data_tokens: Count | None = None
    """See `streamrag.engine.rules.DataShare`; 1,024 for example; None for no limit."""
    kv_budget: PositiveFraction | None = None
    """Share of the KV blocks, 0.5 for example, that complete prompts and their answers may claim; further prompts wait
    until others end. None for no limit."""
    looks_up_again: bool = True
    """Whether to look up a stream that holds KV in the prefix cache again before each step, because others may have
    computed the same tokens since. Needs attention of one kind, and no third-party KV connector that may load KV."""
    groups_prefills: bool = False
    """Whether requests whose next tokens are equal compute them once; see `streamrag.engine.rules`. Needs the same as
    `looks_up_again`."""
    prompt_lookup: bool = True
    """Whether an engine that verifies drafts also verifies what follows the last tokens of an answer in its prompt."""
    eviction: EvictionMode = "cost"
    """Whether a victim's KV is recomputed or swapped; see `streamrag.engine.recompute_or_swap`. Only with our connector
    is it swapped."""
    host_kv_bytes: Count | None = None
    """Host memory for KV, per worker; None for a share of the machine's: see `host_size`."""
    num_host_blocks: CountOrZero | None = None
    """Number of KV blocks that host memory holds. Overrides `host_kv_bytes`."""
    profile: str | None = None
    """Name or path of the hardware profile for cost comparisons; None for one derived from the model's shape."""
    records: NonEmptyText | None = None
    """A file to which the record of every request that ends is appended; see `streamrag.records.read_records`."""
    reports_kv_use: bool = False
    """Whether each step's stats carry a `KvUse`, in the stats of KV connectors: vLLM has no other extensible field."""

    @classmethod
    def of(cls, config: "VllmConfig") -> "SchedulerOptions":
        """Return the options in an engine's configuration."""
        given = config.additional_config
        return cls.named(given.get(KEY, {}) if isinstance(given, dict) else {})

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> "SchedulerOptions":
        """Return the options of these names and values; raise ConfigurationError for an unknown or invalid one."""
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise ConfigurationError(f"additional_config[{KEY!r}] has {sorted(unknown)}; it may have {names}")
        return cls(**values)
