import time
from pathlib import Path

import pytest

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update, part_name
from streamrag.errors import ConfigurationError, SourceError, TraceError
from streamrag.pipeline import Pipeline
from streamrag.testing import ScriptedBackend, ScriptedSource
from streamrag.trace.recorder import TraceRecorder
from streamrag.trace.replay import ReplaySource
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag.trace.write import write_trace

A, B = Chunk("alpha", "a.md", "A", 1, 0.25), Chunk("beta", "b.md")
EVENTS: list[SourceEvent] = [Append(B, Hint(2, 1.0)), Skipped("c.md", "empty"), Update((A, B), Hint(0))]


def traced(text: str, answer: str, **options: str) -> TracedQuery:
    events = (TracedAppend(0.02, TracedChunk(answer, 1, answer)),)
    return TracedQuery(text, 0.0, text, events, 0.05, **options)  # type: ignore[arg-type]


async def replayed(source: ReplaySource, query: str) -> tuple[list[SourceEvent], list[float]]:
    """The events, and when they and the end came."""
    began_s = time.monotonic()
    found, came_s = [], []
    async for event in source.stream(query):
        found.append(event)
        came_s.append(time.monotonic() - began_s)
    return found, [*came_s, time.monotonic() - began_s]


async def texts(source: ReplaySource, *queries: str) -> list[str]:
    found = []
    for query in queries:
        (event,), _ = await replayed(source, query)
        assert isinstance(event, Append)
        found.append(event.chunk.text)
    return found


@pytest.mark.parametrize("delay", [1.0, 3.0])
async def test_recorded_events_are_replayed_at_their_times_or_delayed(delay: float, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    steps = (0.02, EVENTS[0], EVENTS[1], 0.03, EVENTS[2], 0.02)
    async with Pipeline(ScriptedSource(steps), ScriptedBackend("Yes."), recorder=TraceRecorder(path)) as pipeline:
        async with pipeline.stream("why?") as stream:
            async for _ in stream:
                pass
    found, came_s = await replayed(ReplaySource(path, delay=delay), "why?")
    assert found == [Append(B, Hint(2, delay)), *EVENTS[1:]]
    due_s = [delay * at_s for at_s in (0.02, 0.02, 0.05, 0.07)]
    assert all(came >= due - 0.001 for came, due in zip(came_s, due_s, strict=True))


async def test_a_retrieval_that_was_cut_short_says_so_again_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    steps = (Append(B), CutShort("crawl_timeout_s=30 were over"))
    async with Pipeline(ScriptedSource(steps), ScriptedBackend("Yes."), recorder=TraceRecorder(path)) as pipeline:
        assert [chunk async for chunk in pipeline.stream("why?")]
    found, _ = await replayed(ReplaySource(path), "why?")
    assert found == [*steps]


def test_two_traces_are_two_kinds_of_source(tmp_path: Path) -> None:
    trace = Trace((traced("why?", "one"),))
    for name in ("crawl", "search"):
        write_trace(trace, tmp_path / f"{name}.jsonl")
    assert part_name(ReplaySource(tmp_path / "crawl.jsonl")) == "ReplaySource(crawl.jsonl)"
    assert part_name(ReplaySource(tmp_path / "search.jsonl")) == "ReplaySource(search.jsonl)"
    assert part_name(ReplaySource(trace)) == "ReplaySource"


async def test_a_query_that_was_recorded_twice_is_replayed_in_turn() -> None:
    source = ReplaySource(Trace((traced("why?", "one"), traced("why?", "two"), traced("who?", "three"))), delay=0.01)
    assert await texts(source, "why?", "who?", "why?", "why?") == ["one", "three", "two", "one"]


async def test_an_unknown_query_is_an_error_or_takes_the_next_one() -> None:
    trace = Trace((traced("why?", "one"), traced("who?", "two")))
    with pytest.raises(SourceError, match="the trace has no query 'what\\?': ask one of its 2"):
        await replayed(ReplaySource(trace), "what?")
    source = ReplaySource(trace, delay=0.01, on_missing="next")
    assert await texts(source, "what?", "who?", "what?", "what?") == ["one", "two", "two", "one"]


async def test_a_retrieval_that_failed_fails_again() -> None:
    source = ReplaySource(Trace((traced("why?", "one", outcome="failed", error="the site is down"),)), delay=0.01)
    with pytest.raises(SourceError, match="the recorded retrieval failed: the site is down"):
        await replayed(source, "why?")


async def test_a_replay_answers_like_the_retrieval_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    backends = ScriptedBackend("Yes."), ScriptedBackend("Yes.")
    async with Pipeline(ScriptedSource(EVENTS), backends[0], recorder=TraceRecorder(path)) as pipeline:
        async with pipeline.stream("why?") as stream:
            async for _ in stream:
                pass
    async with Pipeline(ReplaySource(path, delay=0.01), backends[1]) as pipeline:
        async with pipeline.stream("why?") as stream:
            async for _ in stream:
                pass
    last = [[prompt.token_ids for prompt in backend.prompts[0]] for backend in backends]
    assert last[0] == last[1]


def test_a_trace_without_texts_cannot_be_replayed_as_text() -> None:
    query = TracedQuery("1", 0.0, "why?", (TracedAppend(0.0, TracedChunk("a", 3)),), 1.0)
    with pytest.raises(ConfigurationError, match=r"has no text for chunk 'a' of query '1'.*text=\"full\""):
        ReplaySource(Trace((query,)))


def test_values_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="on_missing='skip' must be"):
        ReplaySource(Trace((traced("a", "b"),)), on_missing="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="delay=0 must be"):
        ReplaySource(Trace((traced("a", "b"),)), delay=0)
    with pytest.raises(ConfigurationError, match="the trace has no queries"):
        ReplaySource(Trace(()))
    with pytest.raises(TraceError, match="cannot be read"):
        ReplaySource(tmp_path / "none.jsonl")
