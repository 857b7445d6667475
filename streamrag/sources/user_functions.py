"""Calls of users' functions, async or not, without blocking the event loop."""

import inspect
import threading
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any

from streamrag.errors import SourceError
from streamrag.sources.threads import Threads

MAX_LAZY = 100_000  # items that are read from a lazy iterable, which may be infinite


def name_of(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, or of an object's class."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function`, or what a partial or object calls, is async. Others may still return an awaitable."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 - an object's method may be async where it is not
    tests = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(test(each) for test in tests for each in (function, call))


async def call_for_list(
    function: Callable[[str], Any], query: str, checked: Callable[[Any], Iterable[Any]], threads: Threads
) -> list[Any]:
    """Call `function(query)`, await the result if needed, and return `checked(result)` as a list.

    A function that is not async is called, and a lazy iterable is read, in one of `threads`.

    :raises SourceError: the result has more than `MAX_LAZY` items. Errors of `function` and `checked` propagate.
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
    """Whether `value` is an iterable without a length: computing its items may block or never end."""
    return isinstance(value, Iterable) and not isinstance(value, Sized)


async def read_in_thread(iterable: Iterable[Any], threads: Threads) -> list[Any]:
    """Read all items in one of `threads`, which stops when the caller is cancelled. Raises as `read_all`."""
    is_stopped = threading.Event()
    try:
        return await threads.run(partial(read_all, iterable, is_stopped))
    finally:
        is_stopped.set()


def read_all(iterable: Iterable[Any], is_stopped: threading.Event) -> list[Any]:
    """Return all items. Of an iterable without a length, return only those read until `is_stopped` is set, and raise
    SourceError if there are more than `MAX_LAZY`."""
    if not is_lazy(iterable):
        return list(iterable)
    items: list[Any] = []
    iterator = iter(iterable)
    for item in iterator:
        if not is_stopped.is_set() and len(items) < MAX_LAZY:
            items.append(item)
            continue
        if close := getattr(iterator, "close", None):
            close()
        if is_stopped.is_set():
            return items
        raise SourceError(f"an iterator has more than {MAX_LAZY:,} items, and was not read on: does it end?")
    return items
