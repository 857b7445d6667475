"""Where parts live that frameworks call from anywhere; what the frameworks' own tests do not reach."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from streamrag import Append, Chunk, ConfigurationError, Pipeline, PipelineClosedError, Progress, SourceEvent
from streamrag.adapters import portal as portal_module
from streamrag.adapters import portal_tasks, retrieved_chunks
from streamrag.adapters.portal import LoopPortal
from streamrag.adapters.retrieved_chunks import retrieve_all
from streamrag.testing import ScriptedBackend, ScriptedSource


async def numbers() -> AsyncGenerator[int, None]:
    for number in range(3):
        yield number


def home() -> tuple[LoopPortal, ScriptedSource]:
    source = ScriptedSource([])
    return LoopPortal.to_source(source), source


async def test_a_part_started_in_a_loop_can_be_closed_from_another_thread() -> None:
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


async def test_a_portal_does_not_close_a_pipeline_that_it_has_not_started() -> None:
    async with Pipeline(ScriptedSource([]), ScriptedBackend()) as pipeline:
        lives = LoopPortal.to_pipeline(pipeline)
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


def test_a_half_read_iterator_may_be_collected_in_the_loop_of_its_portal() -> None:
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


def test_a_read_that_goes_on_while_its_loop_ends_is_an_error_and_not_an_end() -> None:
    lives, _ = home()
    is_settled, is_read, is_ending, may_end = (threading.Event() for _ in range(4))

    async def holds_up_the_end() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            is_ending.set()
            await asyncio.to_thread(may_end.wait, 20)

    async def live() -> None:
        left_open = holds_up_the_end()
        await anext(left_open)
        await lives.settle()
        is_settled.set()
        await asyncio.to_thread(is_read.wait, 20)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert is_settled.wait(20)
    items = lives.iterate(numbers)
    assert next(items) == 0
    is_read.set()
    assert is_ending.wait(20)
    with pytest.raises(PipelineClosedError, match="has ended"):
        next(items)
    may_end.set()
    thread.join()


async def test_closing_a_portal_stops_its_iterators_over_a_pipeline_it_does_not_own() -> None:
    is_stopped = asyncio.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(3600)
        finally:
            is_stopped.set()

    async with Pipeline(ScriptedSource([]), ScriptedBackend()) as pipeline:
        lives = LoopPortal.to_pipeline(pipeline)
        items = lives.iterate(endless)
        assert await asyncio.to_thread(next, items) == 1
        reading = asyncio.create_task(asyncio.to_thread(next, items))
        await lives.aclose()
        assert is_stopped.is_set()
        with pytest.raises(PipelineClosedError):
            await reading
        assert "".join([chunk.text async for chunk in pipeline.stream("Why?")]) == "An answer."


def test_a_source_that_is_starting_is_stopped_and_there_is_nothing_to_close() -> None:
    begins = threading.Event()
    seen: list[str] = []

    class Slow(ScriptedSource):
        async def start(self, progress: Progress) -> None:
            begins.set()
            try:
                await asyncio.sleep(3600)
            finally:
                seen.append("stopped")

        async def aclose(self) -> None:
            seen.append("closed")

    lives = LoopPortal.to_source(Slow([]))
    errors: list[Exception] = []

    def read() -> None:
        with pytest.raises(PipelineClosedError) as raised:
            lives.start()
        errors.append(raised.value)

    thread = threading.Thread(target=read)
    thread.start()
    assert begins.wait(20)
    lives.close()
    thread.join()
    assert (seen, len(errors)) == (["stopped"], 1)


async def test_a_call_that_is_cancelled_while_a_source_starts_leaves_it_to_start_for_the_others() -> None:
    begins, goes_on = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedSource):
        async def start(self, progress: Progress) -> None:
            begins.set()
            await goes_on.wait()
            await super().start(progress)

    source = Slow([])
    lives = LoopPortal.to_source(source)
    first, second = (asyncio.create_task(lives.settle()) for _ in range(2))
    await begins.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    goes_on.set()
    await second
    assert source.is_started
    await lives.aclose()


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_source_that_swallows_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch, is_starting: bool) -> None:
    for module, name in ((retrieved_chunks, "LET_GO_S"), (portal_tasks, "END_S")):
        monkeypatch.setattr(module, name, 0.05)
    begins, is_over = threading.Event(), threading.Event()

    async def resist() -> None:
        begins.set()
        while not is_over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    class Stubborn:
        async def start(self, progress: Progress) -> None:
            if is_starting:
                await resist()

        async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
            yield Append(Chunk("text", "uri"))
            await resist()

        async def aclose(self) -> None: ...

    lives = LoopPortal.to_source(Stubborn())
    errors: list[BaseException] = []

    def read() -> None:
        with pytest.raises(PipelineClosedError) as raised:
            lives.run(partial(retrieve_all, Stubborn(), "Why?"))
        errors.append(raised.value)

    reader = threading.Thread(target=read)
    reader.start()
    assert begins.wait(20)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        lives.close()
    assert "is left behind" in str(warned[0].message)
    is_over.set()
    reader.join()
    assert len(errors) == 1


async def test_a_call_for_which_its_loop_waits_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portal_module, "LOOK_S", 0.01)
    monkeypatch.setattr(portal_module, "BLOCKED_S", 0.05)
    lives, _ = home()
    await lives.settle()
    with ThreadPoolExecutor(1) as threads, pytest.raises(PipelineClosedError, match="has been blocked"):
        threads.submit(list, lives.iterate(numbers)).result()
    await lives.aclose()


def test_an_interrupted_close_of_a_portal_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    async def end() -> None:
        await asyncio.to_thread(may_end.wait, 20)

    async def begin() -> None: ...

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    lives = LoopPortal(begin, end)
    lives.start()
    with monkeypatch.context() as patched:
        patched.setattr(portal_module, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lives.close()
    may_end.set()
    lives.close()


def test_two_threads_that_are_first_at_once_start_their_pipeline_in_one_loop() -> None:
    both = threading.Barrier(2)

    class Meeting(Pipeline):
        @property
        def loop(self) -> asyncio.AbstractEventLoop | None:
            """Both see that it has none."""
            loop = super().loop
            if loop is None and not both.broken and threading.current_thread() in threads:
                with suppress(threading.BrokenBarrierError):
                    both.wait(1)
                both.abort()
            return loop

        async def start(self) -> None:
            started.release()
            await super().start()

    class Slow(ScriptedSource):
        async def start(self, progress: Progress) -> None:
            for _ in range(2):
                await asyncio.to_thread(started.acquire, timeout=20)

    async def answer() -> str:
        return "".join([chunk.text async for chunk in pipeline.stream("Why?")])

    started = threading.Semaphore(0)
    pipeline = Meeting(Slow([]), ScriptedBackend())
    homes = [LoopPortal.to_pipeline(pipeline) for _ in range(2)]
    answers: list[str] = []
    threads = [threading.Thread(target=lambda at=at: answers.append(at.run(answer))) for at in homes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["An answer."] * 2
    for at in homes:
        at.close()
    with pytest.raises(PipelineClosedError):
        asyncio.run(pipeline.start())


FORKS = """
import asyncio, os, sys, threading
from streamrag import Pipeline, PipelineClosedError
from streamrag.adapters.portal import LoopPortal
from streamrag.testing import ScriptedBackend, ScriptedSource

