"""The comparison of `demo.py`: the same retrieval, with streaming and without, in pairs close in time."""

import itertools
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import psutil  # type: ignore[import-untyped]
from scipy import stats  # type: ignore[import-untyped]

from streamrag import Pipeline, SamplingParams, VllmBackend
from streamrag.telemetry import Answer, Answered, QueryEvent, Timings

MIN_PAIRS = 5
NARROW = 1.1
"""Stop when both ends of each interval are within this factor of its middle."""
CONFIDENCE = 0.95
BUSY_LOAD = 0.3
"""Share of the cores that others may keep busy before a comparison is called unreliable."""
Measure: TypeAlias = Callable[[Timings], float]
MEASURES: dict[Measure, str] = {
    lambda timings: timings.ttft_s: "first token",
    lambda timings: timings.ttft_after_retrieval_s: "- after retrieval",
    lambda timings: timings.total_s: "last token",
    lambda timings: timings.total_s - timings.retrieval_s: "- after retrieval",
}
"""The compared durations, with their labels. They count from the question, except for those after retrieval."""


@dataclass(frozen=True)
class Pair:
    """One question asked both ways."""

    question: str
    streaming: list[QueryEvent]
    waiting: list[QueryEvent]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        ends = (self.streaming[-1], self.waiting[-1])
        assert isinstance(ends[0], Answered)
        assert isinstance(ends[1], Answered)
        return ends[0].answer, ends[1].answer

    def ratio(self, measure: Measure) -> float:
        """Return how many times as fast streaming was."""
        streaming, waiting = (measure(answer.timings) for answer in self.answers)
        return waiting / streaming


class Interval(NamedTuple):
    """A confidence interval of how many times as fast streaming is."""

    low: float
    middle: float
    high: float

    @property
    def is_narrow(self) -> bool:
        return self.high / self.middle <= NARROW

    @property
    def verdict(self) -> str:
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "unclear"


def interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios, with its confidence interval (Student's t, on logarithms)."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return Interval(0.0, math.exp(logs[0]), math.inf)
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
    return Interval(math.exp(mean - margin), math.exp(mean), math.exp(mean + margin))


class OthersLoad:
    """The load that other programs put on this machine, from its making on."""

    def __init__(self) -> None:
        self._start = _core_seconds()

    def share(self) -> float:
        """Return the share of the cores that programs other than this one and its children kept busy."""
        all_s, idle_s, own_s = (now - before for now, before in zip(_core_seconds(), self._start, strict=True))
        return max(all_s - idle_s - own_s, 0.0) / all_s if all_s > 0 else 0.0


def _core_seconds() -> tuple[float, float, float]:
    """Return the seconds of all cores since the machine started, idle ones, and those of this program."""
    times = psutil.cpu_times()._asdict()
    all_s = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # "user" has these already
    me = psutil.Process()
    own_s = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own_s += sum(process.cpu_times()[:4])  # user, system, and both of children that have ended
    return all_s, times["idle"] + times.get("iowait", 0.0), own_s


async def ask_pair(
    pipeline: Pipeline,
    backend: VllmBackend,
    question: str,
    params: SamplingParams,
    *,
    max_context_tokens: int,
    streaming_first: bool = True,
    on_event: Callable[[QueryEvent], object] = lambda event: None,
) -> Pair:
    """Ask one question both ways, each time with an empty prefix cache.

    on_event: called with each event of the streaming way.
    """
    events: dict[bool, list[QueryEvent]] = {True: [], False: []}
    for overlap in (streaming_first, not streaming_first):
        await backend.reset_prefix_cache()
        stream = pipeline.events(question, params=params, overlap=overlap, max_context_tokens=max_context_tokens)
        async for event in stream:
            events[overlap].append(event)
            if overlap:
                on_event(event)
    return Pair(question, events[True], events[False])


async def ask_pairs(
    pipeline: Pipeline,
    backend: VllmBackend,
    questions: Sequence[str],
    params: SamplingParams,
    *,
    max_context_tokens: int,
    most_s: float,
    most_pairs: int | None,
) -> AsyncIterator[Pair]:
    """Ask the questions in turn, and yield each pair, until there are enough or a pair has ended after `most_s`."""
    pairs: list[Pair] = []
    end_s = time.monotonic() + most_s
    for question in itertools.cycle(questions):
        pair = await ask_pair(
            pipeline,
            backend,
            question,
            params,
            max_context_tokens=max_context_tokens,
            streaming_first=len(pairs) % 2 == 0,
        )
        pairs.append(pair)
        yield pair
        if time.monotonic() >= end_s or is_enough(pairs, most_pairs):
            return


def is_enough(pairs: Sequence[Pair], most_pairs: int | None) -> bool:
    """Whether `most_pairs` are asked, or all intervals are narrow."""
    if most_pairs is not None:
        return len(pairs) >= most_pairs
    return len(pairs) >= MIN_PAIRS and all(each.is_narrow for each in intervals(pairs).values())


def intervals(pairs: Sequence[Pair]) -> dict[Measure, Interval]:
    """Return the interval of each measure."""
    return {measure: interval([pair.ratio(measure) for pair in pairs]) for measure in MEASURES}
