import asyncio
import contextvars
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from streamrag.sources.threads import Threads


def _raise(error: type[BaseException]) -> None:
    raise error


async def test_a_call_gives_what_it_returns_or_raises() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    threads = Threads(1, "test")

    assert await threads.run(variable.get) == "set"
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    for error in (StopIteration, GeneratorExit):
        with pytest.raises(RuntimeError, match=error.__name__):
            await threads.run(partial(_raise, error))
    assert await threads.run(threading.current_thread) is not threading.current_thread()


async def test_a_call_that_was_cancelled_keeps_its_place_until_it_returns() -> None:
    threads, begun, release = Threads(1, "test"), threading.Event(), threading.Event()

    def blocks() -> None:
        begun.set()
        release.wait()

    first = asyncio.create_task(threads.run(blocks))
    await asyncio.to_thread(begun.wait)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(threads.run(lambda: "second"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    release.set()
    assert await second == "second"


async def test_a_pool_within_another_leaves_places_for_its_siblings() -> None:
    shared, release = Threads(3, "shared"), threading.Event()
    greedy, modest = Threads(2, "greedy", within=shared), Threads(2, "modest", within=shared)
    blocked = [asyncio.create_task(greedy.run(release.wait)) for _ in range(9)]
    assert await modest.run(lambda: "modest") == "modest"
    release.set()
    assert all(await asyncio.gather(*blocked))


async def test_waiting_for_a_place_can_be_cancelled() -> None:
    shared, release = Threads(1, "shared"), threading.Event()
    inner = Threads(1, "inner", within=shared)
    blocked = asyncio.create_task(shared.run(release.wait))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(inner.run(lambda: "waiting"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await blocked
    assert await inner.run(lambda: "next") == "next"


async def test_the_loops_own_executor_stays_free() -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        threads = Threads(8, "test")
        blocked = [asyncio.create_task(threads.run(release.wait)) for _ in range(8)]
        assert await asyncio.to_thread(lambda: "free") == "free"
        release.set()
        await asyncio.gather(*blocked)


def test_a_program_does_not_wait_for_calls_when_it_ends() -> None:
    script = """
import asyncio, threading
from streamrag.sources.threads import Threads
async def main():
    begun = threading.Event()
    def blocks():
        begun.set()
        threading.Event().wait()
    task = asyncio.create_task(Threads(1, "test").run(blocks))
    await asyncio.to_thread(begun.wait)
    task.cancel()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
