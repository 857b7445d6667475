"""Generators of passages as sources.

`from_passages` is for generators that yield passages one by one, `from_rankings` for those that yield improving lists.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from typing import Any

from streamrag.core import Append, SourceEvent, Update
from streamrag.core.retrieval import closing
from streamrag.errors import ConfigurationError, SourceError
from streamrag.sources.passage_reader import PassageReader, is_collection
from streamrag.sources.threads import Threads
from streamrag.sources.user_functions import is_async, is_lazy, name_of, read_all, read_in_thread
from streamrag.support.messages import type_name

_BEGIN, _END = object(), object()

MAX_GENERATORS = 1_000
"""Concurrent generators in threads. A generator has a thread until it ends, even while it is not read."""


def from_passages(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """Make a source of a generator function: each passage that `find(query)` yields becomes an `Append`.

    A passage is anything that `RetrieverSource` accepts. A generator that is not async runs in its own thread, and
    advances only when the next passage is requested. When the query is stopped, it is closed after its current step.

    name: the source's name; by default that of `find`.

    :raises ConfigurationError: `find` is not callable.
    """
    return GeneratorSource(find, name, lambda reader, item: Append(reader.chunk(item)))


def from_rankings(find: Callable[[str], AsyncIterable[Any] | Iterable[Any]], *, name: str = "") -> "GeneratorSource":
    """Make a source of a generator function: each list of passages, best first, becomes an `Update`.

    If a list is lazy, such as a generator, at most 100,000 passages of it are read, and none after the query is
    stopped. Otherwise like `from_passages`.

    :raises ConfigurationError: `find` is not callable.
    """
    return GeneratorSource(find, name, _ranking)


class GeneratorSource:
    """The source that `from_passages` and `from_rankings` return."""

    def __init__(
        self, find: Callable[[str], Any], name: str, to_event: Callable[[PassageReader, Any], SourceEvent]
    ) -> None:
        if not callable(find):
            raise ConfigurationError(f"{find!r} cannot be called; give a generator function of the query")
        self.name = name or name_of(find)
        self._find = find
        self._to_event = to_event
        self._threads = Threads(MAX_GENERATORS, f"retrieve {self.name}")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield an event for each item; raise SourceError for an invalid one. The generator's own errors propagate."""
        reader = PassageReader(self.name)
        async with self._open(query) as iterable, closing(aiter(iterable)) as items:
            async for item in items:
                if isinstance(item, Iterator) or (self._to_event is _ranking and is_lazy(item)):
                    item = await read_in_thread(item, self._threads)
                for event in reader.skip_blank(self._to_event(reader, item)):
                    yield event

    @asynccontextmanager
    async def _open(self, query: str) -> AsyncGenerator[AsyncIterable[Any], None]:
        """Call the function, and give an async iterable of its items, or raise SourceError.

        A function that is not async runs in a thread, and its generator is stopped at the end, without waiting.
        """
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
            raise SourceError(f"{self.name} returned {type_name(result)}, and must be a generator")
        yield result


def _ranking(reader: PassageReader, item: Any) -> Update:
    """Make an Update of a list of passages, best first; raise SourceError if it is no list."""
    if not is_collection(item):
        raise SourceError(f"a ranking is {type_name(item)}, and must be a list of passages")
    return Update(tuple(map(reader.chunk, item)))


class _ThreadedGenerator:
    """A generator that runs in one thread and computes each item on request."""

    def __init__(self, make: Callable[[], Any], threads: Threads) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._requests = threading.Semaphore(0)
        self._is_stopped = threading.Event()
        self._task = asyncio.create_task(threads.run(self._run), name="streamrag generator")
        self._task.add_done_callback(lambda _: self._queue.put_nowait(_END))

    def _run(self) -> Any:
        """Call the function, and put each requested item into the queue, until stopped; then close the generator.

        Runs in the thread. Returns an async iterable instead, if that is the result; raises SourceError for other
        results.
        """
        items = self._make()
        if isinstance(items, AsyncIterable):
            return items
        if not is_collection(items):
            raise SourceError(f"it returned {type_name(items)}, and must be a generator")
        iterator = iter(items)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, _BEGIN)
        try:
            while self._requests.acquire() and not self._is_stopped.is_set():
                item = next(iterator, _END)
                item = read_all(item, self._is_stopped) if isinstance(item, Iterator) else item
                if item is _END or self._is_stopped.is_set():
                    return None
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        finally:
            if close := getattr(iterator, "close", None):
                close()

    async def items(self) -> AsyncIterable[Any]:
        """Wait until the function has returned, and return the items or its async iterable."""
        return self._items() if await self._queue.get() is _BEGIN else await self._task

    async def _items(self) -> AsyncGenerator[Any, None]:
        """Yield the items, each requested when it is needed, and then raise the generator's own error."""
        self._requests.release()
        while (item := await self._queue.get()) is not _END:
            yield item
            self._requests.release()
        await self._task

    def stop(self) -> None:
        """Stop the generator after its current step, without waiting for that."""
        self._is_stopped.set()
        self._requests.release()
        self._task.cancel()
