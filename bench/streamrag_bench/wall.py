"""Run a cell on a real engine in wall time, with the loads and arms of the simulator.

CellSettings ─▶ load (workload) ─▶ clients (arms) ─▶ EngineClient ─▶ vLLM ─▶ CellResult
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.errors import BackendError, ConfigurationError
from streamrag.support.tasks import cancel_and_wait
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.arms import QueryTiming, run_query
from streamrag_bench.cell import Arm, CellProgress, CellResult, CellSettings, StepResult
from streamrag_bench.measured_engine import EngineClient, model_len, running_engine
from streamrag_bench.profile.step_times import NUM_IN_VOCABULARY, measure_profile
from streamrag_bench.provenance import versions
from streamrag_bench.request_results import request_results
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

PATIENCE_S = 60.0
"""Seconds without an answer after which an engine counts as deadlocked: idle stock sessions can starve the others."""


def _ignore_progress(num_done: int, num_total: int) -> None: ...


def run_cell(
    settings: CellSettings,
    *,
    trace: Trace | None = None,
    keep_steps: bool = False,
    progress: CellProgress = _ignore_progress,
) -> CellResult:
    """Run one cell on a real engine, and return its result. The run takes as long as the load.

    :raises ConfigurationError: the settings are not for a real engine, or they or the trace are unusable.
    :raises BackendError: the engine is deadlocked. If vLLM's own sessions are deadlocked, the result counts the
        unfinished queries instead.
    """
    model = _checked_model(settings)
    queries = make_load(settings, trace or load_trace(settings))
    try:
        return asyncio.run(_run(settings, fit_contexts(settings, queries, model_len(model)), keep_steps, progress))
    finally:
        gc.collect()  # vLLM's engine, which must be freed before the interpreter exits


def _checked_model(settings: CellSettings) -> str:
    """Return the cell's model; raise ConfigurationError for virtual time, no model, or no prefix cache."""
    if settings.clock != "wall":
        raise ConfigurationError(f"clock={settings.clock!r}: a real engine runs in wall time only")
    if settings.model is None:
        raise ConfigurationError("wall time needs a model; give its folder or its name")
    if not settings.has_prefix_cache:
        raise ConfigurationError("has_prefix_cache=False is for virtual time only")
    return settings.model


async def _run(settings: CellSettings, load: FittedLoad, keep_steps: bool, progress: CellProgress) -> CellResult:
    """Start the engine, measure its steps for the floors, replay the load on an empty cache, return the result."""
    queries = load.queries
    async with engine_for(settings, queries) as client:
        longest = max_model_len(settings, queries)
        profile = await measure_profile(client, _checked_model(settings), token_budget(settings), longest)
        await client.reset_prefix_cache()
        result = await play_cell(settings, queries, client, profile, keep_steps=keep_steps, progress=progress)
        return replace(result, provenance={**result.provenance, **load.provenance()})


def max_model_len(settings: CellSettings, queries: Sequence[TracedQuery]) -> int:
    return longest_prompt(queries) + settings.num_output_tokens + 1


@asynccontextmanager
async def engine_for(
    settings: CellSettings, queries: Sequence[TracedQuery], engine_args: Mapping[str, Any] | None = None
) -> AsyncIterator[EngineClient]:
    """Start an engine for `play_cell`, which may be called repeatedly, yield its client, and stop it after the block.

    Arms on vLLM's own scheduler can share it.

    engine_args: more arguments of vLLM's engine; those that follow from the settings take precedence.

    :raises ConfigurationError: the settings are for virtual time, or vLLM rejects them.
    """
    model = _checked_model(settings)
    args: dict[str, Any] = {
        **(engine_args or {}),
        "max_model_len": max_model_len(settings, queries),
        "max_num_batched_tokens": token_budget(settings),
        "max_num_seqs": settings.max_num_seqs,
        "additional_config": {},
    }
    policy = None
    if settings.arm == "streaming":
        policy = settings.policy
        host = {} if settings.host_kv_bytes is None else {"host_kv_bytes": settings.host_kv_bytes}
        args["additional_config"] = {KEY: {"eviction": settings.eviction, **host, **settings.scheduler_options}}
    async with running_engine(model, args, policy=policy, kv_tokens=settings.kv_tokens) as client:
        yield client


