"""The cells of a benchmark: every combination of what varies."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from streamrag.bench.cell import ARMS, Arm, CellSettings
from streamrag.bench.workload import HINTS
from streamrag.engine.eviction import EVICTIONS, EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY, make_policy
from streamrag.errors import ConfigurationError

PLAIN = ("crawler", "anns", "anns-last")
"""Workloads that are generated, without hints."""
GENERATED = (*PLAIN, *(name + ending for name in PLAIN for ending in HINTS))
"""All that are generated; any other workload is a trace file."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What varies between the cells of a benchmark, and what does not.

    Policies, evictions and scheduler options are the streaming arm's: the other arms run once for each load.

    :raises ConfigurationError: a value that no cell could run with.
    """

    clock: Literal["virtual", "wall"]
    workload: str
    arms: tuple[Arm, ...] = ("no-streaming", "streaming")
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    evictions: tuple[EvictionMode, ...] = ("recompute",)
    host_kv_bytes: int | None = None
    """For evictions that copy; None leaves it to the scheduler."""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further options of our scheduler."""
    qps: tuple[float, ...] = ()
    """None given: the trace's own arrivals."""
    delays: tuple[float, ...] = (1.0,)
    kv_tokens: tuple[int, ...] = ()
    """None given: the profile's capacity, or the engine's own choice."""
    seeds: tuple[int, ...] = (1,)
    num_queries: int | None = None
    num_output_tokens: int = 1
    profile: str | None = None
    model: str | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_workload()
        for arm in self.arms:
            if arm not in ARMS:
                raise ConfigurationError(f"there is no arm {arm!r}; choose from {', '.join(ARMS)}")
        for policy in self.policies:
            make_policy(policy)
        for eviction in self.evictions:
            if eviction not in EVICTIONS:
                raise ConfigurationError(f"there is no eviction {eviction!r}; choose from {', '.join(EVICTIONS)}")
        if self.host_kv_bytes is not None and self.host_kv_bytes < 1:
            raise ConfigurationError(f"host-kv-bytes={self.host_kv_bytes}: it must be at least 1")
        for name, values in (("qps", self.qps), ("delay", self.delays), ("kv-tokens", self.kv_tokens)):
            for value in values:
                if not value > 0:
                    raise ConfigurationError(f"{name}={value}: it must be more than 0")
        if self.num_queries is not None and self.num_queries < 1:
            raise ConfigurationError(f"queries={self.num_queries}: it must be at least 1")
        if self.max_context_tokens is not None and self.max_context_tokens < 1:
            raise ConfigurationError(f"max-context-tokens={self.max_context_tokens}: it must be at least 1")
        if not (self.arms and self.policies and self.evictions and self.delays and self.seeds):
            raise ConfigurationError("every list of a benchmark needs at least one value")
        if self.clock == "virtual" and self.model is not None:
            raise ConfigurationError(f"model={self.model!r} is for wall time; virtual time takes a profile")
        if self.clock == "wall" and self.profile is not None:
            raise ConfigurationError(f"profile={self.profile!r} is for virtual time; wall time takes a model")

    def _check_workload(self) -> None:
        if self.workload in GENERATED:
            if not self.qps:
                raise ConfigurationError(
                    f"workload {self.workload!r} is generated, and has no arrivals of its own; give --qps, e.g. 1,2,4"
                )
        elif not Path(self.workload).exists():
            raise ConfigurationError(
                f"workload {self.workload!r} is none of {', '.join(PLAIN)}, nor a trace that is there"
            )

    def cells(self) -> tuple[CellSettings, ...]:
        """All cells, one seed after the other, so that a comparison is complete early."""
        loads = product(self.seeds, self.delays, self.kv_tokens or (None,), self.qps or (None,))
        return tuple(
            CellSettings(
                clock=self.clock,
                workload=self.workload,
                arm=arm,
                policy=policy,
                eviction=eviction,
                host_kv_bytes=self.host_kv_bytes if eviction != "recompute" else None,
                qps=qps,
                delay=delay,
                kv_tokens=kv_tokens,
                seed=seed,
                num_queries=self.num_queries,
                num_output_tokens=self.num_output_tokens,
                profile=self.profile,
                model=self.model,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                scheduler_options=self.scheduler_options if arm == "streaming" else {},
                max_context_tokens=self.max_context_tokens,
            )
            for seed, delay, kv_tokens, qps in loads
            for arm, policy, eviction in self._variants()
        )

    def _variants(self) -> Iterator[tuple[Arm, str, EvictionMode]]:
        defaults = CellSettings("virtual", "", "streaming")
        for arm in self.arms:
            if arm == "streaming":
                yield from product([arm], self.policies, self.evictions)
            else:
                yield arm, defaults.policy, defaults.eviction


