"""Runs a cell on a real engine, in wall time: the same loads and the same arms as the simulator.

CellSettings ─▶ load (workload) ─▶ clients (arms) ─▶ EngineClient ─▶ vLLM ─▶ CellResult
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from streamrag.bench.arms import Timing, check_arm, run_query
from streamrag.bench.cell import Arm, CellResult, CellSettings, RequestResult, StepResult
from streamrag.bench.floor import floor_s
from streamrag.bench.provenance import versions
from streamrag.bench.query_records import merged, shifted
from streamrag.bench.workload import Arriving, Tokens, load_trace, longest_prompt, make_load, token_budget
from streamrag.engine.costs import Part, TableProfile, fit_table
from streamrag.errors import BackendError, ConfigurationError
from streamrag.tasks import wait_regardless
from streamrag.trace.values import Trace, TracedQuery

if TYPE_CHECKING:
    from streamrag.backends.engine_client import EngineClient

__all__ = ["measure_profile", "run_cell"]

Progress = Callable[[int, int], None]

PATIENCE_S = 60.0
"""Without any answer, after which an engine is taken to stand still: idle stock sessions can starve the rest."""

NUM_REPETITIONS = 3
"""Of each measured step. The first of all steps takes seconds and is not counted."""
NUM_IN_VOCABULARY = 512
"""Token ids are below this, which every model has."""


def run_cell(
    settings: CellSettings, *, trace: Trace | None = None, keep_steps: bool = False, progress: Progress | None = None
) -> CellResult:
    """Run one cell on a real engine, which takes as long as the load.

    :raises ConfigurationError: the settings are for virtual time, or vLLM refuses them.
    """
    _check(settings)
    queries = make_load(settings, trace or load_trace(settings))
    check_arm(settings.arm, queries)
    try:
        return asyncio.run(_run(settings, queries, keep_steps, progress or (lambda num_done, num_total: None)))
    finally:
        gc.collect()  # vLLM's engine, which must not live until the interpreter ends


def _check(settings: CellSettings) -> None:
    if settings.clock != "wall":
        raise ConfigurationError(f"clock={settings.clock!r}: a real engine runs in wall time only")
    if settings.profile is not None:
        raise ConfigurationError(f"profile={settings.profile!r} is for virtual time; a real engine needs none")
    if settings.model is None:
        raise ConfigurationError("wall time needs a model: give its folder or its name")
    if settings.eviction != "recompute":
        raise ConfigurationError(f"eviction={settings.eviction!r}: only 'recompute' is there so far")


async def _run(
    settings: CellSettings, queries: Sequence[TracedQuery], keep_steps: bool, progress: Progress
) -> CellResult:
    from streamrag.backends.engine_client import running_engine

    assert settings.model is not None
    policy = settings.policy if settings.arm == "streaming" else None
    budget = token_budget(settings)
    max_model_len = longest_prompt(queries) + settings.num_output_tokens + 1
    args: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": budget,
        "max_num_seqs": settings.max_num_seqs,
        "additional_config": {"streamrag": dict(settings.scheduler_options)} if policy is not None else {},
    }
    async with running_engine(settings.model, args, policy=policy, kv_tokens=settings.kv_tokens) as client:
        profile = await measure_profile(client, settings.model, budget, max_model_len)
        await client.reset_prefix_cache()
        num_steps_before = len(client.steps)
        start_s = asyncio.get_running_loop().time()
        timings = await _play(settings, queries, client, start_s, progress)
        wall_s = asyncio.get_running_loop().time() - start_s
        measured = client.steps[num_steps_before:]
        provenance = {
            **versions(),
            "model": settings.model,
            "kv_tokens": client.kv_tokens,
            "block_size": client.block_size,
            "is_async": client.is_async,
            "simulated_s_per_wall_s": 1.0,
            "num_steps": len(measured),
            "floor": f"steps as measured before the load: {profile.points}, {profile.pair_s=}, {profile.delivery_s=}",
        }
    requests = tuple(
        _request(query, timing, start_s, profile, budget, client)
        for query in queries
        if (timing := timings.get(query.query_id))
    )
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
        provenance=provenance,
        num_unfinished=len(queries) - len(requests),
    )


async def _play(
    settings: CellSettings, queries: Sequence[TracedQuery], client: "EngineClient", start_s: float, progress: Progress
) -> dict[str, Timing]:
    timings: dict[str, Timing] = {}

    async def play_one(query: TracedQuery) -> None:
        arriving = Arriving(query, Tokens(NUM_IN_VOCABULARY), start_s)
        timings[query.query_id] = await run_query(settings.arm, client, arriving, settings.num_output_tokens)
        progress(len(timings), len(queries))

    tasks = [asyncio.create_task(play_one(query), name=query.query_id) for query in queries]
    try:
        await _wait_for(tasks, start_s + max(q.arrival_s + q.end_s for q in queries), settings.arm)
    finally:
        for task in tasks:
            task.cancel()
        await wait_regardless(tasks)
    return timings


async def _wait_for(tasks: Sequence["asyncio.Task[None]"], last_end_s: float, arm: Arm) -> None:
    """Until all are done; or, of the stock sessions, until nothing has moved for long after all retrieval ended."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if not done and asyncio.get_running_loop().time() > last_end_s + PATIENCE_S:
            if arm == "stock-sessions":
                return
            raise BackendError(f"{len(pending)} queries got no answer for {PATIENCE_S:g} s: {arm} stands still")


