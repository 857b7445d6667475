"""Measure over many queries at which stage a source's results become final."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import TypeAlias

from streamrag.core import Append, Chunk, CutShort, Hint, Source, Update, part_name
from streamrag.errors import ConfigurationError, SourceError
from streamrag.modes import UpdateMode
from streamrag.query.retrieval import Retrieval
from streamrag.sources.emission.calibration import (
    MAX_LENGTH,
    MAX_NUM,
    MAX_STABLE,
    MAX_STAGES,
    MAX_TIMES,
    Calibration,
    Count,
    Stage,
    Times,
    What,
)
from streamrag.support.clock import Clock, monotonic
from streamrag.support.messages import is_whole, message_of
from streamrag.support.versions import __version__

Place: TypeAlias = "tuple[str, int, str]"


def place(chunk: Chunk) -> Place:
    """Return the identity of a passage, without its score."""
    return chunk.uri, chunk.passage, chunk.text


def stages_left(hint: Hint | None) -> int | None:
    """Return the number of remaining stages in a hint; None if it has none or an impossible one."""
    num = None if hint is None else hint.num_chunks
    return int(num) if num is not None and is_whole(num) and 0 <= num < MAX_STAGES else None


@dataclass(frozen=True, slots=True)
class _Result:
    at_s: float
    left: int
    places: tuple[Place, ...]


async def calibrate(
    source: Source,
    queries: Sequence[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    clock: Clock = monotonic,
) -> Calibration:
    """Run all `queries` through `source`, one after the other, and count at which stage each result was final.

    The source must be started if it is `Startable`, and each event must have a hint with the number of remaining
    stages, `Hint.num_chunks`, which decreases from event to event. Queries whose retrieval fails or is cut short are
    left out. `on_progress` is called with the number of finished queries and of all queries.

    :raises ConfigurationError: there are no queries, or the source does not name its stages.
    :raises SourceError: retrieval failed or was cut short for all queries; the cause is the last failure.
    """
    if not 1 <= len(queries) <= MAX_NUM:
        raise ConfigurationError(f"calibrate: {len(queries):,} queries; give 1 to {MAX_NUM:,}")
    name, counts, num_queries, failure = part_name(source), _Counts(), 0, None
    for number, query in enumerate(queries, 1):
        try:
            results, end_s = await _run(source, query, clock)
        except SourceError as error:
            failure = error
        else:
            num_queries += bool(results)
            counts.add(results, end_s)
        if on_progress:
            on_progress(number, len(queries))
    if not num_queries:
        reason = f"; the last time: {message_of(failure)}" if failure else ""
        raise SourceError(f"{name} gave no complete result for any of {len(queries)} queries{reason}") from failure
    return Calibration(
        source=name,
        num_queries=num_queries,
        stages=tuple(_stage(counts.times[left]) for left in range(max(counts.times) + 1)),
        counts=tuple(Count(*key, num, counts.final[key]) for key, num in sorted(counts.total.items())),
        provenance={"streamrag": __version__},
    )


async def _run(source: Source, query: str, clock: Clock) -> tuple[list[_Result], float]:
    """Return each stage's result and the seconds until the end; raise if retrieval is cut short or names no stages."""
    results: list[_Result] = []
    context: tuple[Chunk, ...] = ()
    began_s = clock()
    async with aclosing(Retrieval(source, query).events()) as events:
        async for event in events:
            if isinstance(event, CutShort):
                raise SourceError(f"retrieval was cut short: {event.reason}")
            if not isinstance(event, Append | Update):
                continue
            context = UpdateMode().fold(context, event)
            left = stages_left(event.hint)
            if left is None or (results and left >= results[-1].left):
                value = "nothing" if left is None else f"{left} after {results[-1].left}"
                raise ConfigurationError(
                    f"{part_name(source)} cannot be calibrated: its Hint.num_chunks says {value}, and must be the "
                    f"number of stages left: below {MAX_STAGES}, and lower with each event"
                )
            results.append(_Result(clock() - began_s, left, tuple(map(place, context))))
    return results, clock() - began_s


class _Counts:
    """Numbers of queries and their times, by stage."""

    def __init__(self) -> None:
        self.total: Counter[tuple[What, int, int, int]] = Counter()
        self.final: Counter[tuple[What, int, int, int]] = Counter()
        self.times: defaultdict[int, list[tuple[bool, Times]]] = defaultdict(list)
        """Times of each stage, by the number of stages left, each with whether the result was final."""

    def add(self, results: Sequence[_Result], end_s: float) -> None:
        """Count a query's results at each stage, including the stages that changed nothing."""
        if not results:
            return
        for left, is_final, times in _stage_times(results, end_s):
            self.times[left].append((is_final, times))
        by_stage = {each.left: each.places for each in results}
        before: tuple[Place, ...] | None = None
        stable: Counter[tuple[What, int]] = Counter()
        for left in range(results[0].left, -1, -1):
            places = by_stage.get(left, before or ())
            parts: list[tuple[What, int]] = [("order", 0), ("set", 0)]
            parts += [("prefix", length) for length in range(1, min(len(places), MAX_LENGTH) + 1)]
            for what, length in parts:
                is_same = before is not None and _is_same(what, length, places, before)
                stable[what, length] = stable[what, length] + 1 if is_same else 0
                key = what, length, left, min(stable[what, length], MAX_STABLE)
                self.total[key] += 1
                self.final[key] += _is_same(what, length, places, results[-1].places)
            before = places


def _is_same(what: What, length: int, places: tuple[Place, ...], others: tuple[Place, ...]) -> bool:
    """Whether the first `length` passages ("prefix"), all in order ("order"), or all ("set") are the same."""
    if what == "prefix":
        return places[:length] == others[:length]
    return places == others if what == "order" else set(places) == set(others)


def _stage_times(results: Sequence[_Result], end_s: float) -> Iterator[tuple[int, bool, Times]]:
    """Yield for each stage the number of stages left, whether its result was final, and the remaining times.

    The time of a stage that changed nothing is interpolated between its neighbours.
    """
    known = [(each.left, each.at_s) for each in results]
    if known[-1][0] > 0:
        known.append((0, end_s))
    at_s = {
        left: before_s + (after_s - before_s) * (a - left) / (a - b)
        for (a, before_s), (b, after_s) in pairwise(known)
        for left in range(a, b, -1)
    }
    at_s[0] = known[-1][1]
    first_final = next(each.left for each in results if each.places == results[-1].places)
    for left, stage_s in at_s.items():
        until_end_s = max(end_s - stage_s, 0.0)
        until_next_s = max(at_s.get(left - 1, end_s) - stage_s, 0.0)
        yield left, left <= first_final, Times(min(until_next_s, until_end_s), until_end_s)


def _stage(times: Sequence[tuple[bool, Times]]) -> Stage:
    """Return the 90th percentile of the seconds to the next stage, and example times of final and of other results."""
    nexts = [each.next_s for _, each in times] or [0.0]
    late_s = quantiles(nexts, n=10, method="inclusive")[-1] if len(nexts) > 1 else nexts[0]
    final, others = ([each for is_final, each in times if is_final is wanted] for wanted in (True, False))
    return Stage(late_s, _examples(final), _examples(others))


def _examples(times: Sequence[Times]) -> tuple[Times, ...]:
    """Return the medians of at most `MAX_TIMES` groups of equal size."""
    ascending = sorted(times, key=lambda each: (each.end_s, each.next_s))
    num = min(len(ascending), MAX_TIMES)
    return tuple(ascending[(2 * i + 1) * len(ascending) // (2 * num)] for i in range(num))
