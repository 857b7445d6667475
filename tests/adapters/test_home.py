"""Where parts live that frameworks call from anywhere; what the frameworks' own tests do not reach."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator

import pytest

from streamrag import ConfigurationError, Pipeline, PipelineClosedError
from streamrag.adapters.home import Home
from streamrag.testing import ScriptedBackend, ScriptedSource


async def numbers() -> AsyncGenerator[int, None]:
    for number in range(3):
        yield number


def home() -> tuple[Home, ScriptedSource]:
    source = ScriptedSource([])
    return Home.of_source(source), source


async def test_what_was_started_in_a_loop_is_closed_from_another_thread() -> None:
    lives, source = home()
    await lives.settle()
    assert source.is_started
    await asyncio.to_thread(lives.close)
    assert not source.is_started
    with pytest.raises(PipelineClosedError):
        await lives.settle()


async def test_closing_in_its_own_loop_without_awaiting_is_refused_and_awaiting_closes_it() -> None:
    lives, source = home()
    await lives.settle()
    with pytest.raises(ConfigurationError, match="use the framework's async method"):
        lives.close()
    assert source.is_started
    await lives.aclose()
    assert not source.is_started
    lives.close()  # there is nothing to wait for


async def test_a_pipeline_that_somebody_else_has_started_is_not_closed() -> None:
    async with Pipeline(ScriptedSource([]), ScriptedBackend()) as pipeline:
        lives = Home.of_pipeline(pipeline)
        await lives.settle()
        await lives.aclose()
        assert "".join([chunk.text async for chunk in pipeline.stream("Why?")]) == "An answer."


def test_a_loop_that_stands_still_is_an_error_and_no_wait() -> None:
    lives, _ = home()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(lives.settle())
    with pytest.raises(PipelineClosedError, match="has ended"):
        list(lives.iterate(numbers))
    loop.run_until_complete(lives.aclose())
    loop.close()


def test_what_is_read_in_part_may_be_collected_in_the_loop_of_its_home() -> None:
    """By a garbage collection there, which must not wait for its own loop."""
    lives, _ = home()
    is_closed = threading.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            is_closed.set()

    async def collect() -> None:
        gc.collect()

    gc.disable()
    try:
        circle = [lives.iterate(endless)]
        next(circle[0])
        circle.append(circle)  # type: ignore[arg-type]
        del circle
        lives.run(collect)
    finally:
        gc.enable()
    assert is_closed.wait(20)
    lives.close()