def _request(
    query: TracedQuery,
    timing: Timing,
    start_s: float,
    profile: TableProfile,
    budget: int,
    client: "EngineClient",
) -> RequestResult:
    record = merged(client.records.get(query.query_id, ()))
    return RequestResult(
        query_id=query.query_id,
        arrival_s=query.arrival_s,
        retrieval_end_s=timing.retrieval_end_s - start_s,
        first_token_s=timing.first_token_s - start_s,
        finished_s=timing.finished_s - start_s,
        num_chunks=len(query.events),
        floor_s=floor_s(query, profile, budget),
        record=record and shifted(record, -start_s),
    )


async def measure_profile(client: "EngineClient", name: str, budget: int, max_model_len: int) -> TableProfile:
    """What steps of an idle engine take, each alone: by tokens, and by the context before them.

    The engine times its steps; what a request takes beside them is the delivery. Takes a few seconds on a small model.
    """
    tokens = _Fresh()
    sizes = sorted(
        {n for n in (1, 16, 64, 256, 512, 1_024, 2_048, 4_096, budget) if n <= min(budget, max_model_len - 2)}
    )
    await _first_token_s(client, tokens.take(sizes[-1]))  # warm-up
    measured: list[tuple[Sequence[Part], float]] = []
    delivery_s: list[float] = []
    contexts = sorted({0, *(n for n in (budget, 4 * budget) if n + sizes[-1] < max_model_len - 1)})
    for context in contexts:
        prefix = tokens.take(context)
        context -= context % client.block_size
        if context:
            await _first_token_s(client, prefix)  # from now on in the prefix cache
        for size in sizes:
            for _ in range(NUM_REPETITIONS):
                num_before = len(client.steps)
                took_s = await _first_token_s(client, prefix[:context] + tokens.take(size))
                steps = client.steps[num_before:]
                if len(steps) == 1 and steps[0].num_tokens == size:
                    measured.append(([(size, context)], steps[0].elapsed_s))
                    delivery_s.append(took_s - steps[0].elapsed_s)
    points, pair_s, request_s = fit_table(measured, sizes)
    return TableProfile(
        name=name,
        device="this machine",
        points=points,
        pair_s=pair_s,
        request_s=request_s,
        kv_tokens=client.kv_tokens,
        block_size=client.block_size,
        is_async=client.is_async,
        delivery_s=max(sorted(delivery_s)[len(delivery_s) // 2], 0.0),
        provenance={"measured": f"{len(measured)} steps, each of one request alone", **versions()},
    )


class _Fresh:
    """Tokens that no request has had before."""

    def __init__(self) -> None:
        self._num_taken = 0

    def take(self, num_tokens: int) -> list[int]:
        from streamrag.trace.values import TracedChunk

        self._num_taken += 1
        return Tokens(NUM_IN_VOCABULARY).of_chunk(TracedChunk(f"measured {self._num_taken}", num_tokens))


async def _first_token_s(client: "EngineClient", token_ids: list[int]) -> float:
    start_s = time.monotonic()
    async with aclosing(client.generate("measured", token_ids, 1)) as answer:
        async for _ in answer:
            return time.monotonic() - start_s
    raise AssertionError("answered without a token")