async def nothing(): ...

used, unused = (LoopPortal.to_source(ScriptedSource([])) for _ in range(2))
used.start()
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
pipeline = Pipeline(ScriptedSource([]), ScriptedBackend())
asyncio.run_coroutine_threadsafe(pipeline.start(), loop).result()
if (child := os.fork()) == 0:
    for home in (used, LoopPortal.to_pipeline(pipeline)):
        try:
            home.start()
        except PipelineClosedError as error:
            print("forked" in str(error), flush=True)
        home.close()
    unused.start()
    unused.close()
    sys.exit(3)  # and waits for no end of what the other process has
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
used.start()
used.close()
asyncio.run_coroutine_threadsafe(pipeline.aclose(), loop).result()
"""


def test_a_fork_is_refused_what_its_parent_has_started_and_ends_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=50)
    assert (ended.stdout.split(), ended.stderr) == (["True", "True", "3"], "")


async def test_a_closed_part_is_not_ended_again_when_it_is_collected() -> None:
    """Its loop may stop before a second end begins, which would be a coroutine that was never awaited."""
    ends = []

    async def start() -> None:
        pass

    async def aclose() -> None:
        ends.append("closed")

    resource = portal_tasks.PortalResource(start, aclose)
    await resource.end()
    portal_tasks.end_dropped(resource, asyncio.get_running_loop(), os.getpid())
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends == ["closed"]
