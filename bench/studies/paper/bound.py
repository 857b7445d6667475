"""A bound that no schedule of a load gets below, whatever it knows of the future: at each percentile, on one machine.

    chunks        c0     c1         c2 = last       What the last prompt needs can be computed from when its tokens are
    needed        ├──w0──┼────w1────┼─w2─┤          there, by one engine, at its speed for a step without end. Steps
    request       ·······│← h →·····▲ due = end + x cost nothing, nor do memory, copies, and versions that are replaced.

The value of rank k is more than x if more than n - k requests must take more than x, counting from 1. How many must:

1. Who is late alone. A request whose work from some arrival on does not fit before `due` is late in any schedule.
2. Who is late with others. Of the rest, take for each what arrives in the last h seconds before its end, as if all of
   it were there at the first of these arrivals (made to ascend, by taking it to be there earlier still). Releases and
   due dates then have the same order, where preemption is worth nothing and the fewest late jobs are found by taking
   them by due date and dropping, when one is late, the one without which the rest ends first (Kise, Ibaraki and Mine
   1978; its proof: Li, Chen and Tang 2010). Less work, there earlier: any real schedule has at least as many late. The
   best of some h is taken.

A real step of computing time w takes at least w and its overhead, and requests get their tokens at its end: so they are
late for x already if their work ends later than x less one overhead. Work is that of `AnalyticProfile`, where tokens
[a, b) of a prompt cost the same in however many steps. Preemption is free; loads are such that queries share no chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile
from streamrag.trace.values import TracedQuery
from streamrag_bench.cell import CellSettings
from streamrag_bench.trace.statistics import contexts, num_common_tokens
from streamrag_bench.workload import NUM_TAIL_TOKENS

from .points import queries_of
from .standing import RANKS

Floats: TypeAlias = NDArray[np.float64]

HORIZONS_S = (0.1, 0.3, 0.7, 1.5, 3.0, 6.0, 15.0, 60.0)
"""How long before its end a request's work is looked at, in turn."""
NUM_HALVINGS = 12


@dataclass(frozen=True)
class Job:
    """What one request needs: seconds of work, and from when on it can be done."""

    end_s: float
    """When its prompt is complete."""
    releases_s: tuple[float, ...]
    """Ascending; the last is not after the end."""
    works_s: tuple[float, ...]

    @cached_property
    def alone_s(self) -> float:
        """From its end until it is done, with a machine of its own."""
        done_s = 0.0
        for release_s, work_s in zip(self.releases_s, self.works_s, strict=True):
            done_s = max(done_s, release_s) + work_s
        return max(done_s - self.end_s, 0.0)


def job_of(query: TracedQuery, profile: AnalyticProfile, num_tail_tokens: int = NUM_TAIL_TOKENS) -> Job:
    """From when on each token of the last prompt can be computed: since it and all before it stand in some prompt."""
    versions = list(zip((event.at_s for event in query.events), contexts(query.events), strict=True))
    last = versions[-1][1] if versions else ()
    releases, works = [], []
    num_before = 0
    for at_s, chunks in versions:
        num_after = num_common_tokens(chunks, last)
        if num_after > num_before:
            releases.append(query.arrival_s + at_s)
            works.append(work_s(profile, num_before, num_after))
            num_before = num_after
    releases.append(query.arrival_s + query.end_s)
    works.append(work_s(profile, num_before, num_before + num_tail_tokens))
    return Job(releases[-1], tuple(releases), tuple(works))


def work_s(profile: AnalyticProfile, num_before: int, num_after: int) -> float:
    """Seconds of computing for these tokens of a prompt, of steps without overhead."""
    model = profile.model
    pairs = (num_after**2 - num_before**2) / 2
    flops = 2 * model.num_params * (num_after - num_before)
    flops += 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    return flops / (profile.tensor_parallel_size * profile.peak_flops * profile.efficiency)


