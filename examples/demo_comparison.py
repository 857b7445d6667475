"""The comparison of `demo.py`: the same retrieval, with streaming and without, in pairs close in time."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats  # type: ignore[import-untyped]

from streamrag import Pipeline, SamplingParams, VllmBackend
from streamrag.telemetry import Answer, Answered, QueryEvent

MIN_PAIRS = 5
NARROW = 1.1
"""Stop when both ends of each interval are within this factor of its middle."""
CONFIDENCE = 0.95
BUSY_LOAD = 0.3
"""Processes per core that others may run before a comparison is called unreliable."""
MEASURES = {
    "ttft_s": "first token",
    "ttft_after_retrieval_s": "- after retrieval",
    "total_s": "last token",
}
"""Labels of the compared durations. They count from the question, except for the one after retrieval."""


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

    def ratio(self, measure: str) -> float:
        streaming, waiting = (getattr(answer.timings, measure) for answer in self.answers)
        return float(waiting / streaming)


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


def others_load() -> float:
    """Return the processes that run per core, averaged over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


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
    on_pair: Callable[[Pair], object] = lambda pair: None,
) -> list[Pair]:
    """Ask the questions in turn until all intervals are narrow, `most_s` are over, or `most_pairs` are asked."""
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
        on_pair(pair)
        if most_pairs is not None and len(pairs) >= most_pairs:
            break
        if len(pairs) >= MIN_PAIRS and (
            time.monotonic() >= end_s or all(i.is_narrow for i in intervals(pairs).values())
        ):
            break
    return pairs


def intervals(pairs: Sequence[Pair]) -> dict[str, Interval]:
    """Return the interval of each measure."""
    return {measure: interval([pair.ratio(measure) for pair in pairs]) for measure in MEASURES}
