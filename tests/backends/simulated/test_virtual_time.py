import asyncio
import time

import anyio
import pytest

from streamrag.backends.simulated.virtual_time import DeadlockError, VirtualTimeLoop, run_virtual
from streamrag.errors import ConfigurationError


def test_a_day_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    start_s = time.perf_counter()
    assert run_virtual(main()) == 86_400
    assert time.perf_counter() - start_s < 60


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken = []

    async def sleeper(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        woken.append((delay_s, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(s) for s in (3, 0.1, 2.5, 0)))

    run_virtual(main())
    assert woken == [(0, 0), (0.1, 0.1), (2.5, 2.5), (3, 3)]


def test_timeouts_and_anyio_scopes_run_on_virtual_time() -> None:
    async def main() -> float:
        with anyio.move_on_after(10):
            await anyio.sleep_forever()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 15


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        waiter = asyncio.create_task(asyncio.Event().wait(), name="waits for nobody")
        await asyncio.sleep(2)
        await waiter

    with pytest.raises(DeadlockError, match=r"at 2\.000000 s .*waits for nobody"):
        run_virtual(main())


def test_time_that_stands_still_is_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(DeadlockError, match=r"stands still at 1\.000000 s"):
        run_virtual(main())


def test_threads_and_networks_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    async def network() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    async def process() -> None:
        await asyncio.create_subprocess_exec("true")

    for main, named in ((thread, "thread"), (network, "network"), (process, "process")):
        with pytest.raises(ConfigurationError, match=f"cannot wait for .*{named}"):
            run_virtual(main())


def test_a_callback_from_another_thread_is_refused() -> None:
    import threading

    errors: list[Exception] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except ConfigurationError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run_virtual(main())
    assert "another thread" in str(errors[0])


def test_the_loop_says_that_it_is_virtual() -> None:
    assert VirtualTimeLoop.is_virtual
    assert not getattr(asyncio.SelectorEventLoop, "is_virtual", False)
