"""The ways of serving a load: not streaming, the paper's policies, ours, and ours without one of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine.recompute_or_swap import EVICTIONS, EvictionMode
from streamrag_bench.cell import Arm, CellSettings

from .points import Point
from .published import WORKLOADS

PROFILE = "h200-llama8b-tp2"
SYNC_PROFILE = "h200-llama8b-tp2-sync"
"""The same, but no step is planned while another computes, as in the vLLM 0.8.1 that the paper built on."""
OTHER_BUDGETS = {"crawler": 8_192, "anns": 2_048, "anns-last": 2_048}
"""Tokens a step, beside the published 2,048 of the crawler and 8,192 of searches."""
HOST_KV_BYTES = 128 << 30
"""Host memory for the KV of each worker, where the paper's ways swap: half of what a usual node has for each GPU."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a load is served."""

    name: str
    arm: Arm = "streaming"
    policy: str = "fcfs"
    eviction: EvictionMode = "recompute"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    host_kv_bytes: int | None = None
    has_prefix_cache: bool = True
    has_other_budget: bool = False
    """Whether a step takes as many tokens as `OTHER_BUDGETS` says, and not as published."""
    budget: int | None = None
    """If given, tokens a step."""
    profile: str = PROFILE
    hints: str = ""
    """Ending of the workload's name: "-hints" or "-oracle", see `streamrag_bench.workload.HINTS`."""

    def cell(self, point: Point, seed: int, num_queries: int | None) -> CellSettings:
        """This way, at a point."""
        return CellSettings(
            "virtual",
            point.workload + self.hints,
            self.arm,
            policy=self.policy,
            eviction=self.eviction,
            host_kv_bytes=self.host_kv_bytes if self.eviction != "recompute" else None,
            qps=point.qps,
            delay=point.delay,
            kv_tokens=point.kv_tokens,
            seed=seed,
            num_queries=num_queries,
            profile=self.profile,
            max_num_batched_tokens=OTHER_BUDGETS[point.workload] if self.has_other_budget else self.budget,
            scheduler_options=dict(self.options),
            has_prefix_cache=self.has_prefix_cache,
        )


NOT_STREAMING = Way("not streaming", arm="no-streaming")

PAPER_OPTIONS: Mapping[str, Any] = {
    "can_partial_evict": True,
    "num_partial_tokens": None,
    "sizes_steps": False,
    "late_binding": False,
    "low_water": 0.0,
    "looks_up_again": False,
}
"""What makes our scheduler the paper's: steps are full, every request may take the memory of those behind it, and who
was evicted starts again at once. Whatever else ours does by default has to be switched off here."""
NO_PART_OF_PAPER = {
    "partial_step_s",
    "host_kv_bytes",
    "num_host_blocks",
    "profile",
    "records",
    "policy",
    "eviction",
    "reports_kv_use",
    "class_ageing_s",
    "data_high_water",
    "max_data_tokens",
    "kv_budget",
    "groups_prefills",
    "prompt_lookup",
}
"""Options that a way sets itself, that mean nothing with `PAPER_OPTIONS`, or that are off unless asked for."""

PAPER_POLICIES = {"vLLM-S": "arrival", "FCFS": "fcfs", "LCAS": "lcas", "LCAS as coded": "lcas_oldest", "MCPS": "mcps"}
"""By the paper's names. LCAS is as the text has it, newest chunk first; the published code sorts oldest first."""
TABLE_POLICIES = ("vLLM-S", "FCFS", "LCAS", "MCPS")
"""Those of tables 3 and 4."""


def paper(policy: str, eviction: EvictionMode = "recompute") -> Way:
    """One of the paper's policies, by its name there, with an eviction."""
    name = policy if eviction == "recompute" else f"{policy}, {eviction}"
    host_kv_bytes = None if eviction == "recompute" else HOST_KV_BYTES
    return Way(name, "streaming", PAPER_POLICIES[policy], eviction, PAPER_OPTIONS, host_kv_bytes)


def with_other_budget(way: Way) -> Way:
    return replace(way, name=f"{way.name}, other budget", has_other_budget=True)


def without_prefix_cache(way: Way) -> Way:
    return replace(way, name=f"{way.name}, no prefix cache", has_prefix_cache=False)


FCFS = paper("FCFS")
FCFS_SYNC = replace(FCFS, name="FCFS, no step ahead", profile=SYNC_PROFILE)
PAPER_WAYS = tuple(paper(policy) for policy in PAPER_POLICIES)
PAPER_SWAPPING = tuple(paper(p, e) for p in TABLE_POLICIES for e in EVICTIONS if e != "recompute")

OURS_BUDGET: int | None = 8_192
"""Tokens a step for ours; None for the published ones."""


def ours(name: str = "ours", **options: Any) -> Way:
    """The defaults of our scheduler, but for `options`, which are fields of `EngineOptions`."""
    of = EngineOptions(**options)
    other = {key: value for key, value in options.items() if key not in ("policy", "eviction", "host_kv_bytes")}
    return Way(
        name,
        policy=of.policy,
        eviction=of.eviction,
        options=other,
        host_kv_bytes=of.host_kv_bytes,
        budget=OURS_BUDGET,
    )


def with_our_budget(way: Way, point: Point) -> Way:
    """One of the paper's ways with as many tokens a step as ours has."""
    is_published = WORKLOADS[point.workload.removesuffix("-last")].budget == OURS_BUDGET
    return way if is_published else with_other_budget(way)


OURS = ours()

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "in order of arrival": {"policy": "fcfs"},
    "full steps": {"num_partial_tokens": None},
    "no partial prompt evicts": {"can_partial_evict": False},
    "all partial prompts evict": {"can_partial_evict": True},
    "steps of any length": {"sizes_steps": False},
    "a step ahead": {"late_binding": False},
    "always recompute": {"eviction": "recompute"},
    "no ageing": {"policy": "srpf(0)"},
    "no low water": {"low_water": 0.0},
    "not looked up again": {"looks_up_again": False},
    "4 GiB of host memory": {"host_kv_bytes": 4 << 30},
}
"""Ours without each of its parts: what is changed of `EngineOptions()`. One that changes nothing is left out."""
OF_MEMORY = {"can_partial_evict", "eviction", "low_water", "looks_up_again", "host_kv_bytes"}
"""Options that decide nothing where nobody is evicted, and no two queries have a chunk in common."""

HINTED = replace(OURS, name="ours, told what is left", hints="-hints")
"""Ours where each chunk says when the retriever expects to end, by what it could know: see docs/traces.md."""
ORACLE = replace(OURS, name="ours, told the end", hints="-oracle")
"""Ours where each chunk says when retrieval will end, which nobody knows."""


def ablations(*, is_pressed: bool = True) -> tuple[Way, ...]:
    """One way for each part that ours has; without memory pressure, for those that can matter there."""
    return tuple(
        ours(f"ours, {name}", **options)
        for name, options in ABLATIONS.items()
        if EngineOptions(**options) != EngineOptions() and (is_pressed or not options.keys() <= OF_MEMORY)
    )