async def play_cell(
    settings: CellSettings,
    queries: Sequence[TracedQuery],
    client: EngineClient,
    profile: TableProfile,
    *,
    keep_steps: bool = False,
    progress: CellProgress = _ignore_progress,
) -> CellResult:
    """Clear the engine's records, but no cache, replay the load, and return the result with floors by `profile`. Raises
    BackendError if the engine is deadlocked; if vLLM's own sessions are, the result counts unfinished queries."""
    num_steps_before = len(client.steps)
    client.records.clear()
    start_s = asyncio.get_running_loop().time()
    timings = await _play(settings, queries, client, start_s, progress)
    wall_s = asyncio.get_running_loop().time() - start_s
    measured = client.steps[num_steps_before:]
    requests = request_results(settings, queries, timings, profile, client.records, start_s)
    steps = tuple(
        StepResult(s.end_s - s.elapsed_s - start_s, s.end_s - start_s, s.num_tokens, s.num_requests) for s in measured
    )
    return CellResult(
        settings,
        requests,
        busy_s=sum(s.elapsed_s for s in measured),
        completion_s=max((r.finished_s for r in requests), default=0.0),
        wall_s=wall_s,
        steps=steps if keep_steps else (),
        provenance=_provenance(settings, client, profile, len(measured)),
        num_unfinished=len(queries) - len(requests),
    )


def _provenance(settings: CellSettings, client: EngineClient, profile: TableProfile, num_steps: int) -> dict[str, Any]:
    """Return versions, the engine's facts, the number of steps, and a text on the step times behind the floors."""
    steps = ", ".join(f"{num:,.0f}: {step_s * 1e3:.3g}" for num, step_s in profile.points)
    return {
        **versions(),
        "model": settings.model,
        "dtype": client.facts.dtype,
        "model_runner": client.facts.model_runner,
        "kv_tokens": client.kv_tokens,
        "block_size": client.block_size,
        "is_async": client.is_async,
        "simulated_s_per_wall_s": 1.0,
        "num_steps": num_steps,
        "floor": (
            f"of steps as measured before the load, in ms by tokens: {steps}; "
            f"{profile.pair_s * 1e9:.3g} ns a pair, {profile.delivery_s * 1e3:.3g} ms for delivery"
        ),
    }


async def _play(
    settings: CellSettings,
    queries: Sequence[TracedQuery],
    client: EngineClient,
    start_s: float,
    progress: CellProgress,
) -> dict[str, QueryTiming]:
    """Replay all queries at their times, cancel those without an answer at the end, return the others' times by id."""
    timings: dict[str, QueryTiming] = {}

    async def play_one(query: TracedQuery) -> None:
        arriving = Arriving(query, Tokens(NUM_IN_VOCABULARY), start_s)
        timings[query.query_id] = await run_query(settings.arm, client, arriving, settings.num_output_tokens)
        progress(len(timings), len(queries))

    tasks = [asyncio.create_task(play_one(query), name=query.query_id) for query in queries]
    try:
        await _wait_for(tasks, start_s + max(q.arrival_s + q.end_s for q in queries), settings.arm)
    finally:
        await cancel_and_wait(tasks)
    return timings


async def _wait_for(tasks: Sequence["asyncio.Task[None]"], last_end_s: float, arm: Arm) -> None:
    """Wait until all tasks are done, or until no task has finished for `PATIENCE_S` after the end of retrieval.

    :raises BackendError: an arm other than the stock sessions is deadlocked.
    :raises Exception: the error of a failed task.
    """
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if not done and asyncio.get_running_loop().time() > last_end_s + PATIENCE_S:
            if arm == "stock-sessions":
                return
            raise BackendError(f"no answer to {len(pending)} queries for {PATIENCE_S:g} s: {arm} is deadlocked")
