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
    """Options of the scheduler: the order of requests, and what happens to their KV.

    VllmBackend(model, scheduler=SchedulerOptions(policy="fcfs", eviction="recompute"))

    :raises ConfigurationError: an option cannot have that value.
    """

    policy: str = DEFAULT_POLICY
    """The order of requests of a class: "arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(4)",
    "srpf(ageing=0.1)", or "package.module.function", which returns a sort key for a `RequestView` and the time."""
    class_ageing_s: float | None = 4.0
    """Seconds that a less urgent class of requests waits at most before it is as urgent as the next one. With None,
    `policy` orders data and questions of sessions together."""
    can_partial_evict: bool | None = None
    """Whether a partial prompt may take memory from other requests. By default, only prompts that only grow may, and
    only while host memory has room for all KV; otherwise prompts would evict each other in turn."""
    eviction: EvictionMode | None = None
    """Fate of a victim's KV: "recompute", "swap" to host memory and back, or "cost", the cheaper one, which is the
    default where host memory can be used."""
    profile: str | None = None
    """Name or path of the hardware's costs. By default they are estimated from the model's shape, and corrected by
    measuring the engine's steps."""
    kv_budget: PositiveFraction | None = None
    """Share of the KV blocks, 0.5 for example, that complete prompts and their answers may claim; further prompts wait
    until others end. None for no limit."""
    data_high_water: PositiveFraction | None = None
    """Share of the KV blocks, 0.95 for example, above which data of sessions are not computed. None for no limit."""
    max_data_tokens: Count | None = None
    """Most tokens of sessions' data in a step beside other requests, 1,024 for example; None for no limit."""
    low_water: float = LOW_WATER
    """Share of the KV blocks that is kept free for complete prompts."""
    records: NonEmptyText | None = None
    """A file to which the record of every request that ends is appended; see `streamrag.telemetry.read_records`."""

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@validated
@dataclass(frozen=True, slots=True)
class EngineOptions(SchedulerOptions):
    """Options in `additional_config={"streamrag": {...}}` of the engine's arguments: also what the client sets for its
    engine, and the switches with which studies take our scheduler apart."""

    eviction: EvictionMode = "cost"
    num_partial_tokens: int | None = 2_048
    """Most tokens of partial prompts in a step, see `streamrag.engine.Pace`; None fills every step."""
    partial_step_s: float = 0.05
    """Seconds that a step of partial prompts should take at most; see `streamrag.engine.Pace`."""
    sizes_steps: bool = True
    """Whether to adapt the length of steps to the rate of complete prompts; see `streamrag.engine.step_size`. If not,
    each step is as long as the engine's token budget allows."""
    late_binding: bool = True
    """See `streamrag.engine.rules.LateBinding`. Matters with asynchronous scheduling, which plans a step ahead."""
    looks_up_again: bool = True
    """Whether to look up a stream that holds KV in the prefix cache again before each step, because others may have
    computed the same tokens since. Needs attention of one kind, and no third-party KV connector that may load KV."""
    groups_prefills: bool = False
    """Whether requests whose next tokens are equal compute them once; see `streamrag.engine.rules`. Needs the same as
    `looks_up_again`."""
    prompt_lookup: bool = True
    """Whether an engine that verifies drafts also verifies what follows the last tokens of an answer in its prompt."""
    host_kv_bytes: Count | None = None
    """Host memory for KV, per worker; None for a share of the machine's: see `facts`."""
    num_host_blocks: CountOrZero | None = None
    """Number of KV blocks that host memory holds. Overrides `host_kv_bytes`."""
    reports_kv_use: bool = False
    """Whether each step's stats carry a `KvUse`, in the stats of KV connectors: vLLM has no other extensible field."""

    @classmethod
    def of(cls, config: "VllmConfig") -> "EngineOptions":
        """Return the options in an engine's configuration."""
        given = config.additional_config
        return cls.named(given.get(KEY, {}) if isinstance(given, dict) else {})

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> "EngineOptions":
        """Return the options of these names and values; raise ConfigurationError for an unknown or invalid one."""
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise ConfigurationError(f"additional_config[{KEY!r}] has {sorted(unknown)}; it may have {names}")
        return cls(**values)
