import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from streamrag.core import Chunk, Skipped, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError, UnreachableError
from streamrag.pipeline import Pipeline
from streamrag.sources.retriever import RetrieverSource
from streamrag.testing import ScriptedBackend

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


@dataclass
class Document:
    """As LangChain's."""

    page_content: str
    metadata: dict[str, Any] | None = field(default_factory=dict)


async def events(source: RetrieverSource, query: str = "query") -> list[SourceEvent]:
    async with aclosing(source.stream(query)) as stream:
        return [event async for event in stream]


async def chunks(found: object) -> tuple[Chunk, ...]:
    """What becomes of a retriever's result."""
    (update,) = await events(RetrieverSource(lambda query: found))
    assert isinstance(update, Update)
    return update.chunks


def in_thread(query: str) -> list[str]:
    assert threading.current_thread() is not threading.main_thread()
    return [query]


async def on_loop(query: str) -> list[str]:
    await asyncio.sleep(0)
    return [query]


def generator(query: str) -> Iterator[str]:
    assert threading.current_thread() is not threading.main_thread()
    yield query


class Retriever:
    def search(self, query: str) -> list[str]:
        return [query]

    async def __call__(self, query: str) -> list[str]:
        return [query]


@pytest.mark.parametrize(
    ("retrieve", "name"),
    [
        (in_thread, "in_thread"),
        (on_loop, "on_loop"),
        (generator, "generator"),
        (partial(on_loop), "on_loop"),
        (Retriever().search, "Retriever.search"),
        (Retriever(), "Retriever"),
        (lambda query: on_loop(query), "<lambda>"),
    ],
)
async def test_any_callable_is_a_source(retrieve: Any, name: str) -> None:
    assert await events(RetrieverSource(retrieve)) == [Update((Chunk("query", uri=name),))]


async def test_passages_may_have_many_forms() -> None:
    own = Chunk("own", "somewhere", passage=7)
    found = [
        own,
        "plain",
        ("pair", "a.txt"),
        Document("document", {"source": "b.txt", "title": "B", "page": 3}),
        Document("by address", {"url": "https://example.org"}),
        Document("without metadata", None),
        ("second of a", "a.txt"),
    ]
    name = "chunks.<locals>.<lambda>"
    assert await chunks(found) == (
        own,
        Chunk("plain", name),
        Chunk("pair", "a.txt"),
        Chunk("document", "b.txt", title="B"),
        Chunk("by address", "https://example.org"),
        Chunk("without metadata", name, passage=1),
        Chunk("second of a", "a.txt", passage=1),
    )


@pytest.mark.parametrize("nothing", [[], (), iter(())])
async def test_an_empty_result_is_an_empty_context(nothing: object) -> None:
    assert await chunks(nothing) == ()


async def async_generator(query: str) -> AsyncIterator[str]:
    yield query


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"lambda> returned None, not a list of passages: str, Chunk, \(text, uri\)"),
        ("text", "returned str 'text'"),
        (Chunk("text", "source"), "returned Chunk"),
        ({"text": 1}, "returned dict"),
        (7, "returned int 7"),
        ([b"bytes"], "returned bytes b'bytes' among its passages"),
        ([("text", 0.5)], "returned tuple"),
        ([Document(None)], "returned Document"),  # type: ignore[arg-type]
        (async_generator("query"), r"returned an async iterator: streamrag\.from_passages makes a source"),
    ],
)
async def test_results_that_are_no_passages_are_an_error(found: object, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        await chunks(found)


async def failing(query: str) -> list[str]:
    raise LookupError("no database")


def failing_midway(query: str) -> Iterator[str]:
    yield "one"
    raise LookupError("no database")


@pytest.mark.parametrize("retrieve", [failing, failing_midway])
async def test_an_exception_becomes_a_source_error_that_names_the_callable(retrieve: Any) -> None:
    with pytest.raises(SourceError, match=rf"{retrieve.__name__} failed: LookupError: no database") as raised:
        await events(RetrieverSource(retrieve))
    assert isinstance(raised.value.__cause__, LookupError)


async def test_errors_of_our_own_stay_what_they_are() -> None:
    async def unreachable(query: str) -> list[str]:
        raise UnreachableError("nobody answers")

    with pytest.raises(UnreachableError, match="nobody answers"):
        await events(RetrieverSource(unreachable))


@pytest.mark.parametrize("text", ["", " \n\t", "\u200b", None])
async def test_a_passage_without_text_is_skipped_and_the_others_are_used(text: str | None) -> None:
    rows = [{"text": text, "uri": "a.png"}, {"text": None, "content": "text", "uri": "b.md"}]
    assert await events(RetrieverSource(lambda query: rows)) == [
        Skipped("a.png", "it has no text"),
        Update((Chunk("text", "b.md"),)),
    ]
    documents = [Document(text or "", {"source": "c.md"})]
    assert await events(RetrieverSource(lambda query: documents)) == [Skipped("c.md", "it has no text"), Update(())]


def test_a_retriever_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'passages' cannot be called"):
        RetrieverSource("passages")  # type: ignore[arg-type]


async def test_cancelling_does_not_wait_for_a_thread() -> None:
    running, go_on = threading.Event(), threading.Event()

    def slow(query: str) -> list[str]:
        running.set()
        assert go_on.wait(20)
        return [query]

    task = asyncio.create_task(events(RetrieverSource(slow)))
    assert await asyncio.to_thread(running.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


async def test_a_pipeline_answers_from_a_retriever_source() -> None:
    pipeline = Pipeline(RetrieverSource(on_loop), ScriptedBackend())
    async with pipeline, pipeline.stream("What?") as stream:
        assert [chunk async for chunk in stream]
    assert [(citation.uri, citation.text) for citation in stream.result.citations] == [("on_loop", "What?")]


async def test_a_function_that_hangs_takes_no_threads_but_its_own() -> None:
    release = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    source = RetrieverSource(lambda query: [str(release.wait())])
    asking = [asyncio.create_task(anext(source.stream("?"))) for _ in range(50)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(120):
            assert await asyncio.to_thread(lambda: "free") == "free"
            assert await anyio.to_thread.run_sync(lambda: "free") == "free"
    finally:
        release.set()
    assert len(await asyncio.gather(*asking)) == 50
