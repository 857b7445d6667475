"""Runs a cell in virtual time: vLLM's own scheduler and KV manager, clients and all, but no model.

CellSettings ─▶ load (workload) ─▶ clients (arms) ─▶ SimulatedClient ─▶ SimulatedEngine ─▶ CellResult
                                    └────────── one event loop in virtual time ──────────┘
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.host_size import MOST_TIMES_DEVICE
from streamrag.bench.arms import Timing, check_arm, run_query
from streamrag.bench.cell import CellProgress, CellResult, CellSettings, StepPart, StepResult
from streamrag.bench.provenance import versions
from streamrag.bench.query_records import request_results
from streamrag.bench.step_time import CopyLog, StepTimes
from streamrag.bench.virtual_time import DeadlockError, run_virtual
from streamrag.bench.workload import (
    Arriving,
    Fitted,
    Tokens,
    fitted,
    load_trace,
    longest_prompt,
    make_load,
    token_budget,
)
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedQuery

if TYPE_CHECKING:
    from streamrag.backends.simulated.client import SimulatedClient


HOST_KV_BYTES = 128 << 30
"""A worker's share of the host's memory where nobody says: of a usual node with 512 GiB for each device."""
MAX_BLOCKS = 4_000_000
"""Each takes some 200 bytes of memory."""


def run_cell(
    settings: CellSettings,
    *,
    trace: Trace | None = None,
    keep_steps: bool = False,
    progress: CellProgress | None = None,
    unsteady_seed: int = 0,
) -> CellResult:
    """Simulate one cell. The same settings and trace give the same result, but for `wall_s`.

    Where the profile is of a machine that is not always equally fast, `unsteady_seed` says when it is slow.

    A load that the stock sessions never get through is reported as far as it came: `num_unfinished` tells.

    :raises ConfigurationError: the settings are for wall time, or cannot work.
    """
    profile = _checked_profile(settings)
    queries = make_load(settings, trace or load_trace(settings))
    check_arm(settings.arm, queries)
    load = fitted(settings, queries, _model_len(profile))
    with _few_collections():
        run = _Run(settings, load, profile, progress or (lambda num_done, num_total: None), unsteady_seed)
        return run.to_end(keep_steps)


def _checked_profile(settings: CellSettings) -> StepProfile:
    if settings.clock != "virtual":
        raise ConfigurationError(f"clock={settings.clock!r}: a simulation runs in virtual time only")
    if settings.model is not None:
        raise ConfigurationError(f"model={settings.model!r} needs wall time; virtual time takes a hardware profile")
    if settings.profile is None:
        raise ConfigurationError("virtual time needs a hardware profile; give one, e.g. profile='h200-llama8b-tp2'")
    profile = load_profile(settings.profile)
    if _has_host_memory(settings) and profile.copies is None:
        raise ConfigurationError(
            f"eviction={settings.eviction!r}: profile {settings.profile!r} does not say how long copies take; "
            "take another, or eviction='recompute'"
        )
    if _has_host_memory(settings) and not settings.has_prefix_cache:
        raise ConfigurationError(f"eviction={settings.eviction!r} needs a prefix cache: it is what knows KV blocks")
    return profile


def _model_len(profile: StepProfile) -> int | None:
    """Model length of the engine that was measured; None if the profile comes from elsewhere."""
    found = profile.provenance.get("max_model_len")
    return found if type(found) is int else None


def _has_host_memory(settings: CellSettings) -> bool:
    return settings.arm == "streaming" and settings.eviction != "recompute"


@contextmanager
def _few_collections() -> Iterator[None]:
    """Hundreds of thousands of long-lived objects make each full collection slow; as in vLLM's own loop.

    One comes at the end, when the simulated engine is garbage. It looks only at what was made inside: of a program
    that has imported vLLM, the rest takes half a second.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*before)
        gc.unfreeze()


