"""Updates that wait until the end is near: when they come, and that nothing is lost."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from streamrag import Append, Chunk, ConfigurationError, CutShort, DelayedUpdates, Hint, Skipped, SourceError, Update
from streamrag.bench.virtual_time import run_virtual
from streamrag.core import SourceEvent
from streamrag.sources.retriever import RetrieverSource
from streamrag.testing import ScriptedSource

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

A, B, C = (Chunk(text, f"{text}.md") for text in "abc")


def update(*chunks: Chunk, end_s: float | None) -> Update:
    return Update(chunks, Hint(num_chunks=None, end_s=end_s))


def timed(*steps: Any, lead_s: float = 1.0) -> list[tuple[float, SourceEvent]]:
    """In virtual time: when each event came."""

    async def read() -> list[tuple[float, SourceEvent]]:
        now = asyncio.get_running_loop().time
        began_s = now()
        found = []
        async with aclosing(DelayedUpdates(ScriptedSource(steps), lead_s, clock=now).stream("why?")) as events:
            try:
                async for event in events:
                    found.append((round(now() - began_s, 3), event))  # noqa: PERF401 (those before an error)
            except SourceError:
                found.append((round(now() - began_s, 3), Skipped("error", "raised")))
        return found

    return run_virtual(read())


def test_the_newest_update_is_sent_when_the_end_is_near_and_then_each_as_it_comes() -> None:
    steps = (update(A, end_s=5.0), 1.0, update(B, A, end_s=4.0), 3.5, update(B, C, end_s=0.5), 0.5)
    assert timed(*steps) == [(4.0, update(B, A, end_s=1.0)), (4.5, update(B, C, end_s=0.5))]


def test_a_later_update_takes_the_place_of_one_held_back() -> None:
    assert timed(update(A, end_s=5.0), 3.0, update(B, end_s=0.0)) == [(3.0, update(B, end_s=0.0))]


@pytest.mark.parametrize("hint", [None, Hint(num_chunks=3), Hint(end_s=float("inf")), Hint(end_s=1.0)])
def test_an_update_is_sent_at_once_if_the_end_is_near_or_unknown(hint: Hint | None) -> None:
    assert timed(Update((A,), hint), 1.0) == [(0.0, Update((A,), hint))]


def test_a_search_that_ends_sooner_than_expected_loses_nothing() -> None:
    assert timed(update(A, end_s=5.0), 2.0) == [(2.0, update(A, end_s=3.0))]


def test_a_held_update_comes_before_any_event_but_a_skipped_page() -> None:
    gone, cut, more = Skipped("b.md", "gone"), CutShort("its time was up"), Append(C)
    assert timed(update(A, end_s=5.0), 1.0, gone, 1.0, cut) == [(1.0, gone), (2.0, update(A, end_s=3.0)), (2.0, cut)]
    assert timed(update(A, end_s=5.0), 1.0, more) == [(1.0, update(A, end_s=4.0)), (1.0, more)]


def test_a_held_update_comes_before_an_error() -> None:
    found = timed(update(A, end_s=5.0), 1.0, SourceError("gone"))
    assert found == [(1.0, update(A, end_s=4.0)), (1.0, Skipped("error", "raised"))]


async def test_a_query_that_stops_while_something_is_held_back_leaves_nothing() -> None:
    source = ScriptedSource((Append(A), update(B, end_s=1000.0), 1000.0))
    async with aclosing(DelayedUpdates(source, 1.0).stream("why?")) as events:
        assert await anext(events) == Append(A)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert source.num_streams == 0


async def test_starting_and_closing_are_passed_on() -> None:
    inner, lines = ScriptedSource(()), list[str]()
    source = DelayedUpdates(inner, 1.0)
    await source.start(lines.append)
    assert (inner.is_started, lines) == (True, ["scripted source is ready"])
    await source.aclose()
    assert not inner.is_started
    unstartable = DelayedUpdates(RetrieverSource(lambda query: [query]), 1.0)
    await unstartable.start(lines.append)
    await unstartable.aclose()


@pytest.mark.parametrize("lead_s", [-1, float("inf"), float("nan"), "1", None, True])
def test_a_lead_that_is_no_number_of_seconds_is_refused(lead_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="lead_s"):
        DelayedUpdates(ScriptedSource(()), lead_s)
