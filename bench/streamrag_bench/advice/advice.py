"""Advice from a trace: what streaming would save and cost by simulation, why it may not help, which settings to use."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from streamrag.engine.costs.profile_files import load_profile
from streamrag.trace.values import Trace, TracedUpdate
from streamrag_bench.cell import Arm, CellSettings
from streamrag_bench.report.comparison import BASELINE, compare
from streamrag_bench.report.verdict import TimeChange, Verdict, verdicts
from streamrag_bench.summary import digest
from streamrag_bench.trace.statistics import describe

ARMS: tuple[Arm, ...] = ("no-streaming", "warming", "streaming")
MEDIAN_ERROR, RUN_ERROR = (0.94, 1.13), (0.64, 1.52)
"""Least and most of simulated over real time in `make -C bench validity`, over P50 and P95 of `ARMS`: the medians, and
the single runs. Source: bench/studies/validity/results.json."""
ERROR = (
    f"Simulated times were {MEDIAN_ERROR[0]} to {MEDIAN_ERROR[1]} times those of a real engine on a CPU in make "
    f"bench-validity (medians of five runs; single runs: {RUN_ERROR[0]} to {RUN_ERROR[1]}). GPUs were not compared."
)
AT_ONCE_S = 0.05  # a first chunk that comes so shortly before the end of retrieval is of no use
SHORT_S = 0.1  # a median first token without streaming that leaves little to save
BUSY, CHANGED = 0.9, 0.5  # shares of the time and of a context above which work ahead costs more than it saves


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on one trace and one engine, with reasons why it saves no more. All times are simulated."""

    profile: str
    hardware: str
    num_queries: int
    verdicts: tuple[Verdict, ...]
    reasons: tuple[str, ...]
    settings: tuple[str, ...]
    error: str = ERROR

    def as_json(self) -> dict[str, Any]:
        return {"format": 1, "is_simulated": True, **asdict(self), "verdicts": [v.as_json() for v in self.verdicts]}


def advise(trace: Trace, profile: str, *, qps: Sequence[float | None] = (None,), **settings: Any) -> Advice:
    """Simulate the trace without streaming and in both ways of streaming at each rate, and return the advice.

    qps: rates of arrivals, three seeds of each; None for the trace's own arrivals.
    settings: more settings of the cells.

    :raises ConfigurationError: the profile or the trace cannot be simulated.
    """
    from streamrag_bench.simulate import run_cell  # imports vLLM: seconds

    digests = []
    for rate, arm in product(qps, ARMS):
        for seed in (1, 2, 3) if rate else (1,):
            cell = CellSettings("virtual", "the log", arm, qps=rate, seed=seed, profile=profile, **settings)
            digests.append(digest(run_cell(cell, trace=trace)))
    found = tuple(verdict for comparison in compare(digests) for verdict in verdicts(comparison))
    busy = max(each.busy_s / each.completion_s for each in digests if each.settings.arm == BASELINE)
    return Advice(
        profile=profile,
        hardware=load_profile(profile).device,
        num_queries=len(trace.queries),
        verdicts=found,
        reasons=tuple(_reasons(trace, found, busy)),
        settings=tuple(f"{name_of(verdict)}: {_settings(trace, verdict)}" for verdict in found),
    )


def first_token(verdict: Verdict, percentile: str) -> TimeChange:
    """Return the change of the first token after retrieval, at "p50", "p95" or "p99"."""
    changes = (change for change in verdict.changes if change.time == "ttft_after_retrieval_s")
    return next(change for change in changes if change.percentile == percentile)


def name_of(verdict: Verdict) -> str:
    """Return the backend and the rate of a verdict in words."""
    backend = "OpenAIBackend" if verdict.arm.startswith("warming") else "VllmBackend"
    return backend if verdict.qps is None else f"{backend}, {verdict.qps:g} QPS"


def _reasons(trace: Trace, found: Sequence[Verdict], busy: float) -> Iterator[str]:
    """Yield what limits the gain: retrieval at once, short prompts, changing contexts, a saturated engine."""
    late = sum(not q.events or q.end_s - q.events[0].at_s <= AT_ONCE_S for q in trace.queries)
    if late:
        yield (
            f"In {late:,} of {len(trace.queries):,} queries, everything arrives at once, at the end of retrieval: the "
            "retriever returns its list whole, and nothing can be read before. One in stages helps (docs/langchain.md)."
        )
    before_s = min((first_token(verdict, "p50").baseline_s for verdict in found), default=SHORT_S)
    if before_s < SHORT_S:
        yield f"Prompts are short for this engine: without streaming, the median first token takes {before_s:.3f} s."
    if (changed := describe(trace).changed_share.percentile(50)) > CHANGED:
        yield f"The median update changes {changed:.0%} of the context, which is computed anew; AppendMode() avoids it."
    if busy > BUSY:
        yield f"The engine is saturated: it computes for {busy:.0%} of the time, and work ahead makes others wait."


def _settings(trace: Trace, verdict: Verdict) -> str:
    """Return the settings of a pipeline that suit a backend at a rate."""
    is_update = any(isinstance(event, TracedUpdate) for query in trace.queries for event in query.events)
    effects = [first_token(verdict, percentile).effect for percentile in ("p50", "p95")]
    if "later" in effects:
        return "Pipeline(..., overlap=False), because streaming makes some queries slower"
    if "sooner" in effects:
        return f"Pipeline(..., mode={'UpdateMode' if is_update else 'AppendMode'}(), overlap=True)"
    return "Pipeline(...) as it is, which learns whether to stream"
