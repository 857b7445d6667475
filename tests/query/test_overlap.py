"""The choice of when to prefill, learnt from the outcomes of queries, and what the backend gets of it."""

import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from statistics import fmean, median

import anyio
import pytest

from streamrag import Append, Chunk, Pipeline
from streamrag.core import (
    AnswerChunk,
    BackendEvent,
    Hint,
    ModelInfo,
    Prefilled,
    Prompt,
    SamplingParams,
    Update,
    common_prefix_len,
)
from streamrag.errors import DeadlineExceededError
from streamrag.query.overlap import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    MIN_TURNS,
    RECHECK_EVERY,
    OverlapChooser,
    OverlapOutcome,
)
from streamrag.telemetry import OverlapChoice, OverlapWay
from streamrag.testing import CodePointTokenizer, ScriptedBackend, ScriptedSource

A, B, C = (Chunk(name, f"{name}.md") for name in ("alpha", "beta", "gamma"))

SPREAD = 0.2
"""Standard deviation of the logarithm of a query's time, about that of the demo's questions."""


def outcome(way: OverlapWay, ttft_s: float, *, most_saved_s: float = 1.0, has_forecast: bool = False) -> OverlapOutcome:
    return OverlapOutcome(way, ttft_s, ttft_s / 2, most_saved_s, has_forecast)


def simulate(
    mean_s: dict[OverlapWay, float],
    *,
    num_queries: int,
    seed: int = 0,
    num_running: int = 1,
    shares_processors: bool = True,
) -> tuple[list[OverlapChoice], list[float]]:
    """Return the choices for queries of these mean times, and the times they took."""
    chooser, rng = OverlapChooser(), random.Random(seed)
    choices, times_s = [], []
    for _ in range(num_queries):
        choice = chooser.choose(num_running, shares_processors=shares_processors)
        taken_s = mean_s[choice.way] * rng.lognormvariate(0.0, SPREAD)
        chooser.learn(outcome(choice.way, taken_s, has_forecast="delayed" in mean_s), num_running)
        choices.append(choice)
        times_s.append(taken_s)
    return choices, times_s


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@pytest.mark.parametrize(
    "mean_s",
    [
        {"immediate": 1.0, "none": 1.3},
        {"immediate": 1.3, "none": 1.0},
        {"immediate": 1.0, "none": 1.05},
        {"immediate": 1.2, "none": 1.3, "delayed": 1.0},
        {"immediate": 1.0, "none": 3.0, "delayed": 1.5},
    ],
)
@pytest.mark.parametrize("shares_processors", [True, False])
def test_no_learnt_percentile_is_3_percent_slower_than_the_best_way(
    mean_s: dict[OverlapWay, float], shares_processors: bool
) -> None:
    choices, times_s = simulate(mean_s, num_queries=6_000, shares_processors=shares_processors)
    rng = random.Random(1)
    best_s = [min(mean_s.values()) * rng.lognormvariate(0.0, SPREAD) for _ in range(20_000)]
    for share in (0.5, 0.95):
        assert percentile(times_s[1_000:], share) < 1.03 * percentile(best_s, share)
    best = min(mean_s, key=lambda way: mean_s[way])
    assert Counter(choice.way for choice in choices[1_000:]).most_common(1)[0][0] == best


def test_a_worse_way_is_tried_again_now_and_then_and_taken_when_it_has_become_the_better_one() -> None:
    chooser, slow = OverlapChooser(), "immediate"
    ways: list[OverlapWay] = []
    for i in range(4_000):
        slow = "none" if i >= 2_000 else "immediate"
        choice = chooser.choose(1, shares_processors=True)
        ways.append(choice.way)
        chooser.learn(outcome(choice.way, 2.0 if choice.way == slow else 1.0), 1)
    assert Counter(ways[1_000:2_000])["none"] >= 1_000 * (1 - 2 / RECHECK_EVERY)
    assert Counter(ways[-1_000:])["immediate"] >= 1_000 * (1 - 2 / RECHECK_EVERY)


def test_with_processors_of_its_own_prefill_begins_at_once_and_waiting_is_tried_rarely() -> None:
    choices, _ = simulate({"immediate": 1.0, "none": 3.0}, num_queries=100, shares_processors=False)
    assert {choice.way for choice in choices[:7]} == {"immediate"}
    assert 3 <= sum(choice.way == "none" for choice in choices) <= 8


def test_queries_that_run_together_have_one_way() -> None:
    choices, _ = simulate({"immediate": 1.0, "none": 1.3}, num_queries=400, num_running=8)
    for i in range(0, 400, 8):
        assert len({choice.way for choice in choices[i : i + 8]}) == 1
    assert Counter(choice.way for choice in choices[200:])["immediate"] > 150


