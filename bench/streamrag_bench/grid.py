"""The grid of a benchmark: a cell for every combination of its settings."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from streamrag.engine.policies import DEFAULT_POLICY, make_policy
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.support.validation import Count, Positive, validated
from streamrag_bench.cell import Arm, CellClock, CellSettings, check_clock
from streamrag_bench.workload import BUDGETS, HINTS, check_workload

PLAIN = tuple(BUDGETS)
"""Names of generated workloads without hints."""
GENERATED = (*PLAIN, *(name + ending for name in PLAIN for ending in HINTS))
"""Names of all generated workloads; any other workload is a trace file."""
NOT_EMPTY = Field(min_length=1)


@validated
@dataclass(frozen=True, slots=True)
class Grid:
    """The settings of a benchmark: lists of values to combine, and values that all cells share.

    Policies, evictions and scheduler options apply to the streaming arm; each other arm runs once per load.

    :raises ConfigurationError: a value is invalid.
    """

    clock: CellClock
    workload: str
    arms: Annotated[tuple[Arm, ...], NOT_EMPTY] = ("no-streaming", "streaming")
    policies: Annotated[tuple[str, ...], NOT_EMPTY] = (DEFAULT_POLICY,)
    evictions: Annotated[tuple[EvictionMode, ...], NOT_EMPTY] = ("recompute",)
    host_kv_bytes: Count | None = None
    """Host memory for evictions that copy KV; None for the scheduler's default."""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    qps: tuple[Positive, ...] = ()
    """Rates of arrivals; empty for the trace's own arrivals."""
    delays: Annotated[tuple[Positive, ...], NOT_EMPTY] = (1.0,)
    kv_tokens: tuple[Count, ...] = ()
    """Capacities of the KV cache; empty for the profile's capacity, or the engine's default."""
    seeds: Annotated[tuple[int, ...], NOT_EMPTY] = (1,)
    num_queries: Count | None = None
    num_output_tokens: Count = 1
    profile: str | None = None
    model: str | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count = 256
    max_context_tokens: Count | None = None

    def __post_init__(self) -> None:
        check_clock(self.clock, self.profile, self.model)
        check_workload(self.workload, has_rate=bool(self.qps))
        for policy in self.policies:
            make_policy(policy)

    def cells(self) -> tuple[CellSettings, ...]:
        """Return a cell per seed, delay, KV capacity, rate and variant, ordered by seed so that one is done early.

        Only streaming cells have scheduler options, and only those whose eviction copies KV have `host_kv_bytes`.
        """
        common = {name: getattr(self, name) for name in COMMON}
        loads = product(self.seeds, self.delays, self.kv_tokens or (None,), self.qps or (None,))
        return tuple(
            CellSettings(
                **common,
                **variant,
                seed=seed,
                delay=delay,
                kv_tokens=kv_tokens,
                qps=qps,
                host_kv_bytes=self.host_kv_bytes if variant.get("eviction", "recompute") != "recompute" else None,
                scheduler_options=self.scheduler_options if variant["arm"] == "streaming" else {},
            )
            for seed, delay, kv_tokens, qps in loads
            for variant in self._variants()
        )

    def _variants(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each arm: every policy with every eviction for streaming, one variant for others."""
        for arm in self.arms:
            if arm == "streaming":
                for policy, eviction in product(self.policies, self.evictions):
                    yield {"arm": arm, "policy": policy, "eviction": eviction}
            else:
                yield {"arm": arm}


COMMON = {each.name for each in fields(Grid)} & {each.name for each in fields(CellSettings)}
COMMON -= {"host_kv_bytes", "kv_tokens", "qps", "scheduler_options"}
"""Settings that all cells of a grid share."""
VARIABLE = ("arm", "policy", "eviction", "host_kv_bytes", "qps", "seed", "scheduler_options", "has_prefix_cache")
"""Settings in which the cells of one comparison may differ."""


def workload_name(workload: str) -> str:
    """Return a workload's name for use in file names: without folder and suffixes."""
    return re.sub(r"(\.(jsonl|csv|json|gz|zst))+$", "", Path(workload).name)


def variant_name(settings: CellSettings) -> str:
    """Return a variant's name: arm; for streaming policy, eviction, host memory, options; a missing prefix cache."""
    cache = "" if settings.has_prefix_cache else " no-prefix-cache"
    if settings.arm != "streaming":
        return settings.arm + cache
    host = "" if settings.host_kv_bytes is None else f" host_kv_bytes={settings.host_kv_bytes:,}"
    options = "".join(f" {name}={value}" for name, value in sorted(settings.scheduler_options.items()))
    return f"streaming {settings.policy}/{settings.eviction}{host}{options}{cache}"


def load_of(settings: CellSettings) -> CellSettings:
    """Return the settings that identify a cell's comparison: those in `VARIABLE` have their defaults."""
    defaults = CellSettings(settings.clock, settings.workload, "streaming")
    return replace(settings, **{name: getattr(defaults, name) for name in VARIABLE})


def describe_qps(qps: float | None) -> str:
    return "the trace's arrivals" if qps is None else f"{qps:g} QPS"


def describe_load(settings: CellSettings) -> str:
    """Describe a load by its workload's name or file name, and the settings in `UNUSUAL` that are not defaults."""
    usual = CellSettings(settings.clock, settings.workload, "streaming")
    name = settings.workload if settings.workload in GENERATED else Path(settings.workload).name
    unusual = (each for each in UNUSUAL if getattr(settings, each) != getattr(usual, each))
    return ", ".join([name, *(UNUSUAL[each](getattr(settings, each)) for each in unusual)])


UNUSUAL: Mapping[str, Callable[[Any], str]] = {
    "num_queries": lambda num: f"{num:,} queries",
    "delay": lambda factor: f"gaps {factor:g}x",
    "kv_tokens": lambda num: f"KV cache of {num:,} tokens",
    "max_context_tokens": lambda num: f"contexts of at most {num:,} tokens",
    "num_output_tokens": lambda num: f"{num} output tokens",
    "max_num_batched_tokens": lambda num: f"{num:,} tokens a step",
    "max_num_seqs": lambda num: f"at most {num} running",
    "profile": lambda profile: f"simulated with profile {Path(profile).name}",
    "model": lambda model: f"model {Path(model).name}",
}
"""Functions that describe a setting that is not the default."""


def describe_cell(settings: CellSettings) -> str:
    return f"{variant_name(settings)}, {describe_load(settings)}, {describe_qps(settings.qps)}, seed {settings.seed}"
