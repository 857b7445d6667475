"""Pairs of questions: their prompts, when asking ends, and the intervals of their ratios."""

import itertools
import math
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from asked_pairs import events, group_of
from scipy import stats  # type: ignore[import-untyped]

from streamrag import Append, Chunk, Pipeline, Prompt, SamplingParams
from streamrag.core import BackendEvent
from streamrag.errors import BackendError
from streamrag.telemetry import Timings
from streamrag.testing import ScriptedBackend, ScriptedSource
from streamrag_bench.compare.interval import CONFIDENCE, interval
from streamrag_bench.compare.others_load import OthersLoad, core_seconds
from streamrag_bench.compare.pairs import MEASURES, MIN_ROUNDS, ComparedGroup, ask_rounds

QUESTIONS = ("Why does the printer jam?", "Who approves travel?", "When is lunch?")
STEPS = [Append(Chunk("Paper jams when damp.", "printers.md"))]


class ScriptedEngine(ScriptedBackend):
    """A backend with a prefix cache to empty, which it can unless it is said to be in use."""

    def __init__(self, *, is_in_use: bool = False) -> None:
        super().__init__("Damp")
        self.num_resets = 0
        self.is_in_use = is_in_use

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return not self.is_in_use


async def asked(backend: ScriptedBackend, **options: float) -> ComparedGroup:
    group = ComparedGroup("load")
    async with Pipeline(ScriptedSource(STEPS), backend) as pipeline:
        params = SamplingParams(max_tokens=4)
        async for _ in ask_rounds(pipeline, QUESTIONS, {"params": params}, group, **options):  # type: ignore[arg-type]
            pass
    return group


def heads(backend: ScriptedBackend) -> list[str]:
    """The complete prompt of each query, up to its first passage."""
    texts = (bytes(prompts[-1].token_ids).decode() for prompts in backend.prompts)
    return [text.partition("Paper")[0] for text in texts]


def test_an_interval_is_students_of_the_logarithms() -> None:
    ratios = [2.1, 1.7, 2.6, 1.9, 2.2]
    logs = [math.log(ratio) for ratio in ratios]
    expected = stats.ttest_1samp(logs, 0).confidence_interval(CONFIDENCE)
    found = interval(ratios)
    assert [math.log(end) for end in (found.low, found.high)] == pytest.approx([expected.low, expected.high])
    assert found.middle == pytest.approx(math.prod(ratios) ** (1 / 5))
    turned = interval([1 / ratio for ratio in ratios])
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low)), "both ways are compared alike"


@pytest.mark.parametrize(
    ("ratios", "word", "is_narrow"),
    [
        ([2.0, 2.1, 1.9], "faster", True),
        ([0.5, 0.52, 0.51], "slower", True),
        ([2.0, 0.5, 1.1], "unclear", False),
        ([3.0], "unclear", False),
        ([1.0, 1.001, 0.999, 1.0], "the same", True),
        ([1.01, 1.012, 1.011], "the same", True),  # sooner by what nobody feels
        ([1.05, 1.06, 1.055, 1.05], "faster", True),
        ([1.1, 1.2, 1.0, 1.15, 1.05], "faster", False),  # clear, but more pairs may still change that
        ([0.95, 1.05, 1.0, 1.0, 0.96, 1.05], "unclear", False),
    ],
)
def test_a_word_and_an_end_are_found_for_each_interval(ratios: list[float], word: str, is_narrow: bool) -> None:
    found = interval(ratios)
    assert (found.word, found.is_narrow) == (word, is_narrow)


def test_first_and_last_token_are_timed_from_the_question_and_after_retrieval() -> None:
    timings = Timings(0.0, 1.0, retrieval_s=3.0, ttft_s=4.5, ttft_after_retrieval_s=1.5, total_s=9.0)
    assert [measure(timings) for measure in MEASURES.values()] == [4.5, 1.5, 9.0, 6.0]