def test_each_level_of_load_is_learnt_alone() -> None:
    chooser = OverlapChooser()
    best: dict[int, OverlapWay] = {1: "immediate", 16: "none"}
    ways: dict[int, list[OverlapWay]] = {1: [], 16: []}
    for _ in range(1_000):
        for num_running, faster in best.items():
            choice = chooser.choose(num_running, shares_processors=True)
            ways[num_running].append(choice.way)
            chooser.learn(outcome(choice.way, 1.0 if choice.way == faster else 2.0), num_running)
    for num_running, faster in best.items():
        assert Counter(ways[num_running][500:])[faster] > 400


def test_a_way_that_never_answers_is_left() -> None:
    chooser, ways = OverlapChooser(), []
    for _ in range(400):
        choice = chooser.choose(1, shares_processors=True)
        ways.append(choice.way)
        if choice.way != "none":  # none ran into the deadline
            chooser.learn(outcome(choice.way, 1.0), 1)
    assert ways.count("none") <= MIN_TURNS + 1 + 400 // RECHECK_EVERY


def test_the_chooser_keeps_trying_both_ways_while_no_query_is_answered() -> None:
    chooser = OverlapChooser()
    assert {chooser.choose(1, shares_processors=True).way for _ in range(50)} == {"immediate", "none"}


def test_no_other_way_is_tried_if_retrieval_sends_everything_at_its_end() -> None:
    chooser = OverlapChooser()
    choices = []
    for _ in range(50):
        choices.append(chooser.choose(1, shares_processors=True))
        chooser.learn(outcome(choices[-1].way, 1.0, most_saved_s=0.01), 1)
    assert {choice.way for choice in choices[MIN_TURNS:]} == {"none"}
    assert choices[-1].reason == "retrieval ends right after its first result"


def test_a_delay_needs_a_source_that_says_when_it_ends_and_is_as_long_as_a_prefill() -> None:
    with_forecast, _ = simulate({"immediate": 1.2, "none": 1.3, "delayed": 1.0}, num_queries=60)
    without, _ = simulate({"immediate": 1.2, "none": 1.3}, num_queries=60)
    assert "delayed" not in {choice.way for choice in without}
    leads_s = [choice.lead_s for choice in with_forecast if choice.way == "delayed"]
    assert leads_s
    assert all(lead_s is not None and 0.4 < lead_s < 1.0 for lead_s in leads_s)
    assert all(choice.lead_s is None for choice in with_forecast if choice.way != "delayed")


def test_the_reason_says_how_much_it_gains() -> None:
    chooser = OverlapChooser()
    for _ in range(20):
        choice = chooser.choose(1, shares_processors=True)
        chooser.learn(outcome(choice.way, 1.0 if choice.way == "none" else 1.25), 1)
    assert choice == OverlapChoice(
        "none", 'the first token comes 20% sooner after the question than with "immediate"', None
    )


def test_no_way_gains_more_than_the_time_for_which_retrieval_goes_on() -> None:
    """Whatever else made the first token late without overlap, an overlap of 0.1 s saves no more."""
    chooser = OverlapChooser()
    for _ in range(20):
        choice = chooser.choose(1, shares_processors=True)
        chooser.learn(outcome(choice.way, 2.0 if choice.way == "none" else 1.0, most_saved_s=0.1), 1)
    assert choice.reason == 'the first token comes 5% sooner after the question than with "none"'


COLD: dict[OverlapWay, float] = {"immediate": 1.0, "none": 1.05, "delayed": 0.95}
CACHED: dict[OverlapWay, float] = {"immediate": 0.26, "none": 0.22, "delayed": 0.34}


def ask_nine_and_one_of_them_again(num_again: int, seed: int) -> list[OverlapChoice]:
    """Return the choices for a question that is asked again after nine different ones, with a search of 0.1 s."""
    chooser, rng = OverlapChooser(), random.Random(seed)
    prompts = [tuple(rng.randrange(1_000) for _ in range(900)) for _ in range(9)]
    choices = []
    for number in range(9 + num_again):
        choice = chooser.choose(1, shares_processors=True)
        taken_s = (COLD if number < 9 else CACHED)[choice.way] * rng.lognormvariate(0.0, SPREAD)
        learnt = outcome(choice.way, taken_s, most_saved_s=0.08, has_forecast=True)
        chooser.learn(replace(learnt, token_ids=prompts[number if number < 9 else 4]), 1)
        choices.append(choice)
    return choices[9:]


def test_savings_of_the_prefix_cache_are_no_merit_of_the_chosen_way() -> None:
    choices = [choice for seed in range(40) for choice in ask_nine_and_one_of_them_again(40, seed)]
    ways = Counter(choice.way for choice in choices)
    assert ways["none"] > 0.6 * len(choices)
    claims = [int(found[1]) for choice in choices if (found := re.search(r"(\d+)%", choice.reason))]
    assert median(claims) <= 25
    assert max(claims) <= 100 * 0.08 / min(CACHED.values())


