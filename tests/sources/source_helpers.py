"""What the tests of sources do with a source, and what they look at and wait for in other processes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from streamrag.core import Source, SourceEvent, Startable, Update
from streamrag.errors import AlreadyStartedError, ConfigurationError
from streamrag.pipeline import Pipeline
from streamrag.sources.search.index_source import IndexSource
from streamrag.sources.workers.pool import WorkerPool
from streamrag.telemetry import Citation
from streamrag.testing import ScriptedBackend


class Streaming(Protocol):
    """A source of ours, whose streams can be closed."""

    def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]: ...


class Closable(Streaming, Startable, Protocol):
    """One that is started and closed."""


S = TypeVar("S", bound=Startable)


@asynccontextmanager
async def running(source: S) -> AsyncIterator[S]:
    """Started, and closed afterwards."""
    await source.start(lambda line: None)
    try:
        yield source
    finally:
        await source.aclose()


async def events_of(source: Streaming, query: str) -> list[SourceEvent]:
    async with aclosing(source.stream(query)) as events:
        return [event async for event in events]


async def updates(source: Streaming, query: str) -> list[Update]:
    """The same, where all are updates."""
    found = await events_of(source, query)
    assert {type(event) for event in found} <= {Update}
    return [event for event in found if isinstance(event, Update)]


def alive(process_id: int) -> bool:
    """Whether this process runs. A zombie does not."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False
    return state != "Z"


def stages_left(found: Sequence[Update]) -> list[int]:
    """How many stages were still to come at each of these updates: ever fewer. Each brings something new."""
    assert all(before.chunks != after.chunks for before, after in pairwise(found))
    left = [update.hint.num_chunks for update in found if update.hint and update.hint.num_chunks is not None]
    assert len(left) == len(found)
    assert left == sorted(set(left), reverse=True)
    return left


async def citations(source: Source, query: str) -> tuple[Citation, ...]:
    """Of an answer by a pipeline, which starts the source and closes it."""
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        async with pipeline.stream(query) as stream:
            async for _ in stream:
                pass
        return stream.result.citations


async def must_be_started(source: Closable) -> None:
    """It says so, before it is started and once it is closed. It has one owner, and closing it twice does nothing."""
    with pytest.raises(ConfigurationError, match="not started"):
        await updates(source, "query")
    await source.start(lambda line: None)
    with pytest.raises(AlreadyStartedError):
        await source.start(lambda line: None)
    for _ in range(2):
        await source.aclose()
    with pytest.raises(ConfigurationError, match="not started"):
        await updates(source, "query")


def workers_of(source: IndexSource) -> WorkerPool:
    assert source._opened
    return source._opened.workers


async def until(condition: Callable[[], object]) -> None:
    """Bounded wait for something that happens in another process, which cannot set an event of ours."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
