"""Sources and backends have one owner, which starts and closes them."""

import ast
import asyncio
from pathlib import Path

import anyio
import pytest

import streamrag
from streamrag import Append, Chunk, MergedSource, Pipeline, TraceRecorder
from streamrag.adapters.portal import LoopPortal
from streamrag.core import Progress
from streamrag.core.lifecycle import start_all, started_once
from streamrag.errors import AlreadyStartedError
from streamrag.serve import Service
from streamrag.testing import ScriptedBackend, ScriptedSource

A = Chunk("It rained.", "file:///a")

PASS_IT_ON = {
    "RerankerPool",
    "_KeywordSearch",
    "RayBackend",
    "RayLane",
    "RayDisaggregatedBackend",
    "RaySource",
    "ExistingReplicas",
    "ReplicaCluster",
    "Startable",
}
"""Parts that start the one part that they wrap, or nothing, and protocols."""


def silent(line: str) -> None:
    pass


async def answer(pipeline: Pipeline) -> str:
    return "".join([chunk.text async for chunk in pipeline.stream("Why?")])


async def test_a_second_pipeline_that_owns_the_same_backend_is_refused_and_the_first_goes_on() -> None:
    backend, source = ScriptedBackend("ok"), ScriptedSource([Append(A)])
    async with Pipeline(ScriptedSource([Append(A)]), backend) as first:
        with pytest.raises(AlreadyStartedError, match=r"ScriptedBackend is started already.*owns_backend=False"):
            await Pipeline(source, backend).start()
        async with asyncio.timeout(60):
            with pytest.raises(AlreadyStartedError):
                async with Pipeline(source, backend):
                    pass
        assert (backend.is_started, source.is_started) == (True, False)
        assert await answer(first) == "ok"
    assert not backend.is_started
    async with Pipeline(source, backend) as later:
        assert await answer(later) == "ok"


async def test_a_second_owner_of_a_source_is_refused_and_the_first_goes_on() -> None:
    source, other = ScriptedSource([Append(A)]), ScriptedSource([])
    async with Pipeline(source, ScriptedBackend("ok")) as first:
        for second in (Pipeline(source, ScriptedBackend()), Pipeline(MergedSource(other, source), ScriptedBackend())):
            with pytest.raises(AlreadyStartedError, match="ScriptedSource"):
                async with second:
                    pass
        home = LoopPortal.to_source(source)
        with pytest.raises(AlreadyStartedError, match="ScriptedSource"):
            await home.settle()
        await home.aclose()
        assert (source.is_started, other.is_started) == (True, False)
        assert await answer(first) == "ok"


async def test_a_service_whose_backend_has_an_owner_is_refused_and_the_owner_goes_on() -> None:
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource([Append(A)]), backend) as first:
        with pytest.raises(AlreadyStartedError, match="ScriptedBackend"):
            await Service(backend).start()
        assert await answer(first) == "ok"


async def test_a_second_owner_of_a_recorder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend("ok"), recorder=recorder) as first:
        with pytest.raises(AlreadyStartedError, match="TraceRecorder"):
            async with Pipeline(ScriptedSource([]), ScriptedBackend(), recorder=recorder):
                pass
        assert await answer(first) == "ok"


async def test_a_recorder_that_was_entered_by_hand_is_refused_with_what_is_true_of_recorders(tmp_path: Path) -> None:
    async with TraceRecorder(tmp_path / "trace.jsonl") as recorder:
        with pytest.raises(AlreadyStartedError, match="A Pipeline owns its recorder") as raised:
            async with Pipeline(ScriptedSource([]), ScriptedBackend(), recorder=recorder):
                pass
    assert "owns_source" not in str(raised.value)


async def test_a_part_has_one_start_at_a_time_and_a_failed_one_can_be_tried_again() -> None:
    class Slow:
        num_starts = 0

        def __init__(self) -> None:
            self.may_go_on = anyio.Event()

        @started_once
        async def start(self, progress: Progress) -> None:
            self.num_starts += 1
            await self.may_go_on.wait()
            if self.num_starts == 1:
                raise OSError("no room")

        async def aclose(self) -> None:
            self.is_started = False

    part = Slow()
    first = asyncio.create_task(start_all([part], silent))
    await asyncio.sleep(0)
    with pytest.raises(AlreadyStartedError):
        await start_all([part], silent)
    part.may_go_on.set()
    with pytest.raises(OSError, match="no room"):
        await first
    async with await start_all([part], silent):
        assert part.num_starts == 2
    async with await start_all([part], silent):
        assert part.num_starts == 3


def test_every_part_of_ours_has_one_owner() -> None:
    parts: dict[str, bool] = {}
    for path in Path(streamrag.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            for method in part.body if isinstance(part, ast.ClassDef) else ():
                if not isinstance(method, ast.AsyncFunctionDef) or method.name != "start":
                    continue
                if isinstance(part, ast.ClassDef) and ast.unparse(method.args) == "self, progress: Progress":
                    parts[part.name] = any(
                        ast.unparse(each).startswith("started_once") for each in method.decorator_list
                    )
    assert {name for name, is_checked in parts.items() if not is_checked} == PASS_IT_ON
    assert parts["VllmBackend"]
