"""Generators that find passages, as sources.

`from_passages` is for those that find passages one by one, `from_rankings` for those that find better and better lists.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from typing import Any

from streamrag.core import Append, Chunk, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError
from streamrag.query.retrieval import closing
from streamrag.sources.passage_reader import PassageReader
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import is_async, is_lazy, name_of, read_all, read_in_thread
from streamrag.support.messages import kind_of

_BEGIN, _END = object(), object()

MAX_GENERATORS = 1_000
"""Concurrent generators in threads. Each has its thread until it ends, however slowly it is read."""


def from_passages(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """Make a source of what `find(query)` yields, a generator of passages: each is an `Append`.

    A passage is what `RetrieverSource` takes for one. A generator that is not async runs in a thread of its own, one
    step for each passage that is wanted; when the query is stopped, it is closed after the step it is in. `name` is the
    function's unless given.

    :raises ConfigurationError: `find` cannot be called.
    """
    return GeneratorSource(find, name, lambda reader, item: Append(reader.chunk(item)))


def from_rankings(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """Make a source of what `find(query)` yields, a generator of lists of passages, best first: each is an `Update`.

    A list may be a generator too; then at most 100,000 passages of it are read, and none once the query is stopped.
    Otherwise as `from_passages`.

    :raises ConfigurationError: `find` cannot be called.
    """
    return GeneratorSource(find, name, _ranking)


class GeneratorSource:
    """The source that `from_passages` and `from_rankings` make."""

    def __init__(
        self, find: Callable[[str], Any], name: str, event_of: Callable[[PassageReader, Any], SourceEvent]
    ) -> None:
        if not callable(find):
            raise ConfigurationError(f"{find!r} cannot be called; give a generator function of the query")
        self.name = name or name_of(find)
        self._find = find
        self._event_of = event_of
        self._threads = Threads(MAX_GENERATORS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an event for each item.

        :raises SourceError: the generator is none, or yields something else. What it raises is raised.
        """
        reader = PassageReader(self.name)
        async with self._open(query) as iterable, closing(aiter(iterable)) as items:
            async for item in items:
                if isinstance(item, Iterator) or (self._event_of is _ranking and is_lazy(item)):
                    item = await read_in_thread(item, self._threads)
                yield self._event_of(reader, item)

    @asynccontextmanager
    async def _open(self, query: str) -> AsyncGenerator[AsyncIterable[Any], None]:
        if not is_async(self._find):
            generator = _ThreadedGenerator(partial(self._find, query), self._threads)
            try:
                yield await generator.items()
            finally:
                generator.stop()
            return
        result = self._find(query)
        if isawaitable(result):
            result = await result
        if not isinstance(result, AsyncIterable):
            raise SourceError(f"{self.name} returned {kind_of(result)}, and must be a generator")
        yield result


def _ranking(reader: PassageReader, item: Any) -> Update:
    if isinstance(item, str | bytes | Mapping | Chunk) or not isinstance(item, Iterable):
        raise SourceError(f"a ranking is {kind_of(item)}, and must be a list of passages")
    return Update(tuple(map(reader.chunk, item)))


class _ThreadedGenerator:
    """The items of what `make` returns, all made by one thread, and each only when it is asked for."""

    def __init__(self, make: Callable[[], Any], threads: Threads) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._made: asyncio.Queue[Any] = asyncio.Queue()
        self._wanted = threading.Semaphore(0)
        self._is_stopped = threading.Event()
        self._task = asyncio.create_task(threads.run(self._run), name="streamrag generator")
        self._task.add_done_callback(lambda _: self._made.put_nowait(_END))

    def _run(self) -> Any:
        """Make the items, in the thread. An async iterator is returned: it is not for the thread."""
        items = self._make()
        if isinstance(items, AsyncIterable):
            return items
        if isinstance(items, str | bytes | Mapping | Chunk) or not isinstance(items, Iterable):
            raise SourceError(f"it returned {kind_of(items)}, and must be a generator")
        iterator = iter(items)
        self._loop.call_soon_threadsafe(self._made.put_nowait, _BEGIN)
        try:
            while self._wanted.acquire() and not self._is_stopped.is_set():
                item = next(iterator, _END)
                item = read_all(item, self._is_stopped) if isinstance(item, Iterator) else item
                if item is _END or self._is_stopped.is_set():
                    return None
                self._loop.call_soon_threadsafe(self._made.put_nowait, item)
        finally:
            if close := getattr(iterator, "close", None):
                close()

    async def items(self) -> AsyncIterable[Any]:
        """Return the items when the generator has begun, or the async iterator that the function returned."""
        return self._items() if await self._made.get() is _BEGIN else await self._task

    async def _items(self) -> AsyncGenerator[Any, None]:
        self._wanted.release()
        while (item := await self._made.get()) is not _END:
            yield item
            self._wanted.release()
        await self._task

    def stop(self) -> None:
        """Stop after the step that the thread is in, for which nothing waits."""
        self._is_stopped.set()
        self._wanted.release()
        self._task.cancel()
