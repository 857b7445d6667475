"""Functions of the caller's, async or not, called without blocking the event loop."""

import inspect
import threading
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any

from streamrag.errors import SourceError
from streamrag.sources.threads import Threads

MAX_LAZY = 100_000
"""Items that are read of what makes them one by one: an iterator need not have an end."""


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
    """The list of what `function(query)` returns, awaited if need be and `checked`.

    What may block is done by one of the `threads`: the call, unless it is async, and reading what is lazy.

    :raises SourceError: it has no end. What the function raises, and `checked`, is raised.
    """
    is_stopped = threading.Event()

    def call() -> Any:
        found = function(query)
        return found if inspect.isawaitable(found) else read_all(checked(found), is_stopped)

    try:
        found = function(query) if is_async(function) else await threads.run(call)
        if inspect.isawaitable(found):
            found = await found
        return await read_in_thread(checked(found), threads) if is_lazy(found) else list(checked(found))
    finally:
        is_stopped.set()


def is_lazy(found: object) -> bool:
    """Whether what it has may be made only when it is read: that may block, and never end."""
    return isinstance(found, Iterable) and not isinstance(found, Sized)


async def read_in_thread(found: Iterable[Any], threads: Threads) -> list[Any]:
    """The items of `found`, read by one of the `threads`, which stops when this is cancelled.

    :raises SourceError: there are more than `MAX_LAZY`.
    """
    is_stopped = threading.Event()
    try:
        return await threads.run(partial(read_all, found, is_stopped))
    finally:
        is_stopped.set()


def read_all(found: Iterable[Any], is_stopped: threading.Event) -> list[Any]:
    """The items of `found`, but no further ones once `is_stopped`: nobody wants them then.

    :raises SourceError: it is lazy, and has more than `MAX_LAZY`.
    """
    if not is_lazy(found):
        return list(found)
    items: list[Any] = []
    iterator = iter(found)
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
