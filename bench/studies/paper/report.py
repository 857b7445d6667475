"""Writes the report: one Markdown page with its pictures beside it."""

import json
import math
from pathlib import Path
from typing import Any

from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions

from . import effects
from .markdown import command
from .pictures import Pictures
from .plan import Plan, Scale
from .points import MORE_KINDS
from .results import Results, code_hash
from .sections import (
    ablations,
    beat,
    hints,
    invalidated,
    payers,
    planning_cost,
    pressure,
    seeds,
    throughput,
    ttft,
)
from .sections.section import Report
from .standing import floor_of, seconds_of
from .ways import OURS_BUDGET, PROFILE

MODULES = (
    beat,
    seeds,
    hints,
    payers,
    ablations,
    ttft,
    pressure,
    throughput,
    invalidated,
    planning_cost,
)
SECTIONS = tuple(module.SECTION for module in MODULES)

HEAD = """# The paper's evaluation, simulated, and what beats it

> `make paper` writes this page. Every cell runs in virtual time on vLLM's own scheduler and KV manager, with the step
> times of profile `{profile}`: nothing of it was measured on such a machine, and nothing was fitted to a row
> that streams. The paper is arXiv 2604.16395; published figures stand beside ours wherever there are any.

{extent}

"""


def write(path: Path, scale: Scale, plan: Plan, results: Results) -> None:
    """The page, its pictures and its figures as JSON."""
    report = Report(scale, results, Pictures(path.with_name("pictures"), path))
    parts = [HEAD.format(profile=PROFILE, extent=_extent(scale, plan, results))]
    parts += ["## Which of the paper's findings show\n\n", effects.as_table(results)]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n{command(section.name)}\n{section.write(report)}")
    write_atomic(path, "".join(parts))
    write_atomic(path.with_name("results.json"), json.dumps(_figures(results), indent=1) + "\n")


def _extent(scale: Scale, plan: Plan, results: Results) -> str:
    sizes = [
        f"{kind}: seeds {', '.join(map(str, size.seeds))}, {size.num_crawls:,} crawls or "
        f"{size.num_searches or 500:,} searches each"
        for kind, size in scale.sizes.items()
    ]
    num_cells = sum(map(len, plan.values()))
    num_there = sum(len(plan[key]) for key in results.pools if key in plan)
    of = f"{num_cells:,} cells" if num_there == num_cells else f"**{num_there:,} of {num_cells:,} cells so far**"
    told = ", ".join(f"{name} {version}" for name, version in {**versions(), "code": code_hash()}.items())
    budget = "the published ones" if OURS_BUDGET is None else f"{OURS_BUDGET:,} tokens a step"
    return f"{of}. {'; '.join(sizes)}. Token budget of ours: {budget}. {told}."


def _figures(results: Results) -> dict[str, Any]:
    """Of every way at every point."""
    rows = []
    pooled = {
        (point, way): found
        for point, way in results.pools
        if point.kind in MORE_KINDS and (found := results.all_seeds(point, way)) and found != results.pool(point, way)
    }
    for (point, way), pool in (*results.pools.items(), *pooled.items()):
        seconds, floor = seconds_of(pool), floor_of(pool)
        rows.append(
            {
                "point": point.name,
                "kind": "all seeds" if pool is pooled.get((point, way)) else point.kind,
                "way": way.name,
                "seeds": pool.seeds,
                "num_requests": len(pool.values(lambda d: d.floor_s)),
                "ttft_after_retrieval_s": _rounded(seconds),
                "floor_s": _rounded(floor),
                "busy_s": round(pool.total(lambda d: d.busy_s).value, 2),
                "completion_s": round(pool.total(lambda d: d.completion_s).value, 2),
                "num_preemptions": dict(pressure.preemptions(pool)),
                "num_unfinished": sum(d.num_unfinished for d in pool.digests),
            }
        )
    return {"profile": PROFILE, "code": code_hash(), "versions": versions(), "results": rows}


def _rounded(seconds: Any) -> dict[str, float | None]:
    return {rank: round(value, 5) if math.isfinite(value) else None for rank, value in seconds.items()}
