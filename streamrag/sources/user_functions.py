"""Functions of the library's users, async or not, called without blocking the event loop."""

import inspect
import threading
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any

from streamrag.errors import SourceError
from streamrag.sources.threads import Threads

MAX_LAZY = 100_000
"""Items that are read of an iterable that makes them one by one: it need not have an end."""


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's name, or that of an object's class."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is an async function or async generator function, or an object or a partial of one.

    Another one may still return something to await: that is seen only when it has been called.
    """
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - an object's method may be async where it is not
    tests = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(test(each) for test in tests for each in (function, call))


async def call_for_list(
    function: Callable[[str], Any], query: str, checked: Callable[[Any], Iterable[Any]], threads: Threads
) -> list[Any]:
    """Return the list that `function(query)` returns, awaited if need be and `checked`.

    One of the `threads` does what may block: the call, unless it is async, and reading what is lazy.

    :raises SourceError: it has no end. What the function raises, and `checked`, is raised.
    """
    is_stopped = threading.Event()

    def call() -> Any:
        result = function(query)
        return result if inspect.isawaitable(result) else read_all(checked(result), is_stopped)

    try:
        result = function(query) if is_async(function) else await threads.run(call)
        if inspect.isawaitable(result):
            result = await result
        return await read_in_thread(checked(result), threads) if is_lazy(result) else list(checked(result))
    finally:
        is_stopped.set()


def is_lazy(value: object) -> bool:
    """Whether its items may be made only when they are read: that may block, and never end."""
    return isinstance(value, Iterable) and not isinstance(value, Sized)


async def read_in_thread(iterable: Iterable[Any], threads: Threads) -> list[Any]:
    """Return the items, read by one of the `threads`, which stops when this is cancelled.

    :raises SourceError: there are more than `MAX_LAZY`.
    """
    is_stopped = threading.Event()
    try:
        return await threads.run(partial(read_all, iterable, is_stopped))
    finally:
        is_stopped.set()


def read_all(iterable: Iterable[Any], is_stopped: threading.Event) -> list[Any]:
    """Return the items, but no further ones once `is_stopped`.

    :raises SourceError: it is lazy, and has more than `MAX_LAZY`.
    """
    if not is_lazy(iterable):
        return list(iterable)
    items: list[Any] = []
    iterator = iter(iterable)
    for item in iterator:
        if is_stopped.is_set() or len(items) == MAX_LAZY:
            if close := getattr(iterator, "close", None):
                close()
            break
        items.append(item)
    else:
        return items
    if is_stopped.is_set():
        return items
    raise SourceError(f"an iterator has more than {MAX_LAZY:,} items, and was not read on: does it end?")
