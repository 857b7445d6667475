"""A source in replicas that are lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from streamrag.backends.ray.source import RaySource
from streamrag.backends.replicas.wire import Failed
from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update
from streamrag.errors import SourceError
from streamrag.modes import UpdateMode

LOST = ActorDiedError()
A, B, C, D = (Chunk(name, f"text of {name}", f"{name}.md") for name in "abcd")


class Response:
    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self.num_cancelled = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        for event in self._events:
            if event is LOST:
                raise LOST
            if event is None:
                await asyncio.Event().wait()
            yield event

    def cancel(self) -> None:
        self.num_cancelled += 1


class Replicas:
    """What each retrieval yields in turn; LOST loses its replica, None hangs. See `ray.serve.handle`."""

    def __init__(self, *retrievals: Sequence[Any]) -> None:
        self.left = list(retrievals)
        self.responses: list[Response] = []

    def remote(self, query: str) -> Response:
        self.responses.append(Response(self.left.pop(0)))
        return self.responses[-1]


async def told(*retrievals: Sequence[Any]) -> list[SourceEvent]:
    source, replicas = RaySource(None), Replicas(*retrievals)  # type: ignore[arg-type]
    source._handle = replicas
    async with aclosing(source.stream("Why?")) as events:
        found = [event async for event in events]
    assert not replicas.left
    assert all(response.num_cancelled == 1 for response in replicas.responses)
    return found


def context(events: Sequence[SourceEvent]) -> tuple[Chunk, ...]:
    chunks: tuple[Chunk, ...] = ()
    for event in events:
        if isinstance(event, Append | Update):
            chunks = UpdateMode().fold(chunks, event)
    return chunks


async def test_a_replica_that_is_lost_before_it_has_found_anything_is_replaced() -> None:
    assert await told([LOST], [Append(A)]) == [Append(A)]


async def test_events_that_another_replica_finds_again_are_reported_once() -> None:
    first = [Append(A, Hint(end_s=9.0)), Skipped("x", "gone"), Append(B)]
    again = [Append(A, Hint(end_s=8.0)), Skipped("x", "gone"), Append(B), Append(C), CutShort("time is up")]
    assert await told([*first, LOST], again) == [*first, Append(C), CutShort("time is up")]


@pytest.mark.parametrize(
    ("first", "again", "then"),
    [
        ([Append(A), Append(B)], [Append(B), Append(A), Append(C)], [Update((B,)), Update((B, A)), Update((B, A, C))]),
        ([Append(A), Append(B)], [Append(A), Append(C)], [Update((A, C))]),
        ([Append(A), Append(B)], [Append(A)], [Update((A,))]),
        ([Append(A), Append(B)], [], [Update(())]),
        ([Update((A, B)), Update((B, A))], [Update((A, B)), Update((C, A))], [Update((C, A))]),
        ([Append(A), Skipped("x", "gone")], [Skipped("x", "gone"), Append(A)], [Update((A,))]),
        ([Append(A)], [Skipped("y", "gone"), Append(A)], [Skipped("y", "gone"), Update((A,))]),
        ([Append(A), Append(A)], [Append(A)], []),
        ([Append(A)], [Skipped("y", "gone")], [Skipped("y", "gone"), Update(())]),
        ([Append(A), Append(B)], [Append(A), Skipped("y", "gone"), Append(B)], [Skipped("y", "gone"), Update((A, B))]),
    ],
)
async def test_the_context_follows_a_replacement_replica_that_finds_other_chunks(
    first: list[SourceEvent], again: list[SourceEvent], then: list[SourceEvent]
) -> None:
    events = await told([*first, LOST], again)
    assert events == [*first, *then]
    assert context(events) == context(again)


async def test_the_third_replica_counts_after_two_are_lost() -> None:
    events = await told([Append(A), LOST], [Append(B), LOST], [Append(B), Append(D)])
    assert context(events) == (B, D)


async def test_after_three_that_are_lost_retrieval_has_failed() -> None:
    with pytest.raises(SourceError, match="3 replicas that retrieved were lost: ask again"):
        await told([Append(A), LOST], [LOST], [Append(A), LOST])


async def test_an_error_of_the_source_itself_is_not_retried() -> None:
    with pytest.raises(SourceError, match="no such page"):
        await told([Append(A), LOST], [Append(A), Failed("SourceError", "no such page")])


@pytest.mark.parametrize("retrievals", [[[Append(A), None]], [[Append(A), LOST], [Append(A), Append(B), None]]])
async def test_cancelling_the_reader_ends_retrieval_in_each_replica(retrievals: list[list[Any]]) -> None:
    replicas, source = Replicas(*retrievals), RaySource(None)  # type: ignore[arg-type]
    source._handle = replicas
    has_some = asyncio.Event()

    async def read() -> None:
        async with aclosing(source.stream("Why?")) as events:
            async for _ in events:
                if len(replicas.responses) == len(retrievals):
                    has_some.set()

    reading = asyncio.create_task(read())
    await has_some.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert all(response.num_cancelled == 1 for response in replicas.responses)
