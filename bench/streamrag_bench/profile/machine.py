"""Measure a hardware profile of a model on this machine.

engine  ── steps (three passes) ── recomputation, alone and beside a batch ──▶ stopped ── copies ──▶ TableProfile
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import anyio.to_thread

from streamrag.backends.vllm.facts import EngineFacts
from streamrag.engine.costs.step_profiles import TableProfile, recompute_s
from streamrag_bench.measured_engine import running_engine
from streamrag_bench.profile.copies import CopyTimes, block_counts, measure_copies
from streamrag_bench.profile.recomputation import NUM_CONTEXT_BESIDE, RecomputeTimes, measure_recompute, prompt_sizes
from streamrag_bench.profile.step_times import NUM_PASSES, measure, table_profile, warm_up

StepProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the current step, the number of finished steps, and the number of all steps (None while unknown)."""

NUM_BESIDE = 8
MOST_TOGETHER = 16  # maximum number of requests in a measured step
MAX_RECOMPUTE_CPU_S, MAX_RECOMPUTE_CUDA_S = 30.0, 90.0


async def measure_machine(model: str, engine_args: Mapping[str, Any], progress: StepProgress) -> TableProfile:
    """Return a profile of steps and recomputation on a vLLM started here, and of copies after it has stopped.

    Raises the errors of `running_engine`.
    """
    progress("starting the engine", 0, None)
    async with running_engine(model, engine_args, policy=None) as client:
        facts = client.facts
        budget, longest = facts.max_num_batched_tokens, facts.max_model_len
        counts, sizes = block_counts(facts), prompt_sizes(longest)
        num_total = NUM_PASSES + len(sizes) + len(counts)
        progress("warming up", 0, num_total)
        await warm_up(client, budget, longest)
        passes = []
        for number in range(NUM_PASSES):
            progress(f"steps, pass {number + 1} of {NUM_PASSES}", number, num_total)
            passes.append(await measure(client, budget, longest, min(facts.max_num_seqs, MOST_TOGETHER)))
        times = await measure_recompute(
            client,
            budget,
            longest,
            min(NUM_BESIDE, facts.max_num_seqs - 1),
            max_s=MAX_RECOMPUTE_CUDA_S if facts.is_cuda else MAX_RECOMPUTE_CPU_S,
            progress=lambda size: progress(f"recomputing {size:,} tokens", NUM_PASSES + sizes.index(size), num_total),
        )
        profile = table_profile([*passes, times.as_pass()], client, f"{facts.model} on {facts.device}")
        progress("stopping the engine", NUM_PASSES + len(sizes), num_total)
    copies = await anyio.to_thread.run_sync(
        lambda: measure_copies(
            facts,
            lambda num: progress(f"copying {num:,} blocks", NUM_PASSES + len(sizes) + counts.index(num), num_total),
        )
    )
    progress("done", num_total, num_total)
    return _described(profile, facts, times, copies)


def _described(profile: TableProfile, facts: EngineFacts, times: RecomputeTimes, copies: CopyTimes) -> TableProfile:
    """Return the profile with the device, the sizes of the model, copy times and provenance."""
    profile = replace(
        profile,
        device=f"{facts.tensor_parallel_size} x {facts.device}" if facts.is_cuda else facts.device,
        tensor_parallel_size=facts.tensor_parallel_size,
        num_layers=facts.num_layers,
        copies=copies.costs(),
    )
    provenance = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": facts.model,
        "dtype": facts.dtype,
        "model_runner": facts.model_runner,
        "kv_dtype": facts.kv_dtype,
        "tensor_parallel_size": facts.tensor_parallel_size,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "max_model_len": facts.max_model_len,
        **profile.provenance,
        "copies": "scattered blocks, medians of repeated copies of one rank while nothing else ran",
        "recompute_s": _recompute_figures(profile, facts.max_num_batched_tokens, times),
    }
    return replace(profile, provenance=provenance)


def _recompute_figures(profile: TableProfile, budget: int, times: RecomputeTimes) -> dict[str, Any]:
    """Return median seconds by size, alone and beside decodes, and the fit's median error as a share.

    The error is over positive times, and None if there are none.
    """
    batch = ((1, NUM_CONTEXT_BESIDE),) * times.num_beside
    alone = {size: median(seconds) for size, seconds in times.alone.items()}
    beside = {size: median(seconds) for size, seconds in times.beside.items()}
    pairs = [(recompute_s(profile, 0, size, budget), measured_s) for size, measured_s in alone.items()]
    pairs += [(recompute_s(profile, 0, size, budget, batch), measured_s) for size, measured_s in beside.items()]
    # A measured time is a difference of two steps; noise can make it negative.
    errors = [abs(fitted_s / measured_s - 1) for fitted_s, measured_s in pairs if measured_s > 0]
    return {
        "num_beside": times.num_beside,
        "alone": {str(size): measured_s for size, measured_s in alone.items()},
        "beside": {str(size): measured_s for size, measured_s in beside.items()},
        "median_error_of_the_fit": median(errors) if errors else None,
    }
