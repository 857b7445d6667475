"""Run a cell in virtual time, on vLLM's own scheduler and KV cache manager without a model. Imports vLLM.

CellSettings ─▶ load (workload) ─▶ clients (arms) ─▶ SimulatedClient ─▶ SimulatedEngine ─▶ CellResult
                                    └────────── one event loop in virtual time ──────────┘
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamrag.backends.simulated.client import SimulatedClient, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.virtual_time import DeadlockError, run_virtual
from streamrag.backends.vllm.facts import MOST_TIMES_DEVICE
from streamrag.backends.vllm.scheduler.host_memory.costs import parts_of
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.arms import QueryTiming, run_query
from streamrag_bench.cell import CellProgress, CellResult, CellSettings, StepPart, StepResult
from streamrag_bench.provenance import versions
from streamrag_bench.request_results import request_results
from streamrag_bench.simulated_step_times import CopyLog, StepTimes
from streamrag_bench.workload import (
    Arriving,
    FittedLoad,
    Tokens,
    fit_contexts,
    load_trace,
    longest_prompt,
    make_load,
    token_budget,
)

HOST_KV_BYTES = 128 << 30  # default host memory for KV per worker: a quarter of the 512 GiB per device of a usual node
MAX_BLOCKS = 4_000_000  # most KV blocks to simulate; each takes some 200 bytes of memory


def run_cell(
    settings: CellSettings,
    *,
    trace: Trace | None = None,
    keep_steps: bool = False,
    progress: CellProgress = lambda num_done, num_total: None,
    unsteady_seed: int = 0,
) -> CellResult:
    """Simulate one cell of a benchmark. The same settings and trace give the same result, except for `wall_s`.

    If the profile has measured slowdowns, `unsteady_seed` seeds the steps that they apply to. If the stock sessions
    deadlock, the result has the answered queries, and `num_unfinished` counts the others.

    :raises ConfigurationError: the settings are for wall time, or invalid.
    """
    profile = _checked_profile(settings)
    load = fit_contexts(settings, make_load(settings, trace or load_trace(settings)), _model_len(profile))
    with _few_collections():
        return _Simulation(settings, load, profile, unsteady_seed, keep_steps).run(progress)


def _checked_profile(settings: CellSettings) -> StepProfile:
    """Return the hardware profile. Raises ConfigurationError without a virtual clock and a profile.

    Likewise if KV is to be copied, but the profile has no copies or the engine no prefix cache.
    """
    if settings.clock != "virtual":
        raise ConfigurationError(f"clock={settings.clock!r}: a simulation runs in virtual time only")
    if settings.profile is None:
        raise ConfigurationError("virtual time needs a hardware profile; give one, e.g. profile='h200-llama8b-tp2'")
    profile = load_profile(settings.profile)
    if _has_host_memory(settings) and profile.copies is None:
        raise ConfigurationError(
            f"eviction={settings.eviction!r}: profile {settings.profile!r} does not say how long copies take; "
            "use another profile, or eviction='recompute'"
        )
    if _has_host_memory(settings) and not settings.has_prefix_cache:
        raise ConfigurationError(
            f"eviction={settings.eviction!r} needs a prefix cache, whose hashes identify KV blocks in host memory"
        )
    return profile


def _model_len(profile: StepProfile) -> int | None:
    """Return the model length of the measured engine; None if the profile does not record it."""
    length = profile.provenance.get("max_model_len")
    return length if type(length) is int else None


def _has_host_memory(settings: CellSettings) -> bool:
    return settings.arm == "streaming" and settings.eviction != "recompute"


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely in the block: hundreds of thousands of long-lived objects make full collections slow.

    Objects that exist before the block are frozen, so that the collection at its end skips them: after vLLM is
    imported, they would take half a second.
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


class _Simulation:
    """A load with the engine in virtual time that replays it: made for one call of `run`."""

    def __init__(
        self, settings: CellSettings, load: FittedLoad, profile: StepProfile, unsteady_seed: int, keep_steps: bool
    ) -> None:
        self._settings = settings
        self._load = load
        self._profile = profile
        self._kv_tokens = settings.kv_tokens or profile.kv_tokens
        self._timings: dict[str, QueryTiming] = {}
        copies = profile.copies if _has_host_memory(settings) else None
        self._copy_log = CopyLog(copies, profile.block_size) if copies and keep_steps else None
        self._step_times = StepTimes(profile, parts_of, copies=copies, log=self._copy_log, unsteady_seed=unsteady_seed)
        is_stock = settings.arm != "streaming"
        engine = simulated_engine(self._shape(), self._step_times, is_stock=is_stock, copy_costs=copies)
        self._client = SimulatedClient(engine, delivery_s=profile.delivery_s, keep_steps=keep_steps)

    def _shape(self) -> EngineShape:
        """Return the engine's shape, whose model length is the load's longest request, rounded up to blocks.

        :raises ConfigurationError: the KV cache cannot hold that request, or has more than `MAX_BLOCKS`.
        """
        settings, block_size, kv_tokens = self._settings, self._profile.block_size, self._kv_tokens
        longest = longest_prompt(self._load.queries) + settings.num_output_tokens + 1
        max_model_len = -(-longest // block_size) * block_size
        if max_model_len > kv_tokens:
            raise ConfigurationError(
                f"kv_tokens={kv_tokens}: one request of this load needs {max_model_len}; give at least that many, "
                "or a smaller budget for contexts (max_context_tokens, --max-context-tokens)"
            )
        if kv_tokens // block_size > MAX_BLOCKS:
            raise ConfigurationError(
                f"kv_tokens={kv_tokens}: at most {MAX_BLOCKS:,} blocks of {block_size} tokens can be simulated; "
                "give fewer tokens"
            )
        return EngineShape(
            num_blocks=kv_tokens // block_size,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=token_budget(settings),
            max_num_seqs=settings.max_num_seqs,
            is_async=self._profile.is_async,
            has_prefix_cache=settings.has_prefix_cache,
            streamrag=self._scheduler_options(),
        )

    def _scheduler_options(self) -> dict[str, Any]:
        """Return our scheduler's options: policy, eviction and, if KV is copied, host blocks and profile.

        For arms other than streaming, return {}. The `scheduler_options` of the settings take precedence. The host
        blocks are those that fit `host_kv_bytes` or, by default, `HOST_KV_BYTES`; only by default they are at most
        `MOST_TIMES_DEVICE` times the blocks of the KV cache.
        """
        settings = self._settings
        if settings.arm != "streaming":
            return {}
        options: dict[str, Any] = {"policy": settings.policy, "eviction": settings.eviction}
        if _has_host_memory(settings):
            assert self._profile.copies
            # The profile's block size: the simulated engine's blocks have no real size in bytes.
            num_blocks = (settings.host_kv_bytes or HOST_KV_BYTES) // self._profile.copies.block_bytes
            if settings.host_kv_bytes is None:
                num_blocks = min(num_blocks, MOST_TIMES_DEVICE * self._kv_tokens // self._profile.block_size)
            options["num_host_blocks"] = num_blocks
            options["profile"] = settings.profile
        return {**options, **settings.scheduler_options}

    def run(self, progress: CellProgress) -> CellResult:
        """Simulate the load; return its result. Raises DeadlockError, but a run of vLLM's own sessions just ends."""
        start_s = time.perf_counter()
        try:
            run_virtual(self._play(progress))
        except DeadlockError:
            if self._settings.arm != "stock-sessions":
                raise
        return self._result(time.perf_counter() - start_s)

    async def _play(self, progress: CellProgress) -> None:
        """Open the client, run a task per query from its arrival, and wait; each stores its timing when done."""
        queries, settings, client = self._load.queries, self._settings, self._client

        async def play_one(query: TracedQuery) -> None:
            arriving = Arriving(query, Tokens(), 0.0)
            timing = await run_query(settings.arm, client, arriving, settings.num_output_tokens)
            self._timings[query.query_id] = timing
            progress(len(self._timings), len(queries))

        async with client, asyncio.TaskGroup() as tasks:
            for query in queries:
                # A task starts when its query arrives, so that few timers exist at a time.
                await asyncio.sleep(query.arrival_s - asyncio.get_running_loop().time())
                tasks.create_task(play_one(query), name=query.query_id)

    def _result(self, wall_s: float) -> CellResult:
        """Return the cell's result: answered queries, number of others, kept steps, copies; the run took `wall_s`."""
        settings, queries, client, profile = self._settings, self._load.queries, self._client, self._profile
        requests = request_results(settings, queries, self._timings, profile, client.records)
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
            "profile": profile.name,
            "profile_provenance": dict(profile.provenance),
            "kv_tokens": self._kv_tokens,
            "simulated_s_per_wall_s": round(completion_s / wall_s, 1),
            "num_steps": client.num_steps,
            **self._load.provenance(),
        }
        return CellResult(
            settings,
            requests,
            client.busy_s,
            completion_s,
            wall_s,
            steps,
            tuple(self._copy_log.copies) if self._copy_log else (),
            provenance,
            num_unfinished=len(queries) - len(requests),
            copy_totals=self._step_times.totals,
        )
