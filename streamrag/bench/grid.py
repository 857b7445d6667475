"""The cells of a benchmark: every combination of what varies."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from streamrag.bench.cell import Arm, CellSettings, Clock, check_clock
from streamrag.bench.workload import BUDGETS, HINTS, check_workload
from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY, make_policy
from streamrag.support.validation import Count, Positive, validated

PLAIN = tuple(BUDGETS)
"""Workloads that are generated, without hints."""
GENERATED = (*PLAIN, *(name + ending for name in PLAIN for ending in HINTS))
"""All that are generated; any other workload is a trace file."""
NOT_EMPTY = Field(min_length=1)


@validated
@dataclass(frozen=True, slots=True)
class Grid:
    """All that varies between the cells of a benchmark, and all that does not.

    Policies, evictions and scheduler options are the streaming arm's: the other arms run once for each load.

    :raises ConfigurationError: a value that no cell could run with.
    """

    clock: Clock
    workload: str
    arms: Annotated[tuple[Arm, ...], NOT_EMPTY] = ("no-streaming", "streaming")
    policies: Annotated[tuple[str, ...], NOT_EMPTY] = (DEFAULT_POLICY,)
    evictions: Annotated[tuple[EvictionMode, ...], NOT_EMPTY] = ("recompute",)
    host_kv_bytes: Count | None = None
    """For evictions that copy; None leaves it to the scheduler."""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of our scheduler."""
    qps: tuple[Positive, ...] = ()
    """Empty for the trace's own arrivals."""
    delays: Annotated[tuple[Positive, ...], NOT_EMPTY] = (1.0,)
    kv_tokens: tuple[Count, ...] = ()
    """Empty for the profile's capacity, or the engine's own choice."""
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
        """Return all cells, one seed after the other, so that a comparison is complete early."""
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
        for arm in self.arms:
            if arm == "streaming":
                for policy, eviction in product(self.policies, self.evictions):
                    yield {"arm": arm, "policy": policy, "eviction": eviction}
            else:
                yield {"arm": arm}


COMMON = {each.name for each in fields(Grid)} & {each.name for each in fields(CellSettings)} - {
    "host_kv_bytes",
    "kv_tokens",
    "qps",
    "scheduler_options",
}
"""Settings that all cells of a grid share."""


VARIABLE = (
    "arm",
    "policy",
    "eviction",
    "host_kv_bytes",
    "qps",
    "seed",
    "scheduler_options",
    "has_prefix_cache",
)
"""Settings that may differ between cells that are compared."""


def workload_name(workload: str) -> str:
    """Return a name for files: of a trace, that of its file without what tells its format."""
    return re.sub(r"(\.(jsonl|csv|json|gz|zst))+$", "", Path(workload).name)


def variant_name(settings: CellSettings) -> str:
    """Name what is compared: the arm, and of the streaming arm the policy, the eviction and further options."""
    cache = "" if settings.has_prefix_cache else " no-prefix-cache"
    if settings.arm != "streaming":
        return settings.arm + cache
    host = "" if settings.host_kv_bytes is None else f" host_kv_bytes={settings.host_kv_bytes:,}"
    options = "".join(f" {name}={value}" for name, value in sorted(settings.scheduler_options.items()))
    return f"streaming {settings.policy}/{settings.eviction}{host}{options}{cache}"


def load_of(settings: CellSettings) -> CellSettings:
    """Return the same settings for all cells that can be compared with each other, at whatever rate of arrivals."""
    defaults = CellSettings(settings.clock, settings.workload, "streaming")
    return replace(settings, **{name: getattr(defaults, name) for name in VARIABLE})


def describe_qps(qps: float | None) -> str:
    """Describe a rate of arrivals."""
    return "the trace's arrivals" if qps is None else f"{qps:g} QPS"


def describe_load(settings: CellSettings) -> str:
    """Describe in one line what all cells of one comparison share."""
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
    "profile": lambda profile: f"profile {Path(profile).name}",
    "model": lambda model: f"model {Path(model).name}",
}
"""Words for settings that are not the usual ones."""


def describe_cell(settings: CellSettings) -> str:
    """Describe a cell in one line."""
    return f"{variant_name(settings)}, {describe_load(settings)}, {describe_qps(settings.qps)}, seed {settings.seed}"
