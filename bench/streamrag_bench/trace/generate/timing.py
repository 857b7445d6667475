"""Times of chunk events, drawn so that both durations and gaps follow their distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from random import Random

from streamrag_bench.trace.generate.distributions import Marginal, couple

NUM_TRIES = 10_000  # maximum number of attempts to exchange gaps for a query whose gaps exceed its duration


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """The distributions of the times of a workload's chunk events."""

    duration_s: Marginal
    gap_s: Marginal
    long_window_s: float
    """Target for the median of a query's duration minus its gaps; the two marginals take precedence."""
    sigma_long_window: float
    min_long_window_s: float


def retrieval_windows(timing: ChunkTiming, num_events: Sequence[int], rng: Random) -> list[tuple[float, ...]]:
    """Draw the seconds before each chunk event of each query: its long window, then its gaps.

    Gaps are assigned to queries at random. A query's duration has the rank of the sum of its gaps and a drawn long
    window; its final long window is the rest. So durations and gaps follow their distributions exactly, and long
    windows approximately. A query with too short a long window exchanges gaps with others; if that does not suffice,
    its long window is set to the minimum, which makes its duration longer.
    """
    gaps = timing.gap_s.sample(sum(num_events) - len(num_events), rng)
    rng.shuffle(gaps)
    dealt = []
    start = 0
    for num in num_events:
        dealt.append(gaps[start : start + num - 1])
        start += num - 1
    aims = [sum(each) + rng.lognormvariate(log(timing.long_window_s), timing.sigma_long_window) for each in dealt]
    durations = couple(aims, timing.duration_s.sample(len(num_events), rng))
    long_windows = [duration - sum(each) for duration, each in zip(durations, dealt, strict=True)]
    for query, left in enumerate(long_windows):
        if left < timing.min_long_window_s:
            _exchange(query, long_windows, dealt, timing.min_long_window_s, rng)
    # In a small workload an exchange may be impossible; then the duration grows.
    return [(max(left, timing.min_long_window_s), *each) for left, each in zip(long_windows, dealt, strict=True)]


def _exchange(query: int, long_windows: list[float], dealt: list[list[float]], least: float, rng: Random) -> None:
    """Exchange gaps with random queries in place, until this query's long window is at least `least`.

    The other's long window stays at least `least`, too. After `NUM_TRIES`, give up.
    """
    for _ in range(NUM_TRIES):
        other = rng.randrange(len(dealt))
        if other == query or not dealt[other]:
            continue
        mine, theirs = rng.randrange(len(dealt[query])), rng.randrange(len(dealt[other]))
        moved = dealt[query][mine] - dealt[other][theirs]
        if moved > 0 and long_windows[other] - moved >= least:
            dealt[query][mine], dealt[other][theirs] = dealt[other][theirs], dealt[query][mine]
            long_windows[query] += moved
            long_windows[other] -= moved
        if long_windows[query] >= least:
            return
