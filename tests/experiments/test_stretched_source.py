import asyncio
import time
from contextlib import aclosing

import anyio
import pytest
from stretched_source import StretchedSource

from streamrag.core import Append, Chunk, Hint, Skipped, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.retriever import RetrieverSource
from streamrag.testing import ScriptedSource

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

EVENTS: list[SourceEvent] = [
    Append(Chunk("one", "1"), Hint(num_chunks=2, end_s=1.5)),
    Skipped("2", "gone"),
    Append(Chunk("three", "3")),
    Update((Chunk("four", "4"),), Hint(num_chunks=0)),
]


async def timed(source: StretchedSource) -> tuple[list[SourceEvent], list[float]]:
    """The events, and when they and the end came, in seconds from the first."""
    found, came_s = [], []
    async with aclosing(source.stream("query")) as events:
        async for event in events:
            found.append(event)
            came_s.append(time.monotonic())
    came_s.append(time.monotonic())
    return found, [at_s - came_s[0] for at_s in came_s]


async def test_events_come_at_the_gaps_that_are_given_and_the_last_one_goes_on() -> None:
    found, came_s = await timed(StretchedSource(ScriptedSource(EVENTS), (0.02, 0.05)))
    assert found[1:] == EVENTS[1:]
    assert found[0] == Append(Chunk("one", "1"), Hint(num_chunks=2))  # nobody knows when the end comes now
    assert all(at_s >= due_s - 0.01 for at_s, due_s in zip(came_s, (0, 0.02, 0.07, 0.12, 0.12), strict=True))


async def test_the_end_can_be_held_back_too() -> None:
    found, came_s = await timed(StretchedSource(ScriptedSource(EVENTS[2:]), (0.02,), end_gap_s=0.06))
    assert found == EVENTS[2:]
    assert all(at_s >= due_s - 0.01 for at_s, due_s in zip(came_s, (0, 0.02, 0.08), strict=True))


async def test_a_factor_multiplies_what_really_passed_until_each_event_and_the_end() -> None:
    steps = (EVENTS[0], 0.03, EVENTS[1], EVENTS[2], 0.02)
    found, came_s = await timed(StretchedSource(ScriptedSource(steps), factor=4))
    assert found == [Append(Chunk("one", "1"), Hint(num_chunks=2, end_s=6.0)), *EVENTS[1:3]]
    assert all(at_s >= due_s - 0.01 for at_s, due_s in zip(came_s, (0, 0.12, 0.12, 0.2), strict=True))


async def test_the_source_works_on_while_its_events_are_held_back() -> None:
    source = ScriptedSource(EVENTS)
    async with aclosing(StretchedSource(source, (1000.0,)).stream("query")) as events:
        await anext(events)
        async with asyncio.timeout(20):
            while source.num_streams:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert source.queries == ["query"]


async def test_leaving_early_stops_the_source() -> None:
    source = ScriptedSource((EVENTS[0], anyio.Event()))
    async with aclosing(StretchedSource(source, factor=2).stream("query")) as events:
        await anext(events)
        assert source.num_streams == 1
    assert source.num_streams == 0


async def test_cancelling_while_an_event_is_held_back_stops_the_source() -> None:
    source = ScriptedSource((*EVENTS, anyio.Event()))
    first = asyncio.Event()

    async def read() -> None:
        async with aclosing(StretchedSource(source, (1000.0,)).stream("query")) as events:
            async for _ in events:
                first.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(first.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.num_streams == 0


async def test_an_error_of_the_source_comes_after_its_events() -> None:
    source = StretchedSource(ScriptedSource((*EVENTS[:2], SourceError("half-way"))), (0.0,))
    async with aclosing(source.stream("query")) as events:
        found = [await anext(events), await anext(events)]
        with pytest.raises(SourceError, match="half-way"):
            await anext(events)
    assert found[1] == EVENTS[1]


async def test_starting_and_closing_are_passed_on() -> None:
    inner, lines = ScriptedSource(EVENTS), list[str]()
    source = StretchedSource(inner, factor=1)
    await source.start(lines.append)
    assert (inner.is_started, lines) == (True, ["scripted source is ready"])
    await source.aclose()
    assert not inner.is_started


async def test_a_source_that_needs_no_start_is_stretched_too() -> None:
    source = StretchedSource(RetrieverSource(lambda query: [query]), factor=2)
    await source.start(lambda line: None)
    found, _ = await timed(source)
    await source.aclose()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either gaps_s or factor"),
        ({"gaps_s": (1,), "factor": 2}, "either gaps_s or factor"),
        ({"gaps_s": ()}, r"gaps_s=\(\) .* at least 1 item"),
        ({"gaps_s": (1, -1)}, r"gaps_s\[1\]=-1 must be greater than or equal to 0"),
        ({"gaps_s": (float("nan"),)}, r"gaps_s\[0\]=nan must be"),
        ({"factor": 0.5}, "factor=0.5 must be greater than or equal to 1"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StretchedSource(ScriptedSource(EVENTS), **options)  # type: ignore[arg-type]
