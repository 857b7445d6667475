"""What the tests of sources do with a source, and what they look at and wait for in other processes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from streamrag.core import SourceEvent, Startable, Update
from streamrag.sources.search.index_source import IndexSource
from streamrag.sources.workers.pool import WorkerPool

S = TypeVar("S", bound=Startable)


class Streaming(Protocol):
    """A source of ours, whose streams can be closed."""

    def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]: ...


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


def workers_of(source: IndexSource) -> WorkerPool:
    assert source._opened
    return source._opened.workers


async def until(condition: Callable[[], object]) -> None:
    """Bounded wait for something that happens in another process, which cannot set an event of ours."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
