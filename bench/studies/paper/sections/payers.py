"""Request by request: who is served later by ours, by how much, and how long its prompt is."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamrag_bench.report.comparison import Pool
from streamrag_bench.report.html import figure_text
from streamrag_bench.summary import Digest, percentile

from ..markdown import percent, table
from ..pictures import Pairs, draw_pairs
from ..plan import Scale, Wanted
from ..points import LOADED, TWICE_FULL, Point, num_tokens, queries_of
from ..ways import FCFS, NOT_STREAMING, OURS, Way
from .section import Report, Section

POINTS = (LOADED[0], LOADED[2], TWICE_FULL[0])
OTHERS = (NOT_STREAMING, FCFS)
LEAST_S = 0.01
"""Who waits for less than this longer does not notice."""


class Pair(NamedTuple):
    """One request, served in two ways."""

    num_tokens: int
    before_s: float
    ours_s: float

    @property
    def later_s(self) -> float:
        return self.ours_s - self.before_s

    @property
    def pays(self) -> bool:
        return self.later_s > LEAST_S


class Compared(NamedTuple):
    """The requests of a point, under ours and under another way."""

    point: Point
    other: Way
    seeds: Sequence[int]
    pairs: Sequence[Pair]


def wanted(scale: Scale) -> Wanted:
    for point in POINTS:
        for way in (OURS, *OTHERS):
            yield point, way


def pairs(before: Pool, ours: Pool) -> list[Pair]:
    """The requests of all seeds; none where one of the two left some unanswered."""
    if any(digest.num_unfinished for pool in (before, ours) for digest in pool.digests):
        return []
    lengths = [num_tokens(query) for digest in before.digests for query in queries_of(digest.settings)]
    return [Pair(*each) for each in zip(lengths, before.values(_seconds), ours.values(_seconds), strict=True)]


def _seconds(of: Digest) -> Sequence[float]:
    return of.ttft_after_retrieval_s


def write(report: Report) -> str:
    found = list(_found(report))
    head = ["", "against", "seeds", "served later", "by P50/P95/most, s", "of the shorter half", "of the longest tenth"]
    text = (
        "The same requests under ours and under another way. *Served later*: by more than "
        f"{LEAST_S * 1e3:.0f} ms, and by how much those are. The last columns: the share served later of the half "
        "with the shorter prompts, and of the tenth with the longest.\n\n" + table(head, map(_row, found), num_left=2)
    )
    if not found:
        return text
    panels = [
        Pairs(f"{each.point.name}, against {each.other.name}", [pair[1:] for pair in each.pairs]) for each in found
    ]
    figure = draw_pairs(panels, "seconds under the other way", "seconds under ours")
    return text + "\n" + report.pictures.add("payers", figure, "Each request under ours and under another way")


def _found(report: Report) -> Iterator[Compared]:
    for point in POINTS:
        ours = report.results.all_seeds(point, OURS)
        for way in OTHERS:
            before = report.results.all_seeds(point, way)
            if before and ours and (of := pairs(before, ours)):
                yield Compared(point, way, ours.seeds, of)


def _row(of: Compared) -> list[str]:
    later = [pair.later_s for pair in of.pairs if pair.pays]
    by = "/".join(figure_text(percentile(later, fraction)) for fraction in (0.5, 0.95, 1.0)) if later else "–"
    by_length = sorted(of.pairs)
    num = len(by_length)
    shares = map(_share, (by_length, by_length[: num // 2], by_length[num - max(num // 10, 1) :]))
    all_of, short, long = map(percent, shares)
    return [of.point.name, of.other.name, ", ".join(map(str, of.seeds)), all_of, by, short, long]


def _share(of: Sequence[Pair]) -> float:
    return sum(pair.pays for pair in of) / len(of)


SECTION = Section("payers", "Request by request, who pays", wanted, write)