class Bound:
    """Of some loads, each on a machine of its own, whose requests are pooled."""

    def __init__(self, loads: Sequence[Sequence[Job]], overhead_s: float = 0.0) -> None:
        self._overhead_s = overhead_s
        self._loads = [sorted(jobs, key=lambda job: job.end_s) for jobs in loads]
        self._ends = [np.array([job.end_s for job in jobs]) for jobs in self._loads]
        self._alone = [np.array([job.alone_s for job in jobs]) for jobs in self._loads]
        self._within = [[_within(jobs, horizon_s) for horizon_s in HORIZONS_S] for jobs in self._loads]

    @property
    def num_requests(self) -> int:
        return sum(map(len, self._loads))

    def num_late(self, after_s: float) -> int:
        """At least so many requests take more than this after their end."""
        room_s = after_s - self._overhead_s
        num = 0
        for ends, alone, within in zip(self._ends, self._alone, self._within, strict=True):
            kept = alone <= room_s
            due = ends[kept] + room_s
            num += int((~kept).sum())
            num += max(_fewest_late(releases[kept], works[kept], due) for releases, works in within)
        return num

    def at(self, fraction: float) -> float:
        """No schedule has a smaller percentile: that of the rank below it, which is not above."""
        rank = int(fraction * (self.num_requests - 1))
        num_allowed = self.num_requests - 1 - rank
        # Alone on the machine is where to start.
        low_s = float(np.sort(np.concatenate(self._alone))[rank]) + self._overhead_s
        high_s = 1.25 * low_s
        while self.num_late(high_s) > num_allowed:
            low_s, high_s = high_s, 2 * high_s
        for _ in range(NUM_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self.num_late(middle_s) > num_allowed:
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s


@cache
def bound_of(cells: tuple[CellSettings, ...]) -> Mapping[str, float]:
    """Of a load with each of its seeds, by rank, in seconds."""
    profiles = {cell.profile for cell in cells}
    assert len(profiles) == 1, profiles
    profile = load_profile(next(iter(profiles)) or "")
    assert isinstance(profile, AnalyticProfile), profile
    bound = Bound([[job_of(query, profile) for query in queries_of(cell)] for cell in cells], profile.overhead_s)
    return {rank: bound.at(fraction) for rank, fraction in RANKS.items()}


def _within(jobs: Sequence[Job], horizon_s: float) -> tuple[Floats, Floats]:
    """Of each job the work that is released in the last seconds before its end, and from when on."""
    releases, works = np.empty(len(jobs)), np.empty(len(jobs))
    for i, job in enumerate(jobs):
        pieces = zip(job.releases_s, job.works_s, strict=True)
        kept = [(at_s, work) for at_s, work in pieces if at_s >= job.end_s - horizon_s]
        releases[i] = kept[0][0]
        works[i] = sum(work for _, work in kept)
    return np.minimum.accumulate(releases[::-1])[::-1], works


def _fewest_late(releases: Floats, works: Floats, due: Floats) -> int:
    """Of jobs in the order of their due dates and of their releases."""
    block: list[tuple[float, float]] = []  # release and work of what runs without a gap up to now
    now_s, num_late = -np.inf, 0
    for release_s, work, due_s in zip(releases.tolist(), works.tolist(), due.tolist(), strict=True):
        if release_s >= now_s:
            block = []
        block.append((release_s, work))
        now_s = max(now_s, release_s) + work
        if now_s > due_s:
            block, now_s = _without_one(block)
            num_late += 1
    return num_late


def _without_one(block: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], float]:
    """The block without the job without which the rest ends first, and when that is."""
    # Without job j what comes after it moves ahead by its work, or until one of them would start before its release.
    starts = []
    now_s = block[0][0]
    for _, work in block:
        starts.append(now_s)
        now_s += work
    slack, best_gain, best = np.inf, -1.0, 0
    for j in range(len(block) - 1, -1, -1):
        gain = min(block[j][1], slack)
        if gain > best_gain:
            best_gain, best = gain, j
        slack = min(slack, starts[j] - block[j][0])
    kept = block[:best] + block[best + 1 :]
    return kept, now_s - best_gain