@dataclass
class _Run:
    """One cell while it runs."""

    settings: CellSettings
    load: Fitted
    profile: StepProfile
    progress: CellProgress
    unsteady_seed: int
    timings: dict[str, Timing] = field(default_factory=dict)
    step_times: StepTimes = field(init=False)
    copy_log: CopyLog | None = field(default=None, init=False)

    @property
    def queries(self) -> tuple[TracedQuery, ...]:
        return self.load.queries

    @property
    def kv_tokens(self) -> int:
        return self.settings.kv_tokens or self.profile.kv_tokens

    def make_client(self, keep_steps: bool) -> "SimulatedClient":
        from streamrag.backends.simulated.client import SimulatedClient, simulated_engine
        from streamrag.backends.simulated.config import EngineShape
        from streamrag.backends.vllm.scheduler.host_memory.step_parts import parts_of

        settings, block_size = self.settings, self.profile.block_size
        longest = longest_prompt(self.queries) + settings.num_output_tokens + 1
        max_model_len = -(-longest // block_size) * block_size
        if max_model_len > self.kv_tokens:
            raise ConfigurationError(
                f"kv_tokens={self.kv_tokens}: one request of this load needs {max_model_len}; give at least so many, "
                "or a smaller budget for contexts (max_context_tokens, --max-context-tokens)"
            )
        if self.kv_tokens // block_size > MAX_BLOCKS:
            raise ConfigurationError(
                f"kv_tokens={self.kv_tokens}: a KV cache of more than {MAX_BLOCKS:,} blocks of {block_size} tokens is "
                "not simulated; give fewer"
            )
        shape = EngineShape(
            num_blocks=self.kv_tokens // block_size,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=token_budget(settings),
            max_num_seqs=settings.max_num_seqs,
            is_async=self.profile.is_async,
            has_prefix_cache=settings.has_prefix_cache,
            streamrag=self._scheduler_options(),
        )
        copies = self.profile.copies if _has_host_memory(settings) else None
        self.copy_log = CopyLog(copies, block_size) if copies and keep_steps else None
        self.step_times = StepTimes(
            self.profile, parts_of, copies=copies, log=self.copy_log, unsteady_seed=self.unsteady_seed
        )
        engine = simulated_engine(shape, self.step_times, is_stock=settings.arm != "streaming", copy_costs=copies)
        return SimulatedClient(engine, delivery_s=self.profile.delivery_s, keep_steps=keep_steps)

    def _scheduler_options(self) -> dict[str, Any]:
        settings = self.settings
        if settings.arm != "streaming":
            return {}
        options: dict[str, Any] = {"policy": settings.policy, "eviction": settings.eviction}
        if _has_host_memory(settings):
            assert self.profile.copies
            # In blocks of the profile: those of the simulated engine have a size that means nothing.
            num_blocks = (settings.host_kv_bytes or HOST_KV_BYTES) // self.profile.copies.block_bytes
            if settings.host_kv_bytes is None:
                num_blocks = min(num_blocks, MOST_TIMES_DEVICE * self.kv_tokens // self.profile.block_size)
            options["num_host_blocks"] = num_blocks
            options["profile"] = settings.profile
        return {**options, **settings.scheduler_options}

    def to_end(self, keep_steps: bool) -> CellResult:
        client = self.make_client(keep_steps)
        start_s = time.perf_counter()
        try:
            run_virtual(self.play(client))
        except DeadlockError:
            if self.settings.arm != "stock-sessions":
                raise
        return self.result(client, time.perf_counter() - start_s)

    async def play(self, client: "SimulatedClient") -> None:
        async with client, asyncio.TaskGroup() as tasks:
            for query in self.queries:
                # Tasks wait for their query's arrival one after the other, so that few timers exist at a time.
                await asyncio.sleep(query.arrival_s - asyncio.get_running_loop().time())
                tasks.create_task(self._play_one(client, query), name=query.query_id)

    async def _play_one(self, client: "SimulatedClient", query: TracedQuery) -> None:
        arriving = Arriving(query, Tokens(), 0.0)
        self.timings[query.query_id] = await run_query(
            self.settings.arm, client, arriving, self.settings.num_output_tokens
        )
        self.progress(len(self.timings), len(self.queries))

    def result(self, client: "SimulatedClient", wall_s: float) -> CellResult:
        requests = request_results(self.settings, self.queries, self.timings, self.profile, client.records)
        completion_s = max((r.finished_s for r in requests), default=0.0)
        steps = tuple(
            StepResult(
                step.start_s,
                step.end_s,
                sum(step.num_tokens_of.values()),
                len(step.num_tokens_of),
                tuple(StepPart(query_id, num) for query_id, num in step.num_tokens_of.items()),
            )
            for step in client.steps
        )
        provenance = {
            **versions(),
            "profile": self.profile.name,
            "profile_provenance": dict(self.profile.provenance),
            "kv_tokens": self.kv_tokens,
            "simulated_s_per_wall_s": round(completion_s / wall_s, 1),
            "num_steps": client.num_steps,
            **self.load.provenance(),
        }
        return CellResult(
            self.settings,
            requests,
            client.busy_s,
            completion_s,
            wall_s,
            steps,
            tuple(self.copy_log.copies) if self.copy_log else (),
            provenance,
            num_unfinished=len(self.queries) - len(requests),
            copy_totals=self.step_times.totals,
        )
