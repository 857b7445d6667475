import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from source_helpers import alive, until

from streamrag.errors import WorkerError
from streamrag.sources.workers import worker_process
from streamrag.sources.workers.pool import (
    Share,
    WorkerJobError,
    WorkerLimitError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

FOREVER = {"do": "wait", "until": "/nonexistent/file"}


def faulty_pool(size: int = 1, **options: Any) -> WorkerPool:
    return WorkerPool("faulty_worker:make", options, size=size, name="test worker")


@asynccontextmanager
async def running(pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    async with running(faulty_pool()) as pool:
        yield pool


def started(folder: Path) -> list[int]:
    """Process ids of the workers that hang while they start."""
    return [int(path.name.partition("-")[2]) for path in folder.iterdir()]


async def test_a_job_gets_its_answer_and_the_worker_is_reused(pool: WorkerPool) -> None:
    first = await pool.run({"do": "echo", "text": "häßlich 漢"}, b"\0" * 300_000)
    second = await pool.run({"do": "echo"})
    assert first["header"] == {"do": "echo", "text": "häßlich 漢"}
    assert first["num_bytes"] == 300_000
    assert [first["pid"], second["pid"]] == pool.process_ids * 2
    assert pool.num_busy == 0


async def test_jobs_run_side_by_side_up_to_the_size_of_the_pool(tmp_path: Path) -> None:
    async with running(faulty_pool(size=2)) as pool:
        go = tmp_path / "go"
        jobs = [asyncio.create_task(pool.run({"do": "wait", "until": str(go)})) for _ in range(3)]
        await until(lambda: pool.num_busy == 2)
        assert not any(job.done() for job in jobs)
        go.touch()
        answers = await asyncio.gather(*jobs)
        assert {answer["pid"] for answer in answers} == set(pool.process_ids)
        assert pool.num_busy == 0


async def test_a_job_that_raises_is_an_error_with_its_kind_and_the_worker_lives_on(pool: WorkerPool) -> None:
    [process_id] = pool.process_ids
    with pytest.raises(WorkerJobError, match="ZeroDivisionError: as asked") as caught:
        await pool.run({"do": "raise"})
    assert caught.value.kind == "ZeroDivisionError"
    with pytest.raises(WorkerJobError, match="JSON serializable"):
        await pool.run({"do": "answer nonsense"})
    assert (await pool.run({"do": "echo"}))["pid"] == process_id


async def test_output_printed_by_a_worker_does_not_disturb_its_answers(pool: WorkerPool) -> None:
    await pool.run({"do": "print"})
    assert (await pool.run({"do": "echo"}))["pid"] == pool.process_ids[0]


async def test_a_worker_that_dies_is_an_error_for_its_job_and_is_replaced(pool: WorkerPool) -> None:
    [process_id] = pool.process_ids
    with pytest.raises(WorkerError, match=r"test worker \(process \d+\) died with exit code 7.*\n.*told to die"):
        await pool.run({"do": "die"})
    assert (await pool.run({"do": "echo"}))["pid"] != process_id


@pytest.mark.parametrize("do", ["echo", "raise"])
async def test_a_worker_that_is_worn_is_replaced_after_its_answer(do: str) -> None:
    async with running(faulty_pool(fault="wears out")) as pool:
        [process_id] = pool.process_ids
        await pool.run({"do": "echo"})
        assert pool.process_ids == [process_id]
        if do == "raise":
            with pytest.raises(WorkerJobError, match="as asked"):
                await pool.run({"do": do, "is_hard": True})
        else:
            assert (await pool.run({"do": do, "is_hard": True}))["pid"] == process_id
        assert (await pool.run({"do": "echo"}))["pid"] != process_id


async def test_a_worker_that_dies_while_it_is_free_fails_no_job(pool: WorkerPool) -> None:
    [process_id] = pool.process_ids
    [slot] = pool._slots
    os.kill(process_id, signal.SIGKILL)
    await until(lambda: slot.result().process.returncode is not None)
    assert (await pool.run({"do": "echo"}))["pid"] != process_id


async def test_a_job_over_its_time_is_killed_and_no_other_job_notices(tmp_path: Path) -> None:
    async with running(faulty_pool(size=2)) as pool:
        go = tmp_path / "go"
        other = asyncio.create_task(pool.run({"do": "wait", "until": str(go)}, timeout_s=20))
        before = set(pool.process_ids)
        with pytest.raises(WorkerTimeoutError, match=r"took longer than 0\.05 s"):
            await pool.run(FOREVER, timeout_s=0.05)
        go.touch()
        assert (await other)["pid"] in before
        await until(lambda: len(pool.process_ids) == 2)
        assert len(before & set(pool.process_ids)) == 1


@pytest.mark.parametrize(("do", "what"), [("compute", "computing time"), ("take memory", "memory")])
async def test_a_job_over_a_limit_of_its_handler_costs_its_worker(pool: WorkerPool, do: str, what: str) -> None:
    [process_id] = pool.process_ids
    share = Share()
    with pytest.raises(WorkerLimitError, match=f"took more {what} than it may") as caught:
        await pool.run({"do": do}, share=share)
    assert caught.value.what == what
    assert share.was_stopped
    assert (await pool.run({"do": "echo"}))["pid"] != process_id


async def test_a_query_with_many_jobs_does_not_keep_another_waiting_behind_them(
    pool: WorkerPool, tmp_path: Path
) -> None:
    many, few = Share(), Share()
    go = tmp_path / "go"
    ended: list[str] = []

    async def run(name: str, share: Share) -> None:
        await pool.run({"do": "wait", "until": str(go)}, share=share)
        ended.append(name)

    jobs = [asyncio.create_task(run("many", many))]
    await until(lambda: pool.num_busy)
    jobs += [asyncio.create_task(run("many", many)) for _ in range(5)]
    await asyncio.sleep(0)
    jobs.append(asyncio.create_task(run("few", few)))
    await asyncio.sleep(0)
    go.touch()
    await asyncio.gather(*jobs)
    assert ended == ["many", "few", *["many"] * 5]


async def test_a_query_that_had_a_job_stopped_leaves_a_worker_to_the_others(tmp_path: Path) -> None:
    async with running(faulty_pool(size=2)) as pool:
        stopped, other = Share(), Share()
        with pytest.raises(WorkerTimeoutError):
            await pool.run(FOREVER, timeout_s=0.01, share=stopped)
        go = tmp_path / "go"
        jobs = [asyncio.create_task(pool.run({"do": "wait", "until": str(go)}, share=stopped)) for _ in range(3)]
        await until(lambda: pool.num_busy == 1)
        assert (await pool.run({"do": "echo"}, share=other))["num_bytes"] == 0
        assert pool.num_busy == 1
        go.touch()
        await asyncio.gather(*jobs)


async def test_an_answer_over_the_limit_is_an_error(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(WorkerError, match="broke the protocol: it answers 200012 bytes"):
        await pool.run({"do": "answer much", "num_chars": 200_000})
    assert (await pool.run({"do": "echo"}))["num_bytes"] == 0


async def test_a_killed_worker_takes_what_it_started_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    child = (await pool.run({"do": "leave a child", "pid_file": str(tmp_path / "pid")}))["child"]
    assert alive(child)
    with pytest.raises(WorkerTimeoutError):
        await pool.run(FOREVER, timeout_s=0.01)
    await until(lambda: not alive(child))


async def test_closing_ends_what_a_worker_has_left_running(tmp_path: Path) -> None:
    async with running(faulty_pool()) as pool:
        child = (await pool.run({"do": "leave a child", "pid_file": str(tmp_path / "pid")}))["child"]
    await until(lambda: not alive(child))


async def test_cancelling_while_waiting_for_a_free_worker_takes_none(pool: WorkerPool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    busy = asyncio.create_task(pool.run({"do": "wait", "until": str(go)}))
    waiting = asyncio.create_task(pool.run({"do": "echo"}))
    await until(lambda: pool.num_busy == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.touch()
    await busy
    assert (await pool.run({"do": "echo"}))["pid"] == pool.process_ids[0]
    assert pool.num_busy == 0


async def test_cancelling_while_the_worker_is_starting_leaves_it_starting(tmp_path: Path) -> None:
    async with running(faulty_pool()) as pool:
        with pytest.raises(WorkerTimeoutError):
            await pool.run(FOREVER, timeout_s=0.01)
        waiting = asyncio.create_task(pool.run({"do": "echo"}))
        await until(lambda: pool.num_busy == 1)
        assert pool.process_ids == []
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.num_busy == 0
        await until(lambda: pool.process_ids)
        assert (await pool.run({"do": "echo"}))["pid"] == pool.process_ids[0]


async def test_cancelling_just_as_the_worker_is_ready_loses_no_process() -> None:
    async with running(faulty_pool()) as pool:
        with pytest.raises(WorkerTimeoutError):
            await pool.run(FOREVER, timeout_s=0.01)
        waiting = asyncio.create_task(pool.run({"do": "echo"}))
        await until(lambda: pool.num_busy == 1)
        [slot] = pool._slots
        slot.add_done_callback(lambda _: waiting.cancel())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await pool.run({"do": "echo"}))["pid"] == pool.process_ids[0]


async def test_a_cancelled_job_that_ends_soon_keeps_its_worker(pool: WorkerPool, tmp_path: Path) -> None:
    [process_id] = pool.process_ids
    begun, go = tmp_path / "begun", tmp_path / "go"
    job = asyncio.create_task(pool.run({"do": "wait", "until": str(go), "touch": str(begun)}))
    await until(begun.exists)
    job.cancel()
    go.touch()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert pool.num_busy == 0
    assert (await pool.run({"do": "echo"}))["pid"] == process_id


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_a_cancelled_job_that_does_not_end_is_killed(pool: WorkerPool, tmp_path: Path, num_cancels: int) -> None:
    [process_id] = pool.process_ids
    begun = tmp_path / "begun"
    job = asyncio.create_task(pool.run({**FOREVER, "touch": str(begun)}))
    await until(begun.exists)
    for _ in range(num_cancels):
        job.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await job
    await until(lambda: pool.num_busy == 0)
    assert (await pool.run({"do": "echo"}))["pid"] != process_id
    assert not alive(process_id)


async def test_an_anyio_scope_that_is_cancelled_waits_for_the_job_to_end(pool: WorkerPool, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    [process_id] = pool.process_ids
    async with anyio.create_task_group() as group:
        group.start_soon(pool.run, {"do": "wait", "until": str(go), "touch": str(begun)})
        await until(begun.exists)
        group.cancel_scope.cancel()
        go.touch()
    assert pool.num_busy == 0
    assert (await pool.run({"do": "echo"}))["pid"] == process_id


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raises", WorkerStartError, r"LookupError: no such handler part; it printed last:\n(.*\n)*.*in make"),
        ("dies", WorkerError, r"died with exit code 3; it printed last:\nthe last thing it said"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(fault: str, kind: type[WorkerError], message: str) -> None:
    pool = faulty_pool(size=2, fault=fault)
    with pytest.raises(kind, match=message):
        await pool.start()
    assert pool.process_ids == []


async def test_a_worker_that_is_not_ready_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "START_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerTimeoutError, match="was not ready after 1 s"):
        await faulty_pool(fault="hangs", folder=str(tmp_path)).start()
    assert not any(map(alive, started(tmp_path)))


async def test_a_failed_replacement_is_tried_again_for_the_next_job(tmp_path: Path) -> None:
    (tmp_path / "died").touch()
    async with running(faulty_pool(fault="dies once", folder=str(tmp_path))) as pool:
        (tmp_path / "died").unlink()
        with pytest.raises(WorkerTimeoutError):
            await pool.run(FOREVER, timeout_s=0.01)
        with pytest.raises(WorkerError, match="exit code 3"):
            await pool.run({"do": "echo"})
        assert (await pool.run({"do": "echo"}))["num_bytes"] == 0


async def test_cancelling_the_start_ends_every_process(tmp_path: Path) -> None:
    pool = faulty_pool(size=2, fault="hangs", folder=str(tmp_path))
    starting = asyncio.create_task(pool.start())
    await until(lambda: len(started(tmp_path)) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(map(alive, started(tmp_path)))


async def test_closing_during_the_start_is_an_error_of_the_start(tmp_path: Path) -> None:
    pool = faulty_pool(fault="hangs", folder=str(tmp_path))
    starting = asyncio.create_task(pool.start())
    await until(lambda: started(tmp_path))
    await pool.aclose()
    with pytest.raises(WorkerError, match="test worker is closed"):
        await starting


async def test_closing_while_busy_is_an_error_for_the_running_and_the_waiting_job(tmp_path: Path) -> None:
    pool = faulty_pool()
    await pool.start()
    [process_id] = pool.process_ids
    begun = tmp_path / "begun"
    jobs = [asyncio.create_task(pool.run({**FOREVER, "touch": str(begun)})) for _ in range(3)]
    await until(begun.exists)
    await asyncio.gather(pool.aclose(), pool.aclose())
    for job in jobs:
        with pytest.raises(WorkerError, match="test worker is closed"):
            await job
    assert not alive(process_id)
    assert pool.num_busy == 0
    with pytest.raises(WorkerError, match="test worker is closed"):
        await pool.run({"do": "echo"})


async def test_cancelling_the_close_does_not_leave_it_half_done(tmp_path: Path) -> None:
    pool = faulty_pool(size=2)
    await pool.start()
    process_ids = pool.process_ids
    begun = tmp_path / "begun"
    job = asyncio.create_task(pool.run({**FOREVER, "touch": str(begun)}))
    await until(begun.exists)
    closing = asyncio.create_task(pool.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with suppress(asyncio.CancelledError):
        await closing
    assert not any(alive(process_id) for process_id in process_ids)
    with pytest.raises(WorkerError):
        await job


async def test_a_closed_pool_can_be_started_again() -> None:
    pool = faulty_pool()
    for _ in range(2):
        async with running(pool):
            assert (await pool.run({"do": "echo"}))["pid"] == pool.process_ids[0]
    await pool.aclose()


@pytest.mark.parametrize("job", [FOREVER, {"do": "hold the interpreter"}], ids=["Python", "C"])
async def test_workers_end_when_their_parent_is_killed(tmp_path: Path, job: dict[str, Any]) -> None:
    begun = tmp_path / "begun"
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from streamrag.sources.workers.pool import WorkerPool
async def main():
    pool = WorkerPool("faulty_worker:make", {{}}, size=2, name="orphan")
    await pool.start()
    print(*pool.process_ids, flush=True)
    await pool.run({ ({**job, "touch": str(begun)})!r})
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout
    process_ids = [int(number) for number in (await parent.stdout.readline()).split()]
    assert len(process_ids) == 2
    await until(begun.exists)
    parent.kill()
    await parent.communicate()
    await until(lambda: not any(alive(process_id) for process_id in process_ids))
