"""Results of cells as an engine might have given them, from seeded random numbers."""

import random
from dataclasses import replace

from streamrag.records import ChunkRecord, PreemptionRecord, RequestRecord
from streamrag_bench.cell import CellResult, CellSettings, CopyResult, CopyTotals, RequestResult, StepPart, StepResult

__all__ = ["made_result", "settings"]


def settings(**changes: object) -> CellSettings:
    """Those of a small streaming cell in virtual time."""
    defaults = CellSettings("virtual", "crawler", "streaming", qps=2.0, num_queries=60, profile="h200")
    return replace(defaults, **changes)  # type: ignore[arg-type]


def made_result(of: CellSettings, *, with_steps: bool = False) -> CellResult:
    """The load depends on the seed and the rate only, as that of real cells does."""
    load, engine = random.Random(f"{of.seed} {of.qps}"), random.Random(repr(of))
    slowness = {"no-streaming": 8.0, "warming": 2.0, "stock-sessions": 1.6, "streaming": 1.2}[of.arm]
    arrival_s = 0.0
    requests = []
    for i in range(of.num_queries or 60):
        arrival_s += load.expovariate(of.qps or 1.0)
        floor_s = load.lognormvariate(-4, 1.2)
        wait_s = floor_s * (1 + slowness * (of.qps or 1.0) * engine.expovariate(2.0))
        requests.append(_request(of, f"q{i}", arrival_s, floor_s, wait_s, load, engine))
    steps, copies = _steps(requests) if with_steps else ((), ())
    completion_s = max(r.finished_s for r in requests)
    num_blocks = sum(r.record.num_loaded for r in requests if r.record) // 16
    totals = CopyTotals(2 * num_blocks, num_blocks, 2 * num_blocks << 20, num_blocks << 20, 0.2, 0.1)
    return CellResult(
        of,
        tuple(requests),
        0.4 * completion_s,
        completion_s,
        2.5,
        steps,
        copies,
        {"streamrag": "0", "profile": "made"},
        copy_totals=totals if of.eviction != "recompute" else None,
    )


def _request(
    of: CellSettings,
    name: str,
    arrival_s: float,
    floor_s: float,
    wait_s: float,
    load: random.Random,
    engine: random.Random,
) -> RequestResult:
    times = [arrival_s + 0.1]
    sizes = [load.randrange(200, 900)]
    for _ in range(load.randrange(0, 9)):
        times.append(times[-1] + load.expovariate(1.5) * of.delay)
        sizes.append(sizes[-1] + load.randrange(200, 3000))
    ends_s = times[-1] + 0.01
    is_update = of.workload == "anns"
    seen = zip(times, sizes, [0, *sizes], strict=False)
    chunks = tuple(ChunkRecord(t, n, engine.randint(0, b) if is_update else b, b) for t, n, b in seen)
    chunks = chunks if of.arm == "streaming" else ()
    fate = engine.choice(["swap", "recompute"]) if of.eviction == "cost" else of.eviction
    preemptions = (PreemptionRecord(ends_s, fate, 128),) if engine.random() < 0.2 else ()
    record = RequestRecord(
        request_id=name,
        outcome="finished",
        is_stream=of.arm == "streaming",
        arrival_s=arrival_s,
        queued_s=arrival_s,
        scheduled_s=times[0],
        first_kv_s=times[0] + 0.02,
        last_kv_s=ends_s + wait_s,
        finished_s=ends_s + wait_s + 0.05,
        num_prompt_tokens=sizes[-1],
        num_output_tokens=1,
        num_computed=sizes[-1],
        num_recomputed=sum(p.num_tokens_lost for p in preemptions if p.fate == "recompute"),
        num_invalidated=sum(chunk.num_invalidated for chunk in chunks),
        num_from_cache=0,
        chunks=chunks,
        preemptions=preemptions,
        num_loaded=sum(p.num_tokens_lost for p in preemptions if p.fate == "swap"),
    )
    return RequestResult(name, arrival_s, ends_s, ends_s + wait_s, ends_s + wait_s + 0.05, len(sizes), floor_s, record)


def _steps(requests: list[RequestResult]) -> tuple[tuple[StepResult, ...], tuple[CopyResult, ...]]:
    steps = []
    for r in requests:
        starts = [c.arrival_s for c in r.record.chunks] if r.record else []
        starts.append(r.first_token_s - 0.02)
        steps += [StepResult(s, s + 0.02, 100, 1, (StepPart(r.query_id, 100),)) for s in starts]
    copies = (CopyResult(requests[0].query_id, "to-host", requests[0].arrival_s, requests[0].arrival_s + 0.01, 64),)
    return tuple(sorted(steps, key=lambda step: step.start_s)), copies