def test_an_answer_that_is_there_at_once_has_a_finite_ratio() -> None:
    group = group_of((events(ttft_s=1.0, total_s=1.0), events(ttft_s=1.5)))
    assert group.interval("first token, after retrieval").middle == pytest.approx(500)


def test_questions_that_are_asked_together_count_as_one_round() -> None:
    pairs = [group_of((events(ttft_s=2.0), events(ttft_s=ttft_s))).pairs[0] for ttft_s in (2.0, 8.0)]
    group = ComparedGroup("2 at once", [tuple(pairs)])
    found = group.interval("first token, from the question")
    assert (found.middle, found.high) == (pytest.approx(2.0), math.inf)


async def test_no_round_begins_when_time_has_run_out() -> None:
    backend = ScriptedEngine()
    group = await asked(backend, most_s=0.0)
    assert (len(group.rounds), backend.num_resets) == (1, 2)


async def test_the_wanted_number_of_rounds_is_asked_with_each_way_first_in_turn() -> None:
    backend = ScriptedEngine()
    group = await asked(backend, most_rounds=7)
    assert [pair.question for pair in group.pairs] == [QUESTIONS[i % 3] for i in range(7)]
    assert backend.num_resets == 14
    assert [answer.text for pair in group.pairs for answer in pair.answers] == ["Damp"] * 14
    ways = [answer.overlap.way for pair in group.pairs for answer in pair.answers if answer.overlap]
    assert ways == ["immediate", "none"] * 7
    assert all(pair.has_same_context and pair.has_same_answer for pair in group.pairs)
    submitted = [[answer.submitted_s for answer in pair.answers] for pair in group.pairs]
    assert [streaming < waiting for streaming, waiting in submitted] == [True, False] * 3 + [True]


async def test_narrow_intervals_are_enough() -> None:
    pair = (events(ttft_s=1.1), events(ttft_s=2.0))
    assert group_of(*[pair] * MIN_ROUNDS).is_enough
    assert not group_of(*[pair] * (MIN_ROUNDS - 1)).is_enough
    assert not group_of(*[pair] * MIN_ROUNDS, (events(ttft_s=1.1), events(ttft_s=1.2))).is_enough


async def test_an_emptied_prefix_cache_leaves_prompts_as_they_are() -> None:
    backend = ScriptedEngine()
    await asked(backend, most_rounds=2)
    assert len(set(heads(backend))) == 1


@pytest.mark.parametrize("backend", [ScriptedBackend("Damp"), ScriptedEngine(is_in_use=True)])
async def test_prompts_begin_differently_where_no_cache_can_be_emptied(backend: ScriptedBackend) -> None:
    await asked(backend, most_rounds=2)
    found = heads(backend)
    assert len(found) == 4
    assert len({head[:60] for head in found}) == 4


async def test_questions_are_asked_at_once() -> None:
    backend = ScriptedEngine()
    group = await asked(backend, num_at_once=2, most_rounds=2)
    assert [[pair.question for pair in each] for each in group.rounds] == [
        list(QUESTIONS[:2]),
        [QUESTIONS[2], QUESTIONS[0]],
    ]
    assert backend.num_resets == 4


async def test_an_error_leaves_no_other_question_running() -> None:
    class Backend(ScriptedBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            if next(numbers) == 1:
                raise BackendError("broken")
            async for event in super().generate(prompts, params):
                yield event

    numbers, backend = itertools.count(), Backend(is_endless=True)
    with pytest.raises(BackendError, match="broken"):
        await asked(backend, num_at_once=2)
    assert backend.num_requests == 0


def test_the_load_of_others_leaves_out_our_own() -> None:
    program = "print(sum(i * i for i in range(20_000_000)))"
    before_all, _, before_own = core_seconds()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after_all, _, after_own = core_seconds()
    assert after_own - before_own > 0, "a child that has ended is one's own"
    assert after_all > before_all
    assert 0 <= OthersLoad().share() <= 1
