"""Retrieval alone: its chunk events, and nothing of an engine."""

import pytest

from streamrag import Append, Chunk, CutShort, Skipped, SourceError, Update
from streamrag.core import Hint
from streamrag.serve import Limits
from streamrag.serve.failures import RETRIEVAL_FAILED
from streamrag.telemetry import ChunkArrived, DocumentSkipped, RetrievalCutShort, RetrievalStarted
from tests.serve.raw import raw
from tests.serve.serving import PARIS, ROME, serving

STEPS = (
    Append(PARIS, Hint(num_chunks=3)),
    Update((ROME, PARIS)),
    Skipped("https://geo.example/spain", "404"),
    Append(ROME),
    CutShort("time is up"),
)


async def test_the_events_of_the_source_come_with_all_their_fields() -> None:
    async with serving(STEPS) as served, raw(served.url) as client:
        await client.post("/v1/retrieve", {"query": "capitals"})
        assert await client.status() == 200
        events = [each async for each in client.events()]
    names = [name for name, _ in events]
    assert names == ["retrieval_started", "append", "update", "skipped", "append", "cut_short", "done"]
    first, append, update, skipped, _, cut_short, done = [values for _, values in events]
    assert first["query"] == "capitals"
    assert Chunk(**append["chunk"]) == PARIS
    assert append["hint"] == {"num_chunks": 3, "end_s": None}
    assert [Chunk(**chunk) for chunk in update["chunks"]] == [ROME, PARIS]
    assert (skipped["uri"], skipped["reason"]) == ("https://geo.example/spain", "404")
    assert cut_short["reason"] == "time is up"
    assert (done["num_events"], done["num_chunks"]) == (5, 2)
    assert [values["at_s"] for _, values in events] == sorted(values["at_s"] for _, values in events)


async def test_observers_are_told_what_a_query_would_tell_them() -> None:
    async with serving(STEPS) as served:
        await served.http.post("/v1/retrieve", json={"query": "capitals"})
        assert served.backend.prompts == []
    kinds = [type(event) for event in served.watcher.events]
    assert kinds == [RetrievalStarted, ChunkArrived, ChunkArrived, DocumentSkipped, RetrievalCutShort]
    assert served.watcher.ended == [("retrieve", "answered")]


async def test_retrieval_alone_takes_no_part_in_the_limit_of_queued_tokens() -> None:
    async with serving(STEPS, limits=Limits(max_queued_tokens=1)) as served:
        for _ in range(3):
            answer = await served.http.post("/v1/retrieve", json={"query": "capitals"})
            assert answer.status_code == 200
        assert served.service.admission.num_queued_tokens == 0


@pytest.mark.parametrize("error", [SourceError("the site is gone"), RuntimeError("the site is gone")])
async def test_a_source_that_fails_is_told_of_behind_what_it_brought(error: Exception) -> None:
    async with serving([Append(PARIS), error]) as served, raw(served.url) as client:
        await client.post("/v1/retrieve", {"query": "capitals"})
        assert await client.status() == 200
        events = [each async for each in client.events()]
    assert [name for name, _ in events] == ["retrieval_started", "append", "error"]
    assert events[-1][1]["error"]["code"] == "retrieval_failed"
    assert events[-1][1]["error"]["message"] == RETRIEVAL_FAILED
    assert served.watcher.ended == [("retrieve", "source_error")]


@pytest.mark.parametrize("body", [{}, {"query": " "}, {"query": "x" * 100_001}, {"query": "x", "k": 3}])
async def test_a_retrieval_request_with_wrong_fields_is_refused(body: object) -> None:
    async with serving() as served:
        answer = await served.http.post("/v1/retrieve", json=body)
    assert answer.status_code == 400
    assert served.watcher.started == []
