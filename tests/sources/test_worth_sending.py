"""Sending what is worth it: the rule, and that nothing is lost by it, whatever a source does."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag import (
    Append,
    Calibration,
    Chunk,
    ConfigurationError,
    CutShort,
    Hint,
    Pipeline,
    SelectiveUpdates,
    Skipped,
    SourceError,
    Update,
    UpdateMode,
)
from streamrag.bench.virtual_time import run_virtual
from streamrag.core import SourceEvent
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.sources.emission.best_length import EngineEstimate, HeldContext, Scenario, best_length, scenarios
from streamrag.sources.emission.calibration import Count, Stage, Times
from streamrag.testing import ScriptedBackend, ScriptedSource

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PROFILE = TableProfile("test", "none", ((0, 0.0), (1000, 1.0)), pair_s=0.0, request_s=0.0, kv_tokens=1 << 20)
"""A millisecond a token."""
A, B, C, D, E = (Chunk(text * 400, f"{text}.md") for text in "abcde")
NUM_STAGES = 5


def calibration(
    p_final: float = 0.5, next_s: float = 1.0, num: int = 100, end_s: Sequence[float] | None = None
) -> Calibration:
    """Five stages, of which each takes as long, and whose first passages are as often final at any."""
    prefixes = [
        Count("prefix", length, left, stable, num, round(num * p_final) if left else num)
        for length in range(1, 6)
        for left in range(NUM_STAGES)
        for stable in range(NUM_STAGES)
    ]
    times = [Times(next_s if left else 0.0, left * next_s if end_s is None else end_s[left]) for left in range(5)]
    stages = tuple(Stage(each.next_s, (each,), (each,)) for each in times)
    return Calibration("test", num * NUM_STAGES, stages, tuple(prefixes))


def worth(source: Any, known: Calibration | None = None, **options: Any) -> SelectiveUpdates:
    return SelectiveUpdates(
        source, known or calibration(), PROFILE, **{"others": 0, "count_tokens": lambda chunk: 100, **options}
    )


def folded(events: Sequence[SourceEvent]) -> tuple[Chunk, ...]:
    context: tuple[Chunk, ...] = ()
    for event in events:
        if isinstance(event, Append | Update):
            context = UpdateMode().fold(context, event)
    return context


async def read(source: SelectiveUpdates) -> tuple[list[SourceEvent], Exception | None]:
    events: list[SourceEvent] = []
    try:
        async with aclosing(source.stream("why?")) as stream:
            async for event in stream:
                events.append(event)  # noqa: PERF401 (those that came before an error)
    except Exception as error:
        return events, error
    return events, None


def timed(steps: Sequence[Any], **options: Any) -> list[tuple[float, SourceEvent]]:
    """In virtual time: when each event came."""

    async def read_all() -> list[tuple[float, SourceEvent]]:
        now = asyncio.get_running_loop().time
        source = worth(ScriptedSource(steps), clock=now, **options)
        async with aclosing(source.stream("why?")) as stream:
            return [(now(), event) async for event in stream]

    return run_virtual(read_all())


# -------------------------------------------------------------------------------------------------------- the rule


def held(
    tokens: Sequence[int],
    p_final: Sequence[float],
    next_s: float,
    end_s: float,
    *,
    num_kept: int = 0,
    others: float = 0,
    price: float = 0,
) -> HeldContext:
    return HeldContext(num_kept, tuple(tokens), (Scenario(1.0, next_s, end_s, tuple(p_final)),), others, price)


def guess(num_computed: int = 0, num_sent: int = 0, budget: int = 100) -> EngineEstimate:
    made = EngineEstimate(PROFILE, budget)
    made.num_computed, made.num_sent = num_computed, num_sent
    return made


def test_what_is_surely_final_is_sent_when_there_would_be_no_time_for_it_later() -> None:
    assert best_length(held([500, 500], [1, 1], next_s=0.3, end_s=0.6), guess()) == 2
    assert best_length(held([500, 500], [1, 1], next_s=0.3, end_s=1.2), guess()) == 2
    assert best_length(held([500, 500], [1, 1], next_s=0.3, end_s=1.3), guess()) is None  # as well later


def test_what_is_never_final_is_not_sent() -> None:
    assert best_length(held([500, 500], [0, 0], next_s=0.3, end_s=0.6), guess()) is None


def test_only_what_is_likely_to_stand_is_sent() -> None:
    assert best_length(held([300, 300], [0.9, 0.1], next_s=0.35, end_s=0.35, price=0.5), guess()) == 1
    assert best_length(held([300, 300], [0.9, 0.1], 0.35, 0.35, price=0.5), guess(), whole_only=True) == 2
    assert best_length(held([300, 300], [0.9, 0.1], 0.55, 0.55, price=1), guess(), whole_only=True) is None


def test_a_step_of_the_engine_that_runs_in_vain_is_waited_for() -> None:
    """The next stage comes after 10 ms, a step takes a second: a lead of 10 ms is weighed with a delay of 990."""
    assert best_length(held([1000], [0.9], next_s=0.01, end_s=0.01), guess(budget=1000)) is None
    assert best_length(held([1000], [0.9], next_s=0.01, end_s=0.01), guess(budget=10)) == 1
    assert best_length(held([1000], [0.995], next_s=0.01, end_s=0.01), guess(budget=1000)) == 1


def test_what_others_wait_for_has_its_price() -> None:
    assert best_length(held([100], [0.5], next_s=0.1, end_s=0.1, price=0.9), guess()) == 1
    assert best_length(held([100], [0.5], next_s=0.1, end_s=0.1, price=1.1), guess()) is None


def test_beside_others_prefilling_takes_longer_and_begins_earlier() -> None:
    assert best_length(held([100], [1.0], next_s=0.1, end_s=0.5), guess()) is None
    assert best_length(held([100], [1.0], next_s=0.1, end_s=0.5, others=4), guess()) == 1


def test_what_is_kept_is_not_paid_for_again_and_comes_first() -> None:
    sent = guess(num_computed=100, num_sent=100)
    assert best_length(held([100, 100], [1, 1], next_s=0.05, end_s=0.05, num_kept=1), sent) == 2
    unfinished = guess(num_computed=0, num_sent=100)  # the engine is at what is kept until the next stage
    assert best_length(held([100, 100], [1, 1], next_s=0.05, end_s=0.05, num_kept=1), unfinished) is None


def test_what_is_being_computed_in_vain_is_stopped() -> None:
    running = guess(num_computed=100, num_sent=900)  # of which only the first 100 stand
    assert best_length(held([100, 500], [1, 0.0], 0.3, 0.3, num_kept=1, price=0.1), running) == 1
    assert best_length(held([100, 500], [1, 0.0], 9, 9, num_kept=1), running) is None  # nobody is in the way


def test_scenarios_are_weighed_by_how_often_all_is_final() -> None:
    found = scenarios([(1, 1)], [(2, 2), (3, 3)], [0.8, 0.6])
    assert [(each.weight, each.next_s) for each in found] == [(0.6, 1), (0.2, 2), (0.2, 3)]
    assert found[0].p_final == (1.0, 1.0)
    assert found[1].p_final == pytest.approx((0.5, 0.0))
    assert sum(each.weight for each in scenarios([], [(2, 2)], [0.5])) == 1
    assert [each.weight for each in scenarios([(1, 1)], [], [])] == [1.0, 0.0]


@given(
    tokens=st.lists(st.integers(0, 3000), max_size=6),
    p_first=st.floats(0, 1),
    times=st.tuples(st.floats(0, 10), st.floats(0, 10)),
    num_kept=st.integers(0, 6),
    sent=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
    others=st.floats(0, 10),
    price=st.floats(0, 10),
    budget=st.integers(1, 4000),
)
def test_a_length_is_one_that_can_be_sent(
    tokens: list[int],
    p_first: float,
    times: tuple[float, float],
    num_kept: int,
    sent: tuple[int, int],
    others: float,
    price: float,
    budget: int,
) -> None:
    num_kept = min(num_kept, len(tokens))
    likely = [p_first / number for number in range(1, len(tokens) + 1)]
    each = HeldContext(num_kept, tuple(tokens), scenarios([times], [times], likely), others, price)
    found = best_length(each, guess(min(sent), max(sent), max(budget, 50)))
    assert found is None or num_kept <= found <= len(tokens)


def test_the_engine_computes_while_time_passes() -> None:
    engine = EngineEstimate(PROFILE, 100)
    engine.send(0, 1000, 5.0)
    engine.advance(5.25)
    assert engine.num_computed == pytest.approx(250, abs=1)
    engine.send(100, 150, 5.25)
    assert engine.num_computed == 100
    engine.advance(9.0)
    assert engine.num_computed == 150


# ------------------------------------------------------------------------------------------------------ the source


def test_what_is_held_back_comes_when_retrieval_ends() -> None:
    steps = (Update((A, B), Hint(4)), 0.5, Skipped("x", "gone"), 0.5, Update((B, A), Hint(3)), 1.0)
    assert timed(steps, known=calibration(0.0, next_s=9.0)) == [
        (0.5, Skipped("x", "gone")),
        (2.0, Update((B, A), Hint(3))),
    ]


def test_a_whole_update_that_is_worth_it_is_sent_at_once() -> None:
    steps = (Update((A, B), Hint(1)), 1.0)
    assert timed(steps, known=calibration(1.0, next_s=0.3)) == [(0.0, Update((A, B), Hint(1)))]


def test_silence_says_that_a_stage_has_changed_nothing() -> None:
    """400 tokens take .4 s: with .6 s to go, there would presumably be too little time after the next stage."""
    chunks = (A, B, C, D)
    steps = (Update(chunks, Hint(4)), 5.0)
    (event,) = timed(steps, known=calibration(1.0, next_s=0.3), whole_only=True)
    assert event == (pytest.approx(0.6), Update(chunks, Hint(2)))


def test_once_all_stages_must_have_passed_nothing_is_held_back() -> None:
    steps = (Update((A,), Hint(4)), 50.0)
    ((at_s, event),) = timed(steps, known=calibration(0.0, next_s=0.5))
    assert (round(at_s, 6), event) == (2.0, Update((A,), Hint(0)))


def test_a_hint_of_the_end_is_believed() -> None:
    surely = calibration(1.0, next_s=1.0)
    assert timed((Update((A,), Hint(4, 0.05)), 0.05), known=surely)[0][0] == 0.0
    assert timed((Update((A,), Hint(4, 90.0)), 0.5, Update((B,), Hint(3, 90.0)), 0.5), known=surely) == [
        (1.0, Update((B,), Hint(3, 89.5)))
    ]


def test_the_part_that_is_likely_to_stand_is_sent_first() -> None:
    known = calibration(1.0, next_s=0.2)
    unlikely = tuple(replace(c, num_final=0) if c.length > 1 and c.left else c for c in known.counts)
    steps = (Update((A, B, C), Hint(1)), 1.0)
    known = replace(known, counts=unlikely)
    first, rest = timed(steps, known=known, price=1.0)
    assert first == (0.0, Update((A,), Hint(1)))
    assert rest == (pytest.approx(0.2), Update((A, B, C), Hint(0)))
    assert len(timed(steps, known=known, price=1.0, whole_only=True)) == 1


@pytest.mark.parametrize("hint", [None, Hint(), Hint(end_s=1.0), Hint(-1), Hint(5), Hint(1 << 40), Hint(2.5), Hint(0)])
def test_where_the_stage_is_not_known_everything_is_passed_on(hint: Hint | None) -> None:
    steps: list[Any] = [Update((A,), hint), 1.0, Update((B,), hint), 1.0]
    assert timed(steps, known=calibration(0.0)) == [(0.0, steps[0]), (1.0, steps[2])]


def test_an_append_is_passed_on_unless_something_is_held_back() -> None:
    steps: list[Any] = [Append(A, Hint(4)), Append(B, Hint(3)), Update((A, B, C), Hint(2)), Append(D, Hint(1)), 0.1]
    events = timed(steps, known=calibration(0.0))
    assert events == [(0.0, steps[0]), (0.0, steps[1]), (0.1, Update((A, B, C, D), Hint(1)))]


def test_an_update_that_stops_what_is_computed_in_vain_has_only_what_stays() -> None:
    steps: list[Any] = [Update((A, B), None), Update((A, C), Hint(2)), 0.5]
    assert timed(steps, known=calibration(0.0), price=1.0)[1:] == [
        (0.0, Update((A,), Hint(2))),
        (0.5, Update((A, C), Hint(2))),
    ]


def test_what_is_held_back_comes_before_a_cut() -> None:
    steps: list[Any] = [Update((A,), Hint(4)), CutShort("no time")]
    assert [event for _, event in timed(steps, known=calibration(0.0))] == [Update((A,), Hint(4)), CutShort("no time")]


async def test_what_is_held_back_comes_before_an_error_and_an_answer_has_it() -> None:
    source = worth(ScriptedSource((Update((A, B), Hint(4)), SourceError("no luck"))), calibration(0.0))
    events, error = await read(source)
    assert (events, str(error)) == ([Update((A, B), Hint(4))], "no luck")
    async with Pipeline(source, ScriptedBackend(), on_source_error="answer") as pipeline:
        stream = pipeline.stream("why?")
        async for _ in stream:
            pass
    assert [citation.uri for citation in stream.result.citations] == ["a.md", "b.md"]


async def test_by_default_the_retrievals_that_run_at_once_are_the_others() -> None:
    go_on = anyio.Event()
    source = worth(ScriptedSource((Update((A,), Hint(2)), go_on)), calibration(0.0), others=None)
    tasks = [asyncio.create_task(read(source)) for _ in range(3)]
    while source.num_streams < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert source.num_others() == 2
    go_on.set()
    for events, error in await asyncio.gather(*tasks):
        assert (events, error) == ([Update((A,), Hint(2))], None)
    assert source.num_streams == 0


async def test_what_others_says_is_checked_when_it_is_asked() -> None:
    source = worth(ScriptedSource((Update((A,), Hint(2)),)), others=lambda: float("nan"))
    events, error = await read(source)
    assert isinstance(error, ConfigurationError)
    assert "others=nan must be" in str(error)
    assert folded(events) == (A,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"others": -1}, "others=-1 must"),
        ({"others": "many"}, "others='many' must"),
        ({"price": float("inf")}, "price=inf must"),
        ({"price": None}, "price=None must"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must"),
    ],
)
def test_values_that_cannot_work_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        worth(ScriptedSource(()), **options)
    with pytest.raises(ConfigurationError, match="is no calibration"):
        SelectiveUpdates(ScriptedSource(()), "nowhere.json", PROFILE)
    with pytest.raises(ConfigurationError, match="no profile"):
        SelectiveUpdates(ScriptedSource(()), calibration(), "nowhere.json")


async def test_starting_and_closing_are_passed_on() -> None:
    inner = ScriptedSource(())
    source = worth(inner)
    await source.start(lambda line: None)
    assert (inner.is_started, source.name) == (True, "SelectiveUpdates(ScriptedSource)")
    await source.aclose()
    assert not inner.is_started


# -------------------------------------------------------------------------------------------- whatever a source does

chunks = st.sampled_from([A, B, C, D, E, replace(A, score=0.5), replace(B, passage=1), Chunk("", "")])
hints = st.none() | st.builds(
    Hint,
    num_chunks=st.none() | st.integers(-1, 6),
    end_s=st.none() | st.floats(-1, 3) | st.sampled_from([float("nan"), float("inf")]),
)
steps_of_any_kind = st.lists(
    st.builds(Append, chunks, hints)
    | st.builds(Update, st.lists(chunks, max_size=5).map(tuple), hints)
    | st.builds(Skipped, st.just("x"), st.just("gone"))
    | st.floats(0, 2),
    max_size=12,
)
ends = st.sampled_from([(), (CutShort("no time"),), (SourceError("no luck"),), (ValueError("a fault"),)])
options_of_any_kind = st.fixed_dictionaries(
    {
        "known": st.builds(calibration, st.floats(0, 1), st.floats(0, 1)),
        "others": st.sampled_from([0, 3, None]),
        "price": st.sampled_from([0, 0.1, 5]),
        "whole_only": st.booleans(),
        "max_num_batched_tokens": st.sampled_from([1, 64, 2048]),
        "count_tokens": st.sampled_from([lambda chunk: 100, lambda chunk: -5, lambda chunk: 10**9]),
    }
)


@given(steps=steps_of_any_kind, end=ends, options=options_of_any_kind)
@settings(deadline=None, max_examples=150)
def test_the_final_context_is_the_same_whatever_comes(steps: list[Any], end: tuple[Any, ...], options: Any) -> None:
    async def read_all() -> tuple[list[SourceEvent], Exception | None]:
        now = asyncio.get_running_loop().time
        return await read(worth(ScriptedSource((*steps, *end)), clock=now, **options))

    if options["max_num_batched_tokens"] == 1:
        options = {**options, "count_tokens": lambda chunk: 7}  # a step for each token of many is a test of patience
    events, error = run_virtual(read_all())
    came = [step for step in (*steps, *end) if not isinstance(step, float | Exception)]
    assert folded(events) == folded(came)
    assert [each for each in events if isinstance(each, Skipped)] == [s for s in steps if isinstance(s, Skipped)]
    assert any(isinstance(each, Update) for each in events) == any(isinstance(each, Update) for each in came)
    if end and isinstance(end[0], Exception):
        assert error is not None
        assert str(error) == str(end[0])
    else:
        assert error is None
    if end and isinstance(end[0], CutShort):
        assert events[-1] == end[0]


@given(steps=steps_of_any_kind, end=ends, turns=st.integers(0, 60), is_closed=st.booleans())
@settings(deadline=None, max_examples=100)
def test_cancelling_or_leaving_at_any_moment_stops_the_source(
    steps: list[Any], end: tuple[Any, ...], turns: int, is_closed: bool
) -> None:
    async def stop() -> None:
        inner = ScriptedSource((*steps, 0.5, *end))
        source = worth(inner, clock=asyncio.get_running_loop().time)

        async def read_some() -> None:
            async with aclosing(source.stream("why?")) as stream:
                async for _ in stream:
                    if is_closed:
                        return

        before = asyncio.all_tasks()
        task = asyncio.create_task(read_some())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert (inner.num_streams, source.num_streams) == (0, 0)
        assert asyncio.all_tasks() == before

    run_virtual(stop())
