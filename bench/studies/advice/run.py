"""Does a replay on the real engine confirm the advice of `streamrag advise`? Three recorded traces on a CPU.

    python -m studies.advice.run [--json FILE] [--traces NAMES]

    real engine      pass ─▶ load, seed 1 ─▶ pass ─▶ load, seed 2 ─▶ ...   without streaming, then with it
    advice           a profile of all passes ─▶ advise() on the same trace, at the same rate, with the same seeds

The ratio is of the seconds that the advice says are saved to those that are, over all queries of all seeds; the advice
is confirmed if the ratio at P50 is within 20 % of 1. Random weights: the answers mean nothing, the work is real. A
quarter of an hour on two cores that do nothing else.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.engine.step_size import RATE_S
from streamrag.testing import make_tiny_llama
from streamrag.trace.values import Trace, TracedAppend, TracedQuery, chunks_of
from streamrag_bench.advice.advice import advise, first_token
from streamrag_bench.advice.logs import read_log
from streamrag_bench.cell import Arm, CellSettings
from streamrag_bench.summary import percentile
from streamrag_bench.workload import NUM_TAIL_TOKENS, fit_contexts, make_load
from studies import folders
from studies.results_file import write_results
from studies.validity.run import BUDGET, MODEL, NUM_OUTPUT_TOKENS, NUM_SEQS, UTILISATION, Measured, play_in_turns

TRACES = ("crawl-python-docs", "search-python-docs", "langchain-two-retrievers")
ARMS: tuple[Arm, ...] = ("no-streaming", "streaming")
SEEDS = (1, 2, 3)
"""The seeds of `advise`."""
TOLERANCE = 0.20
LIGHT = 0.5
"""Factor on the rate that keeps the engine busy for `UTILISATION` of the time: on cores that become slower meanwhile, a
queue would grow, and decide all times."""
REST_S = 3 * RATE_S
"""Until our scheduler, which makes steps shorter while many prompts arrive, has forgotten those of the pass before."""
LOAD: dict[str, Any] = {
    "num_queries": 12,
    "num_output_tokens": NUM_OUTPUT_TOKENS,
    "max_context_tokens": 3_000,
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": NUM_SEQS,
}
PERCENTILES = {"p50": 0.5, "p95": 0.95}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Way(NamedTuple):
    arm: Arm
    seed: int


@dataclass
class Confirmation:
    """The advice on a trace at a percentile, and what the real engine did. Times are from the end of retrieval."""

    trace: str
    percentile: str
    qps: float
    advised_without_s: float
    advised_with_s: float
    real_without_s: float
    real_with_s: float
    num_queries: int

    @property
    def ratio(self) -> float:
        """Advised savings over real ones."""
        return (self.advised_without_s - self.advised_with_s) / (self.real_without_s - self.real_with_s)

    @property
    def is_confirmed(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


def rate(queries: Sequence[TracedQuery], profile: TableProfile) -> float:
    """Return queries a second that keep the engine busy for `UTILISATION` of the time if nothing streams."""
    busy_s = 0.0
    for query in queries:
        last = query.events[-1]
        of_context = query.events if isinstance(last, TracedAppend) else [last]
        num_tokens = NUM_TAIL_TOKENS + sum(chunk.num_tokens for event in of_context for chunk in chunks_of(event))
        for start in range(0, num_tokens, BUDGET):
            busy_s += profile.step_s([(min(BUDGET, num_tokens - start), start)])
        busy_s += (NUM_OUTPUT_TOKENS - 1) * profile.step_s([(1, num_tokens)])
    return UTILISATION * len(queries) / busy_s


async def run_real(model: Path, trace: Trace) -> Measured[Way]:
    """Replay the trace with each seed, without streaming and with it, on an engine each."""
    found = Measured[Way]()

    def cell_of(way: Way) -> CellSettings:
        return CellSettings("wall", "a trace", way.arm, qps=found.qps or 1.0, seed=way.seed, model=str(model), **LOAD)

    for arm in ARMS:
        await play_in_turns(
            found,
            [Way(arm, seed) for seed in SEEDS],
            1,
            cell_of,
            lambda cell: fit_contexts(cell, make_load(cell, trace), None).queries,
            lambda queries, profile: LIGHT * rate(queries, profile),
            partial(console.print, f"  {arm}: a run has ended", style="dim"),
            rest_s=REST_S if arm == "streaming" else 0.0,
        )
    return found


def confirm(name: str, model: Path, folder: Path) -> list[Confirmation]:
    """Replay one trace, advise on it with the profile of the replay's machine, and compare."""
    trace = read_log(folders.TRACES / f"{name}.jsonl.gz", usual_tokens=250)
    found = asyncio.run(run_real(model, trace))
    assert found.qps
    profile = folder / f"{name}.json"
    save_profile(found.profile(), profile)
    advice = advise(trace, str(profile), qps=[found.qps], **LOAD)
    verdict = next(verdict for verdict in advice.verdicts if verdict.arm.startswith("streaming"))
    times = {
        arm: [r.ttft_after_retrieval_s for run in found.runs if run.way.arm == arm for r in run.real.requests]
        for arm in ARMS
    }
    return [
        Confirmation(
            trace=name,
            percentile=rank,
            qps=found.qps,
            advised_without_s=first_token(verdict, rank).baseline_s,
            advised_with_s=first_token(verdict, rank).arm_s,
            real_without_s=percentile(times["no-streaming"], share),
            real_with_s=percentile(times["streaming"], share),
            num_queries=len(times["streaming"]),
        )
        for rank, share in PERCENTILES.items()
    ]


def show(rows: Sequence[Confirmation]) -> None:
    table = Table(title="seconds from the end of retrieval to the first token", title_justify="left")
    names = ("trace", "", "QPS", "advised: without", "with", "real: without", "with", "saved: advised / real")
    for name in names:
        table.add_column(name, justify="left" if name == "trace" else "right")
    for row in rows:
        times = (row.advised_without_s, row.advised_with_s, row.real_without_s, row.real_with_s)
        mark = "" if row.is_confirmed else f", over {TOLERANCE:.0%} off"
        cells = [row.trace, row.percentile.upper(), f"{row.qps:.2f}", *(f"{s:.3f}" for s in times)]
        table.add_row(*cells, f"{row.ratio:.2f}{mark}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=",".join(TRACES), metavar="LIST", help="default: all three")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]  # before this program makes one itself
    rows: list[Confirmation] = []
    with tempfile.TemporaryDirectory() as folder:
        longest = LOAD["max_context_tokens"] + NUM_TAIL_TOKENS + NUM_OUTPUT_TOKENS + 1
        model = make_tiny_llama(Path(folder, "model"), **{**MODEL, "max_model_len": longest})
        for name in arguments.traces.split(","):
            console.print(name)
            rows += confirm(name, model, Path(folder))
    show(rows)
    judged = [row for row in rows if row.percentile == "p50"]
    num_confirmed = sum(row.is_confirmed for row in judged)
    console.print(f"{num_confirmed} of {len(judged)} traces: the seconds saved at P50 are within {TOLERANCE:.0%}")
    if arguments.json:
        ratios = {f"{row.trace} {row.percentile}": row.ratio for row in rows}
        write_results(arguments.json, rows, load=load, command="make -C bench advice", ratios=ratios, settings=LOAD)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
