"""Functions of the caller's, async or not, called without blocking the event loop."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from streamrag.sources.threads import Threads


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
    function: Callable[[str], Any], query: str, listed: Callable[[Any], list[Any]], threads: Threads
) -> list[Any]:
    """What `function(query)` returns, awaited if need be, as `listed` makes a list of it.

    What may block is done by one of the `threads`: the call, unless it is async, and reading what is lazy.
    """

    def call() -> Any:
        found = function(query)
        return found if inspect.isawaitable(found) else listed(found)  # generators do their work here too

    found = function(query) if is_async(function) else await threads.run(call)
    if inspect.isawaitable(found):
        found = await found
    return await threads.run(partial(listed, found)) if isinstance(found, Iterator) else listed(found)