@pytest.mark.parametrize("num_shared", [0, 2_000])
def test_a_long_beginning_that_all_prompts_share_changes_nothing(num_shared: int) -> None:
    chooser, rng, ways = OverlapChooser(), random.Random(3), []
    for number in range(300):
        choice = chooser.choose(1, shares_processors=True)
        ways.append(choice.way)
        taken_s = (1.0 if choice.way == "immediate" else 1.5) * rng.lognormvariate(0.0, SPREAD)
        learnt = replace(outcome(choice.way, taken_s), token_ids=(*range(num_shared), *[number] * 900))
        chooser.learn(learnt, 1)
    assert Counter(ways[20:])["immediate"] > 0.95 * len(ways[20:])


def test_a_way_that_is_best_for_new_prompts_is_left_when_all_are_cached_and_another_is_better() -> None:
    chooser, ways = OverlapChooser(), []
    for number in range(200):
        choice = chooser.choose(1, shares_processors=True)
        ways.append(choice.way)
        slow: OverlapWay = "none" if number < 60 else "immediate"
        taken_s = (1.0 if number < 60 else 0.2) * (1.3 if choice.way == slow else 1.0)
        chooser.learn(replace(outcome(choice.way, taken_s), token_ids=(number % 60,) * 900), 1)
    assert Counter(ways[20:60])["immediate"] > 30
    assert Counter(ways[100:])["none"] > 90


def test_the_oldest_known_beginnings_of_prompts_are_forgotten_for_newer_ones() -> None:
    chooser = OverlapChooser()
    chooser.choose(1, shares_processors=True)
    for number in range(MAX_BLOCKS // 100 + 5):
        chooser.learn(replace(outcome("none", 1.0), token_ids=(number,) * (100 * BLOCK_SIZE)), 1)
    assert len(chooser._blocks) == MAX_BLOCKS
    assert chooser._size((0,) * 900) == chooser._size((-1,) * 900)
    assert chooser._size((0,) * 900) == 0


class Chosen(OverlapChooser):
    """One that always chooses the same."""

    def __init__(self, choice: OverlapChoice) -> None:
        self.choice = choice
        self.outcomes: list[OverlapOutcome] = []

    def choose(self, num_running: int, *, shares_processors: bool) -> OverlapChoice:
        return self.choice

    def learn(self, outcome: OverlapOutcome, num_running: int) -> None:
        self.outcomes.append(outcome)


async def prompts_of(steps: Sequence[object], choice: OverlapChoice) -> tuple[list[str], list[OverlapOutcome]]:
    """Return the last characters of each prompt's context, and what was learnt."""
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource(steps), backend) as pipeline:  # type: ignore[arg-type]
        pipeline._overlap_chooser = chooser = Chosen(choice)
        async with pipeline.stream("Why?") as stream:
            _ = [chunk async for chunk in stream]
        assert stream.result.overlap == choice
    texts = ["".join(map(chr, prompt.token_ids)) for prompt in backend.prompts[0]]
    return [" ".join(name for name in ("alpha", "beta", "gamma") if name in text) for text in texts], chooser.outcomes


async def test_a_delayed_query_sends_the_newest_context_when_the_end_is_near() -> None:
    steps = [Update((A,), Hint(end_s=10.0)), Update((B,), Hint(end_s=0.25)), 0.6, Update((C,))]
    delayed, [learnt] = await prompts_of(steps, OverlapChoice("delayed", "", 0.1))
    assert delayed == ["beta", "gamma", "gamma"]
    assert learnt.has_forecast
    assert learnt.most_saved_s > 0.5


@pytest.mark.parametrize(
    ("way", "sent"),
    [("immediate", ["", "alpha", "alpha beta", "alpha beta"]), ("none", ["alpha beta"]), ("delayed", ["alpha beta"])],
)
async def test_the_way_decides_which_prompts_are_sent(way: OverlapWay, sent: list[str]) -> None:
    steps = [Append(A, Hint(end_s=9.0)), 0.01, Append(B, Hint(end_s=9.0))]
    assert (await prompts_of(steps, OverlapChoice(way, "", 1.0)))[0] == sent


async def test_without_a_forecast_a_delayed_query_sends_at_once() -> None:
    assert (await prompts_of([Append(A)], OverlapChoice("delayed", "", 1.0)))[0] == ["alpha", "alpha"]


@pytest.mark.parametrize(("overlap", "way"), [(True, "immediate"), (False, "none")])
async def test_the_chooser_does_not_learn_from_an_overlap_that_the_caller_set(overlap: bool, way: OverlapWay) -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend("ok")) as pipeline:
        pipeline._overlap_chooser = chooser = Chosen(OverlapChoice(way, "never asked"))
        async with pipeline.stream("Why?", overlap=overlap) as stream:
            _ = [chunk async for chunk in stream]
    assert stream.result.overlap == OverlapChoice(way, f"overlap={overlap}")
    assert not chooser.outcomes


