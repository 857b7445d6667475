"""Generators of anybody's as sources: each thing they yield is an event, and they never outlive their query."""

import asyncio
import functools
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from streamrag import Append, Chunk, Pipeline, RetrieverSource, Skipped, Source, Update, from_passages, from_rankings
from streamrag.core import SourceEvent
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.retriever import MAX_CALLS
from streamrag.testing import ScriptedBackend

ITEMS = [
    "plain",
    ("pair", "a.md"),
    {"text": "mapping", "url": "a.md", "title": "A", "score": 0.5},
    Chunk("chunk", "b.md"),
]
CHUNKS = [
    Chunk("plain", "NAME"),
    Chunk("pair", "a.md"),
    Chunk("mapping", "a.md", "A", 1, 0.5),
    Chunk("chunk", "b.md"),
]


async def with_async(query: str) -> AsyncIterator[Any]:
    for item in ITEMS:
        yield item


def with_sync(query: str) -> Iterator[Any]:
    yield from ITEMS


class Callable_:
    async def __call__(self, query: str) -> AsyncIterator[Any]:
        for item in ITEMS:
            yield item


async def returns_a_generator(query: str) -> AsyncIterator[Any]:
    return with_async(query)


def returns_a_list(query: str) -> list[Any]:
    return ITEMS


async def events(source: Source) -> list[SourceEvent]:
    with anyio.fail_after(120):
        return [event async for event in source.stream("Why?")]


@pytest.mark.parametrize(
    "find",
    [with_async, with_sync, Callable_(), returns_a_generator, returns_a_list, functools.partial(with_async)],
    ids=["async", "sync", "object", "coroutine", "list", "partial"],
)
async def test_each_passage_is_an_append(find: Any) -> None:
    assert await events(from_passages(find, name="NAME")) == [Append(chunk) for chunk in CHUNKS]


async def test_a_passage_without_text_is_skipped() -> None:
    def find(query: str) -> Iterator[Any]:
        yield from ("one", (" ", "a.md"), {"content": None, "uri": "b.md"}, "two")

    assert await events(from_passages(find, name="found")) == [
        Append(Chunk("one", "found")),
        Skipped("a.md", "it has no text"),
        Skipped("b.md", "it has no text"),
        Append(Chunk("two", "found", passage=1)),
    ]
    assert await events(from_rankings(lambda query: iter([["", "one"], ["one", ""]]), name="found")) == [
        Skipped("found", "it has no text"),
        *2 * [Update((Chunk("one", "found", passage=1),))],
    ]


async def test_each_ranking_is_an_update_and_a_passage_keeps_its_number() -> None:
    async def rankings(query: str) -> AsyncIterator[list[Any]]:
        yield ["a", "b"]
        yield ("b", "a", "c")
        yield []

    a, b, c = (Chunk(text, "rankings", passage=i) for i, text in enumerate("abc"))
    found = await events(from_rankings(rankings, name="rankings"))
    assert found == [Update((a, b)), Update((b, a, c)), Update(())]


def test_a_source_is_called_as_its_function() -> None:
    assert from_passages(with_async).name == "with_async"
    assert from_rankings(functools.partial(with_sync)).name == "with_sync"


@pytest.mark.parametrize(
    ("make", "item", "message"),
    [
        (from_passages, 5, r"one returned int 5 among its passages: str, Chunk, \(text, uri\)"),
        (from_passages, {"title": "x"}, "one returned dict"),
        (from_rankings, "text", "a ranking is a str, and must be a list of passages"),
        (from_rankings, [5], "one returned int 5"),
    ],
)
async def test_a_yielded_value_that_is_no_passage_is_named(make: Any, item: Any, message: str) -> None:
    async def one(query: str) -> AsyncIterator[Any]:
        yield item

    with pytest.raises(SourceError, match=message):
        await events(make(one, name="one"))


@pytest.mark.parametrize("find", [lambda query: 5, lambda query: "text", lambda query: None])
async def test_a_function_that_returns_no_generator_is_named(find: Any) -> None:
    with pytest.raises(SourceError, match="and must be a generator"):
        await events(from_passages(find))
    with pytest.raises(ConfigurationError, match="5 cannot be called; give a generator function"):
        from_passages(5)  # type: ignore[arg-type]


async def test_an_error_of_a_generator_in_a_thread_comes_after_what_it_yielded() -> None:
    def fails(query: str) -> Iterator[str]:
        yield "first"
        raise LookupError("gone")

    source = from_passages(fails, name="fails")
    async with Pipeline(source, ScriptedBackend("ok"), on_source_error="answer") as pipeline:
        async with pipeline.stream("Why?") as stream:
            _ = [chunk async for chunk in stream]
    assert [citation.text for citation in stream.result.citations] == ["first"]
    assert "fails failed: LookupError: gone" in str(stream.result.source_error)