def workload_name(workload: str) -> str:
    """For names of files: of a trace, that of its file without what tells its format."""
    return re.sub(r"(\.(jsonl|csv|json|gz|zst))+$", "", Path(workload).name)


def variant_name(settings: CellSettings) -> str:
    """What is compared: the arm, and of the streaming arm the policy, the eviction and further options."""
    cache = "" if settings.has_prefix_cache else " no-prefix-cache"
    if settings.arm != "streaming":
        return settings.arm + cache
    host = "" if settings.host_kv_bytes is None else f" host_kv_bytes={settings.host_kv_bytes:,}"
    options = "".join(f" {name}={value}" for name, value in sorted(settings.scheduler_options.items()))
    return f"streaming {settings.policy}/{settings.eviction}{host}{options}{cache}"


def load_of(settings: CellSettings) -> CellSettings:
    """The same for all cells that can be compared with each other, at whatever rate of arrivals."""
    defaults = CellSettings(settings.clock, settings.workload, "streaming")
    return replace(
        settings,
        arm=defaults.arm,
        policy=defaults.policy,
        eviction=defaults.eviction,
        host_kv_bytes=defaults.host_kv_bytes,
        qps=defaults.qps,
        seed=defaults.seed,
        scheduler_options=defaults.scheduler_options,
        has_prefix_cache=defaults.has_prefix_cache,
    )


def describe_qps(qps: float | None) -> str:
    """A rate of arrivals, for people."""
    return "the trace's arrivals" if qps is None else f"{qps:g} QPS"


def describe_load(settings: CellSettings) -> str:
    """What all cells of one comparison share, in one line."""
    generated = settings.workload in GENERATED
    parts = [settings.workload if generated else Path(settings.workload).name]
    if settings.num_queries is not None:
        parts.append(f"{settings.num_queries:,} queries")
    if settings.delay != 1.0:
        parts.append(f"gaps {settings.delay:g}x")
    if settings.kv_tokens is not None:
        parts.append(f"KV cache of {settings.kv_tokens:,} tokens")
    if settings.max_context_tokens is not None:
        parts.append(f"contexts of at most {settings.max_context_tokens:,} tokens")
    if settings.num_output_tokens != 1:
        parts.append(f"{settings.num_output_tokens} output tokens")
    if settings.max_num_batched_tokens is not None:
        parts.append(f"{settings.max_num_batched_tokens:,} tokens a step")
    if settings.max_num_seqs != CellSettings("virtual", "", "streaming").max_num_seqs:
        parts.append(f"at most {settings.max_num_seqs} running")
    if settings.profile is not None:
        parts.append(f"profile {Path(settings.profile).name}")
    if settings.model is not None:
        parts.append(f"model {Path(settings.model).name}")
    return ", ".join(parts)


def describe_cell(settings: CellSettings) -> str:
    """A cell's name for people."""
    return f"{variant_name(settings)}, {describe_load(settings)}, {describe_qps(settings.qps)}, seed {settings.seed}"