async def test_a_query_that_is_stopped_while_it_waits_for_its_time_leaves_nothing() -> None:
    source = ScriptedSource([Update((A,), Hint(end_s=60.0)), anyio.Event()])
    backend = ScriptedBackend("ok")
    async with Pipeline(source, backend) as pipeline:
        pipeline._overlap_chooser = Chosen(OverlapChoice("delayed", "", 1.0))
        with pytest.raises(DeadlineExceededError):
            _ = [chunk async for chunk in pipeline.stream("Why?", deadline_s=1)]
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)
    assert backend.prompts == [[]]


async def test_the_pipeline_learns_for_an_engine_on_the_same_processors() -> None:
    backend = ScriptedBackend("ok")
    backend.model = ModelInfo("scripted", CodePointTokenizer(), 100_000, shares_processors=True)
    ways = []
    async with Pipeline(ScriptedSource([Append(A), 0.05, Append(B)]), backend) as pipeline:
        for _ in range(2 * MIN_TURNS):
            async with pipeline.stream("Why?") as stream:
                _ = [chunk async for chunk in stream]
            assert stream.result.overlap is not None
            ways.append(stream.result.overlap.way)
    assert Counter(ways) == {"immediate": MIN_TURNS, "none": MIN_TURNS}


def regret(mean_s: dict[OverlapWay, float], seed: int) -> float:
    """Return what learning cost 100 queries, as a share of the best way's time."""
    choices, _ = simulate(mean_s, num_queries=100, seed=seed)
    best_s = min(mean_s.values())
    return sum(mean_s[choice.way] - best_s for choice in choices) / (100 * best_s)


def test_ways_that_are_hard_to_tell_apart_cost_less_than_turns_would() -> None:
    """Between 20 and 100 queries, turns would cost 5 %, half of what the ways differ by."""
    mean_s: dict[OverlapWay, float] = {"immediate": 1.0, "none": 1.1}
    costs = []
    for seed in range(40):
        choices, _ = simulate(mean_s, num_queries=100, seed=seed)
        costs += [mean_s[choice.way] - 1 for choice in choices[20:]]
    assert fmean(costs) < 0.02


def test_learning_costs_the_first_hundred_queries_little() -> None:
    for other_s in (1.02, 1.1, 1.5, 3.0):
        costs = [regret({"immediate": 1.0, "none": other_s}, seed) for seed in range(20)]
        assert median(costs) < 0.12


class Clock:
    """A clock that goes on only when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class CachingBackend(ScriptedBackend):
    """A backend on retrieval's processors, with a prefix cache of whole prompts and without records, as servers are.

    Each prompt takes 0.05 s and a millisecond per token that is not cached.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.model = ModelInfo("scripted", CodePointTokenizer(), 100_000, shares_processors=True)
        self._clock = clock
        self._cached: list[tuple[int, ...]] = []

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for prompt in prompts:
            num_cached = max((common_prefix_len(prompt.token_ids, other) for other in self._cached), default=0)
            self._clock.now_s += 0.05 + 0.001 * (len(prompt.token_ids) - num_cached)
            self._cached.append(prompt.token_ids)
            yield Prefilled(len(prompt.token_ids))
        yield AnswerChunk("a", (97,), "stop")


class SlowSource:
    """A search of 0.1 s, whose passages are longer for questions with an odd number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def stream(self, query: str) -> AsyncIterator[Append]:
        words = f"{query} " * (300 if int(query) % 2 else 60)
        for number in range(2):
            self._clock.now_s += 0.05
            yield Append(Chunk(f"{number} {words}", f"{number}.md"))
            for _ in range(20):
                await anyio.lowlevel.checkpoint()  # the backend prefills what there is


async def test_a_pipeline_whose_backend_keeps_no_record_learns_nothing_wrong_from_a_prefix_cache() -> None:
    """Without overlap, the first prompts are long by chance; then one question is asked again and again."""
    clock = Clock()
    answers = []
    async with Pipeline(SlowSource(clock), CachingBackend(clock), clock=clock) as pipeline:
        for question in [*range(10), *[4] * 40]:
            async with pipeline.stream(str(question)) as stream:
                _ = [chunk async for chunk in stream]
            answers.append(stream.result)
    ways = [answer.overlap.way for answer in answers if answer.overlap is not None]
    assert ways[:6] == ["immediate", "none"] * 3
    assert Counter(ways[20:])["none"] > 25
    by_way = {way: min(a.timings.ttft_s for a, w in zip(answers, ways, strict=True) if w == way) for way in set(ways)}
    assert by_way["none"] < by_way["immediate"]
