"""Generators that find passages, as sources: `from_passages` for those that find them one by one, `from_rankings` for
those that find better and better lists."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from typing import Any

from streamrag.core import Append, Chunk, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError
from streamrag.retrieving import closing
from streamrag.sources.callers import is_async, is_lazy, read_all, read_in_thread
from streamrag.sources.passage_like import PassageReader
from streamrag.sources.retriever import name_of
from streamrag.sources.threads import Threads
from streamrag.support.messages import kind_of

_BEGUN, _END = object(), object()

MAX_GENERATORS = 1_000
"""Generators in threads at the same time. Each has its thread until it ends, however slowly it is read."""


def from_passages(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """A source of what `find(query)` yields, a generator of passages: each is an `Append`.

    A passage is what `RetrieverSource` takes for one. A generator that is not async runs in a thread of its own, one
    step for each passage that is wanted; when the query is stopped, it is closed after the step it is in. `name` is the
    function's unless given.

    :raises ConfigurationError: `find` cannot be called.
    """
    return GeneratorSource(find, name, lambda reader, item: Append(reader.chunk(item)))


def from_rankings(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """A source of what `find(query)` yields, a generator of lists of passages, best first: each is an `Update`.

    A list may be a generator too; then at most 100,000 passages of it are read, and none once the query is stopped.
    Otherwise as `from_passages`.

    :raises ConfigurationError: `find` cannot be called.
    """
    return GeneratorSource(find, name, _ranking)


class GeneratorSource:
    """What `from_passages` and `from_rankings` make."""

    def __init__(
        self, find: Callable[[str], Any], name: str, event_of: Callable[[PassageReader, Any], SourceEvent]
    ) -> None:
        if not callable(find):
            raise ConfigurationError(f"{find!r} cannot be called; give a generator function of the query")
        self.name = name or name_of(find)
        self._find = find
        self._event_of = event_of
        self._calls = Threads(MAX_GENERATORS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """One event for each item.

        :raises SourceError: the generator is none, or yields something else. What it raises is raised.
        """
        reader = PassageReader(self.name)
        async with self._found(query) as found, closing(aiter(found)) as items:
            async for item in items:
                if isinstance(item, Iterator) or (self._event_of is _ranking and is_lazy(item)):
                    item = await read_in_thread(item, self._calls)
                yield self._event_of(reader, item)

    @asynccontextmanager
    async def _found(self, query: str) -> AsyncGenerator[AsyncIterable[Any], None]:
        if not is_async(self._find):
            async with _in_thread(partial(self._find, query), self._calls) as found:
                yield found
            return
        found = self._find(query)
        if isawaitable(found):
            found = await found
        if not isinstance(found, AsyncIterable):
            raise SourceError(f"{self.name} returned {kind_of(found)}, and must be a generator")
        yield found


def _ranking(reader: PassageReader, item: Any) -> Update:
    if isinstance(item, str | bytes | Mapping | Chunk) or not isinstance(item, Iterable):
        raise SourceError(f"a ranking is {kind_of(item)}, and must be a list of passages")
    return Update(tuple(map(reader.chunk, item)))


@asynccontextmanager
async def _in_thread(make: Callable[[], Any], threads: Threads) -> AsyncGenerator[AsyncIterable[Any], None]:
    """The items of what `make` returns, all made by one thread, and each only when it is asked for.

    What a function that is not async itself returns may be an async iterator: that is not for the thread.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Queue[Any] = asyncio.Queue()
    wanted = threading.Semaphore(0)
    is_stopped = threading.Event()

    def work() -> Any:
        items = make()
        if isinstance(items, AsyncIterable):
            return items
        if isinstance(items, str | bytes | Mapping | Chunk) or not isinstance(items, Iterable):
            raise SourceError(f"it returned {kind_of(items)}, and must be a generator")
        iterator = iter(items)
        loop.call_soon_threadsafe(made.put_nowait, _BEGUN)
        try:
            while wanted.acquire() and not is_stopped.is_set():
                item = next(iterator, _END)
                item = read_all(item, is_stopped) if isinstance(item, Iterator) else item
                if item is _END or is_stopped.is_set():
                    return None
                loop.call_soon_threadsafe(made.put_nowait, item)
        finally:
            if close := getattr(iterator, "close", None):
                close()

    async def items() -> AsyncGenerator[Any, None]:
        wanted.release()
        while (item := await made.get()) is not _END:
            yield item
            wanted.release()
        await task

    task = asyncio.create_task(threads.run(work), name="streamrag generator")
    task.add_done_callback(lambda _: made.put_nowait(_END))
    try:
        yield items() if await made.get() is _BEGUN else await task
    finally:
        is_stopped.set()
        wanted.release()
        task.cancel()  # the thread goes on to the end of its step, and nobody waits for it
