"""The verdict on an arm, in words: whether it helps, at which percentiles, and what it costs in engine time.

Each query is compared with itself: the same query of the same seed, without streaming. A change counts if it is large
enough to matter and larger than noise; anything else is no difference. Noise is the change that remains if the two arms
are swapped in a random half of the load (a permutation test).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from streamrag_bench.grid import describe_load, describe_qps
from streamrag_bench.report.comparison import BASELINE, LoadComparison, Pool
from streamrag_bench.report.html import figure_text
from streamrag_bench.summary import PERCENTILES

TIMES = {
    "ttft_after_retrieval_s": "First token after retrieval",
    "ttft_s": "First token from the question",
    "total_s": "Last token from the question",
}
"""Labels of the compared times, which are fields of `Digest`."""
NUM_RUNS = 10
"""Runs of consecutive queries that are swapped as one, because neighbours wait in the same queue. Of the percentiles of
two queues that differ by noise, 0 to 10 % then pass for changes."""
NUM_SWAPS = 500
CONFIDENCE = 0.98
"""Share of the swaps that noise covers. A verdict has nine changes, so that 95 % would often call noise a change."""
MIN_CHANGE_S, MIN_CHANGE = 0.010, 0.01
"""Seconds, and share of the time without streaming, below which a change makes no difference."""
FEW_QUERIES = 30
"""Number of queries below which the `NUM_RUNS` runs have under three queries each, and noise hides most changes."""
MIN_EXTRA_COST = 5.0  # percent of engine time from which the first sentence names it
NO_VERDICT = "No verdict: it compares with the arm no-streaming, and no other arm ran with the same load."

Pairs: TypeAlias = list[list[tuple[float, float]]]
"""The baseline's and the arm's value of each of `TIMES`, for each query that both answered, in order of arrival."""


@dataclass(frozen=True, slots=True)
class TimeChange:
    """The change of one percentile of one time."""

    time: str
    percentile: str
    baseline_s: float
    arm_s: float
    noise_s: float
    """Largest change, to either side, that noise alone explains."""

    @property
    def effect(self) -> str:
        """The effect: "later" or "sooner" if the change exceeds noise and the least change that matters.

        Otherwise "no difference" if change and noise are both below that least change, else "within noise".
        """
        least_s = max(MIN_CHANGE_S, MIN_CHANGE * self.baseline_s)
        change_s = self.arm_s - self.baseline_s
        if abs(change_s) >= least_s and abs(change_s) > self.noise_s:
            return "later" if change_s > 0 else "sooner"
        return "no difference" if abs(change_s) < least_s and self.noise_s < least_s else "within noise"

    @property
    def text(self) -> str:
        """The change in words, such as "2.30 s sooner at P50 (3.40 to 1.10 s)"."""
        amount = f"{figure_text(abs(self.arm_s - self.baseline_s))} s " if self.effect in ("later", "sooner") else ""
        before, after = figure_text(self.baseline_s), figure_text(self.arm_s)
        return f"{amount}{self.effect} at {self.percentile.upper()} ({before} to {after} s)"

    @property
    def is_late_at_p99(self) -> bool:
        """Whether this is a regression that every reader must see first."""
        return (self.effect, self.percentile) == ("later", "p99")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one arm with `BASELINE`, at one rate of arrivals."""

    load: str
    qps: float | None
    arm: str
    num_queries: int
    """Queries that both arms answered, over all seeds."""
    num_unanswered: int
    """Queries that only the baseline answered."""
    changes: tuple[TimeChange, ...]
    busy_s: float
    """Seconds in which the engine computed."""
    baseline_busy_s: float
    num_computed: int
    """Computed prompt tokens."""
    num_thrown_away: int | None
    """Computed prompt tokens that were thrown away; None if the engine does not report them."""

    @property
    def headline(self) -> str:
        """The verdict in a sentence: unanswered queries, percentiles that are later, those sooner, a high cost.

        Without any of these, the arm "makes no difference", or none that the queries show if a change is within noise.
        """
        num = self.num_unanswered
        parts = [f"leaves {num:,} quer{'y' if num == 1 else 'ies'} without an answer"] if num else []
        if hurts := self._places("later", reversed(PERCENTILES)):
            parts.append(f"hurts {hurts}")
        if helps := self._places("sooner", PERCENTILES):
            parts.append(f"helps {helps}")
        if not parts:
            is_noise = any(change.effect == "within noise" for change in self.changes)
            parts.append("makes no difference" + (f" that {self.num_queries:,} queries show" if is_noise else ""))
            if is_noise and self.num_queries < FEW_QUERIES:
                parts[-1] += f" (record {FEW_QUERIES} or more)"
        is_costly = abs(self._extra_cost) >= MIN_EXTRA_COST
        costs = f", for {_amount(self._extra_cost)} engine time" if is_costly else ""
        return f"{self.arm} at {describe_qps(self.qps)} {_listed(parts)}{costs}."

    @property
    def _extra_cost(self) -> float:
        """Engine time beyond the baseline's, in percent of it."""
        return 100 * (self.busy_s / self.baseline_busy_s - 1) if self.baseline_busy_s else 0.0

    def _places(self, effect: str, percentiles: Iterable[str]) -> str:
        """Return the percentiles with this effect in words, such as "at P50 and P95"; "" if none.

        If percentiles of the time after retrieval and of the times from the question differ, both are named.
        """
        pairs = [(c.percentile, c.time == "ttft_after_retrieval_s") for c in self.changes if c.effect == effect]
        ordered = list(percentiles)
        after, other = ([p.upper() for p in ordered if (p, is_after) in pairs] for is_after in (True, False))
        if after == other:
            return f"at {_listed(after)}" if after else ""
        named = ((after, "after retrieval"), (other, "from the question"))
        return _listed([f"at {_listed(names)} {since}" for names, since in named if names])

    @property
    def sentences(self) -> list[str]:
        """A sentence on each time, the ones that are later at P99 first, and one on the costs."""
        by_time = [[change for change in self.changes if change.time == time] for time in TIMES]
        ordered = [sorted(changes, key=lambda c: not c.is_late_at_p99) for changes in by_time if changes]
        ordered.sort(key=lambda changes: not changes[0].is_late_at_p99)
        times = [f"{TIMES[changes[0].time]}: {', '.join(c.text for c in changes)}." for changes in ordered]
        return [*times, self._costs()]

    def _costs(self) -> str:
        """Return a sentence on engine time, compared with the baseline's, and on tokens thrown away if known."""
        busy = f"{figure_text(self.busy_s)} s, without streaming {figure_text(self.baseline_busy_s)} s"
        costs = f"Cost: {_amount(self._extra_cost)} engine time ({busy})"
        if self.num_thrown_away is None or not self.num_computed:
            return f"{costs}."
        share = 100 * self.num_thrown_away / self.num_computed
        num = f"{self.num_thrown_away:,} of {self.num_computed:,}"
        return f"{costs}; {num} computed tokens ({share:.1f} %) were thrown away."

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as `--json` writes it."""
        changes = [{**asdict(change), "effect": change.effect} for change in self.changes]
        return {"headline": self.headline, "sentences": self.sentences, **asdict(self), "changes": changes}


def _amount(percent: float) -> str:
    return "as much" if abs(percent) < 0.5 else f"{abs(percent):.0f} % {'more' if percent > 0 else 'less'}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def verdicts(comparison: LoadComparison) -> Iterator[Verdict]:
    """Yield a verdict for each rate of arrivals and each arm that answered some of the baseline's queries.

    Only the seeds that both have are compared. Without output tokens after the first, there is no change of `total_s`.
    """
    for qps in comparison.qps:
        baseline = comparison.pools.get((BASELINE, qps))
        for arm in comparison.variants:
            pool = comparison.pools.get((arm, qps))
            if arm == BASELINE or pool is None or baseline is None:
                continue
            seeds = set(pool.seeds) & set(baseline.seeds)
            pool, old = pool.only(seeds), baseline.only(seeds)
            if pairs := _pairs(old, pool):
                yield Verdict(
                    load=describe_load(comparison.load),
                    qps=qps,
                    arm=arm,
                    num_queries=len(pairs),
                    num_unanswered=sum(len(digest.query_ids) for digest in old.digests) - len(pairs),
                    changes=tuple(_changes(pairs, list(TIMES)[: 3 if comparison.load.num_output_tokens > 1 else 2])),
                    busy_s=sum(digest.busy_s for digest in pool.digests),
                    baseline_busy_s=sum(digest.busy_s for digest in old.digests),
                    num_computed=sum(digest.num_computed for digest in pool.digests),
                    num_thrown_away=_num_thrown_away(pool),
                )


def _pairs(baseline: Pool, pool: Pool) -> Pairs:
    """Return pairs of `TIMES` of each query that both answered, matched by id within a seed; seeds must be equal."""
    pairs = []
    for old, new in zip(baseline.digests, pool.digests, strict=True):
        places = {query_id: place for place, query_id in enumerate(new.query_ids)}
        for i, query_id in enumerate(old.query_ids):
            if (j := places.get(query_id)) is not None:
                pairs.append([(getattr(old, time)[i], getattr(new, time)[j]) for time in TIMES])
    return pairs


def _num_thrown_away(pool: Pool) -> int | None:
    """Return the number of tokens invalidated by updates or computed again; None for warming, or without records."""
    if pool.settings.arm == "warming" or any(digest.num_preemptions is None for digest in pool.digests):
        return None
    return sum(sum(digest.num_invalidated) + sum(digest.num_recomputed) for digest in pool.digests)


def _changes(pairs: Pairs, times: Sequence[str]) -> Iterator[TimeChange]:
    """Yield the change of each percentile of `times`, with the noise that random swaps of runs of queries show.

    The noise is 0 if there are at least seven runs and all of them change in the same direction.
    """
    import numpy as np

    values, fractions = np.asarray(pairs), [*PERCENTILES.values()]
    run = np.arange(len(values)) * NUM_RUNS // len(values)
    random = np.random.default_rng(0)
    changes = []
    for _ in range(NUM_SWAPS):
        is_swapped = random.random(NUM_RUNS)[run, None, None] < 0.5
        swapped = np.where(is_swapped, values[..., ::-1], values)
        changes.append(np.diff(np.quantile(swapped, fractions, axis=0))[..., 0])
    noise = np.quantile(np.abs(changes), CONFIDENCE, axis=0)
    # A change that all runs share is none of noise. If times vary less than they change, swapping cannot show it.
    signs = [np.sign(np.diff(np.quantile(values[run == r], fractions, axis=0))[..., 0]) for r in set(run.tolist())]
    noise[(len(signs) >= 7) & (np.abs(np.sum(signs, axis=0)) == len(signs))] = 0.0
    figures = np.quantile(values, fractions, axis=0)
    for i, time in enumerate(times):
        for j, percentile in enumerate(PERCENTILES):
            baseline_s, arm_s = figures[j, i].tolist()
            yield TimeChange(time, percentile, baseline_s, arm_s, float(noise[j, i]))
