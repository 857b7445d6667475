"""Which functions are async, whatever form they have."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from streamrag.sources.user_functions import is_async


async def coroutine(query: str) -> list[str]:
    return [query]


async def generator(query: str) -> AsyncIterator[str]:
    yield query


def plain(query: str) -> list[str]:
    return [query]


class Coroutine:
    async def __call__(self, query: str) -> list[str]:
        return [query]

    async def method(self, query: str) -> AsyncIterator[str]:
        yield query


class Plain:
    def __call__(self, query: str) -> list[str]:
        return [query]


@pytest.mark.parametrize(
    "function",
    [coroutine, generator, Coroutine(), Coroutine().method, partial(partial(Coroutine())), partial(generator)],
)
def test_async_functions_are_seen(function: Callable[..., Any]) -> None:
    assert is_async(function)


@pytest.mark.parametrize("function", [plain, Plain(), partial(Plain()), lambda query: coroutine(query), str])
def test_other_functions_are_not_async(function: Callable[..., Any]) -> None:
    assert not is_async(function)
