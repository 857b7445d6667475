"""Questions asked with streaming and without, in pairs close in time, with prompts that no prefix cache has."""

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from streamrag import Pipeline
from streamrag.query.options import QueryOptions
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_and_wait
from streamrag.telemetry import Answer, Answered, ChunkArrived, QueryEvent, Timings
from streamrag_bench.compare.interval import Interval, interval
from streamrag_bench.compare.picture import prefill_spans

MIN_ROUNDS = 5
Measure: TypeAlias = Callable[[Timings], float]
MEASURES: dict[str, Measure] = {
    "first token, from the question": lambda timings: timings.ttft_s,
    "first token, after retrieval": lambda timings: timings.ttft_after_retrieval_s,
    "last token, from the question": lambda timings: timings.total_s,
    "last token, after retrieval": lambda timings: timings.total_s - timings.retrieval_s,
}
"""The compared durations by name."""
FIRST_TOKEN = tuple(MEASURES)[:2]
LEAST_S = 0.001  # shorter times, as of a draft that is emitted at once, count as this, so that ratios stay finite
ARMS = ("streaming", "not streaming")


def answer_of(events: Sequence[QueryEvent]) -> Answer:
    """Return the answer of a query that ran to its end."""
    end = events[-1]
    assert isinstance(end, Answered)
    return end.answer


@dataclass(frozen=True, slots=True)
class AskedPair:
    """A question that was asked both ways."""

    question: str
    streaming: list[QueryEvent]
    waiting: list[QueryEvent]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """The answer with streaming, and the one without."""
        return answer_of(self.streaming), answer_of(self.waiting)

    @property
    def has_same_context(self) -> bool:
        """Whether both prompts had the same passages."""
        return len({answer.citations for answer in self.answers}) == 1

    @property
    def has_same_answer(self) -> bool:
        """Whether both answers have the same tokens and the same text."""
        return len({(answer.token_ids, answer.text) for answer in self.answers}) == 1

    def ratio(self, measure: Measure) -> float:
        """Return how many times as fast streaming was."""
        streaming, waiting = (max(measure(answer.timings), LEAST_S) for answer in self.answers)
        return waiting / streaming

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of both ways, as JSON values."""
        return [
            {
                "question": self.question,
                "arm": arm,
                **asdict(answer.timings),
                "chunks_s": [event.at_s for event in events if isinstance(event, ChunkArrived)],
                "prefill_s": prefill_spans(events),
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_invalidated": answer.num_invalidated,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "sources": [citation.uri for citation in answer.citations],
            }
            for arm, answer, events in zip(ARMS, self.answers, (self.streaming, self.waiting), strict=True)
        ]


AskedRound: TypeAlias = tuple[AskedPair, ...]
"""Questions that were asked at once, both ways."""


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """A group of pairs: of one source under one load, in rounds that are appended while they are measured."""

    name: str
    rounds: list[AskedRound] = field(default_factory=list)

    @property
    def pairs(self) -> list[AskedPair]:
        """The pairs of all rounds."""
        return [pair for each in self.rounds for pair in each]

    @property
    def is_enough(self) -> bool:
        """Whether more rounds would add little: all intervals are narrow."""
        return len(self.rounds) >= MIN_ROUNDS and all(self.interval(name).is_narrow for name in MEASURES)

    def interval(self, name: str) -> Interval:
        """Return the interval of a measure. Questions of one round delay each other, so a round counts once."""
        measure = MEASURES[name]
        return interval(
            [math.exp(statistics.mean(math.log(pair.ratio(measure)) for pair in each)) for each in self.rounds]
        )

    def medians(self, measure: Measure) -> tuple[float, float]:
        """Return the median with streaming, and the one without."""
        times = [[measure(answer.timings) for answer in pair.answers] for pair in self.pairs]
        streaming, waiting = map(statistics.median, zip(*times, strict=True))
        return streaming, waiting


def ignore(event: QueryEvent) -> None:
    """Do nothing with an event."""


async def ask_round(
    pipeline: Pipeline,
    questions: Sequence[str],
    options: QueryOptions,
    *,
    streaming_first: bool = True,
    on_event: Callable[[QueryEvent], object] = ignore,
) -> AskedRound:
    """Ask the questions at once, with streaming and without; `on_event` is called with each event of streaming."""
    asked: dict[bool, list[list[QueryEvent]]] = {}
    for overlap in (streaming_first, not streaming_first):
        asked[overlap] = await ask_at_once(
            pipeline, questions, {**options, "overlap": overlap}, on_event if overlap else ignore
        )
    return tuple(itertools.starmap(AskedPair, zip(questions, asked[True], asked[False], strict=True)))


async def ask_at_once(
    pipeline: Pipeline,
    questions: Sequence[str],
    options: QueryOptions,
    on_event: Callable[[QueryEvent], object] = ignore,
) -> list[list[QueryEvent]]:
    """Ask the questions at once, with prompts that no prefix cache has, and return the events of each."""
    options = await _uncached(pipeline, options)

    async def ask(question: str) -> list[QueryEvent]:
        events = []
        async with pipeline.events(question, **options) as stream:
            async for event in stream:
                events.append(event)
                on_event(event)
        return events

    tasks = [asyncio.create_task(ask(question)) for question in questions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(tasks)


async def _uncached(pipeline: Pipeline, options: QueryOptions) -> QueryOptions:
    """Return options for prompts that no prefix cache has: an embedded engine empties its own, which changes no prompt;
    for a server, each prompt begins with a new number."""
    reset = getattr(pipeline.backend, "reset_prefix_cache", None)
    if reset is not None and await reset():
        return options
    system = options.get("system") or options.get("template", pipeline.template).system
    return {**options, "system": f"Trial {random.randrange(10**8, 10**9)}. {system}"}


async def ask_rounds(
    pipeline: Pipeline,
    questions: Sequence[str],
    options: QueryOptions,
    group: ComparedGroup,
    *,
    num_at_once: int = 1,
    most_s: float = math.inf,
    most_rounds: int | None = None,
    on_event: Callable[[QueryEvent], object] = ignore,
    clock: Clock = monotonic,
) -> AsyncIterator[AskedRound]:
    """Ask `num_at_once` questions in turn, add each round to the group, and yield it.

    Ends after `most_rounds`, or when the intervals are narrow. No round begins after `most_s`.

    on_event: called with each event of streaming in the first round.
    """
    assert num_at_once <= len(set(questions)), "a question that is asked twice at once finds its prompt in the cache"
    endless, end_s = itertools.cycle(questions), clock() + most_s
    while True:
        together = list(itertools.islice(endless, num_at_once))
        num_done = len(group.rounds)
        asked = await ask_round(
            pipeline,
            together,
            options,
            streaming_first=num_done % 2 == 0,
            on_event=ignore if num_done else on_event,
        )
        group.rounds.append(asked)
        yield asked
        is_enough = group.is_enough if most_rounds is None else len(group.rounds) >= most_rounds
        if is_enough or clock() >= end_s:
            return
