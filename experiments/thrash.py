"""More idle streams than memory, chunks that come slowly, and no host memory: how much is computed twice?

    python experiments/thrash.py [--seeds N] [--json FILE]

In virtual time, our scheduler with its defaults against itself under the rule of Stream2LLM's FCFS (arXiv 2604.16395):
complete prompts before partial ones, in order of arrival; every partial prompt may take the memory of those behind it;
who lost its KV is prefilled again at once; steps are full. Both find again in vLLM's prefix cache what nobody has
overwritten; the paper's engine, which has no prefix cache, would compute still more of it again.
"""

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag.support.files import write_atomic
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag_bench.cell import CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.simulate import run_cell
from streamrag_bench.summary import Digest, digest, percentile

NUM_STREAMS, NUM_CHUNKS = 96, 10
MEAN_GAP_S = 6.0
CHUNK_TOKENS = (400, 1_600)
SPREAD_S = 40.0
"""In which all streams arrive."""
SHARES = (0.35, 0.25, 0.15)
"""KV memory, as shares of what all complete prompts would need."""
PROFILE = "h200-llama8b-tp2"
TARGET = 0.25
RULES: Mapping[str, Mapping[str, Any]] = {
    "ours": {},
    "paper's FCFS": {"can_partial_evict": True, "num_partial_tokens": None, "low_water": 0.0},
}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


def load(seed: int) -> Trace:
    """Streams that all live at the same time."""
    rng = random.Random(seed)
    queries = []
    for number in range(NUM_STREAMS):
        at_s, events = 0.0, []
        for index in range(NUM_CHUNKS):
            events.append(TracedAppend(at_s, TracedChunk(f"{number}.{index}", rng.randrange(*CHUNK_TOKENS))))
            at_s += rng.expovariate(1 / MEAN_GAP_S)
        queries.append(TracedQuery(f"q{number}", rng.uniform(0, SPREAD_S), "", tuple(events), events[-1].at_s))
    return Trace(tuple(sorted(queries, key=lambda query: query.arrival_s)))


def num_prompt_tokens(trace: Trace) -> int:
    return sum(e.chunk.num_tokens for q in trace.queries for e in q.events if isinstance(e, TracedAppend))


def simulate(seed: int, share: float, rule: str) -> Digest:
    trace = load(seed)
    settings = CellSettings(
        "virtual",
        f"{NUM_STREAMS} streams of {NUM_CHUNKS} chunks",
        "streaming",
        policy="fcfs",
        kv_tokens=int(share * num_prompt_tokens(trace)),
        seed=seed,
        profile=PROFILE,
        scheduler_options=RULES[rule],
    )
    return digest(run_cell(settings, trace=trace))


def row(share: float, rule: str, digests: Sequence[Digest]) -> dict[str, Any]:
    """Sums and percentiles over seeds."""
    after = [value for d in digests for value in d.ttft_after_retrieval_s]
    return {
        "share": share,
        "rule": rule,
        "num_tokens_recomputed": sum(sum(d.num_recomputed) for d in digests),
        "num_computed": sum(d.num_computed for d in digests),
        "num_preemptions": sum(sum((d.num_preemptions or {}).values()) for d in digests),
        "busy_s": sum(d.busy_s for d in digests),
        **{f"p{rank}": percentile(after, rank / 100) for rank in (50, 95, 99)},
    }


def show(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Returns our recomputed tokens over those of the paper's rule, for each share of memory."""
    table = Table(title="tokens computed again because of preemption", title_justify="left")
    for name in ("memory", "rule", "recomputed", "of computed", "preemptions", "busy s", "P50 s", "P95 s", "P99 s"):
        table.add_column(name, justify="left" if name in ("memory", "rule") else "right")
    ratios = []
    for ours, papers in zip(rows[::2], rows[1::2], strict=True):
        for made in (ours, papers):
            num = made["num_tokens_recomputed"]
            table.add_row(
                *(f"{made['share']:g}", made["rule"], f"{num:,}", f"{num / made['num_computed']:.1%}"),
                *(f"{made['num_preemptions']:,}", f"{made['busy_s']:.1f}"),
                *(f"{made[name]:.3f}" for name in ("p50", "p95", "p99")),
                end_section=made is papers,
            )
        ratios.append(ours["num_tokens_recomputed"] / max(papers["num_tokens_recomputed"], 1))
    console.print(table)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 1 on (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    found: dict[tuple[float, str], list[Digest]] = {(share, rule): [] for share in SHARES for rule in RULES}
    runs = [(seed, *key) for seed in range(1, arguments.seeds + 1) for key in found]
    for seed, share, rule in track(runs, "simulating", console=console, transient=True):
        found[share, rule].append(simulate(seed, share, rule))
    rows = [row(share, rule, digests) for (share, rule), digests in found.items()]
    for share, ratio in zip(SHARES, show(rows), strict=True):
        verdict = "below" if ratio < TARGET else "NOT below"
        console.print(f"memory for {share:g}: ours recomputes {ratio:.1%} of the paper's rule, {verdict} {TARGET:.0%}")
    if arguments.json:
        made = {"command": "make bench-thrash", "rules": RULES, "versions": versions(), "results": rows}
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