async def test_a_generator_in_a_thread_goes_on_only_when_it_is_asked_and_is_closed_by_the_thread_it_runs_in() -> None:
    steps: list[tuple[str, int]] = []
    is_closed = threading.Event()

    def tells(query: str) -> Iterator[str]:
        try:
            for text in "abc":
                steps.append((text, threading.get_ident()))
                yield text
        finally:
            steps.append(("closed", threading.get_ident()))
            is_closed.set()

    async with aclosing(from_passages(tells).stream("Why?")) as found:
        for number in (1, 2):
            await anext(found)
            await asyncio.sleep(0.02)
            assert len(steps) == number
    assert await asyncio.to_thread(is_closed.wait, 120)
    assert [text for text, _ in steps] == ["a", "b", "closed"]
    assert len({thread for _, thread in steps}) == 1
    assert steps[0][1] != threading.get_ident()


async def test_a_generator_that_blocks_does_not_keep_its_query_and_is_closed_when_it_goes_on() -> None:
    goes_on, is_closed = threading.Event(), threading.Event()

    def blocks(query: str) -> Iterator[str]:
        try:
            goes_on.wait(20)
            yield "late"
        finally:
            is_closed.set()

    async with Pipeline(from_passages(blocks), ScriptedBackend()) as pipeline:
        with anyio.move_on_after(0.1) as scope:
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert scope.cancelled_caught
        assert not is_closed.is_set()
    goes_on.set()
    assert await asyncio.to_thread(is_closed.wait, 120)


async def test_a_generator_that_ends_the_program_ends_its_query_only() -> None:
    def exits(query: str) -> Iterator[str]:
        yield "a"
        sys.exit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        await events(from_passages(exits))


async def test_an_async_generator_is_closed_with_its_query() -> None:
    is_closed = asyncio.Event()

    async def waits(query: str) -> AsyncIterator[str]:
        try:
            yield "first"
            scope.cancel()
            await asyncio.sleep(3600)
        finally:
            is_closed.set()

    async with Pipeline(from_passages(waits), ScriptedBackend()) as pipeline:
        with anyio.CancelScope() as scope:
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert is_closed.is_set()


async def test_a_function_that_is_not_async_may_return_an_async_generator() -> None:
    assert await events(from_passages(lambda query: with_async(query), name="NAME")) == [Append(c) for c in CHUNKS]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_lazy_ranking_is_read_by_a_thread(is_async: bool) -> None:
    threads = []

    def lazy() -> Iterator[str]:
        threads.append(threading.get_ident())
        yield "a"

    async def rankings(query: str) -> AsyncIterator[Any]:
        yield lazy()

    found = await events(from_rankings(rankings if is_async else lambda query: iter([lazy()]), name="r"))
    assert found == [Update((Chunk("a", "r"),))]
    assert threads[0] != threading.get_ident()


class Endless:
    """No iterator, and no list."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.is_closed = threading.Event()

    def __iter__(self) -> Iterator[str]:
        try:
            while True:
                self.has_begun.set()
                yield "again"
        finally:
            self.is_closed.set()


def lazily(way: str, found: Any) -> Source:
    """A source that finds `found`, which is lazy, in one of the ways that there are."""

    async def ranking(query: str) -> AsyncIterator[Any]:
        yield found

    async def retrieved(query: str) -> Any:
        return found

    return {
        "ranking": lambda: from_rankings(lambda query: iter([iter(found)])),
        "iterable ranking": lambda: from_rankings(lambda query: iter([found])),
        "async ranking": lambda: from_rankings(ranking),
        "retriever": lambda: RetrieverSource(lambda query: iter(found)),
        "async retriever": lambda: RetrieverSource(retrieved),
    }[way]()


WAYS = ["ranking", "iterable ranking", "async ranking", "retriever", "async retriever"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_endless_lazy_result_is_refused_and_closed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sources.user_functions.MAX_LAZY", 10)
    endless = Endless()
    with pytest.raises(SourceError, match="more than 10 items"):
        await events(lazily(way, endless))
    assert await asyncio.to_thread(endless.is_closed.wait, 120)


@pytest.mark.parametrize("way", WAYS)
async def test_a_lazy_result_is_closed_when_its_query_is_cancelled(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sources.user_functions.MAX_LAZY", 1 << 40)
    endless = Endless()
    query = asyncio.create_task(events(lazily(way, endless)))
    await asyncio.to_thread(endless.has_begun.wait)
    query.cancel()
    assert await asyncio.to_thread(endless.is_closed.wait)
    await asyncio.wait([query])


def test_places_of_an_event_loop_that_has_ended_are_not_missed() -> None:
    goes_on = threading.Event()

    def blocks(query: str) -> list[str]:
        goes_on.wait(60)
        return []

    source = RetrieverSource(blocks)

    async def ask() -> None:
        with anyio.move_on_after(0.01):
            _ = [event async for event in source.stream("Why?")]

    try:
        for _ in range(MAX_CALLS + 1):
            asyncio.run(ask())
    finally:
        goes_on.set()

    async def asked_again() -> list[SourceEvent]:
        return await events(source)

    assert asyncio.run(asked_again()) == [Update(())]


async def test_a_thread_that_cannot_start_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = RetrieverSource(lambda query: ["a"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_CALLS + 1):
            with pytest.raises(SourceError, match="can't start new thread"):
                await events(source)
    assert len(await events(source)) == 1
