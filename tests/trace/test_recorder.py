import asyncio
import gzip
import threading
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, Update
from streamrag.errors import AlreadyStartedError, ConfigurationError, SourceError, TraceError
from streamrag.pipeline import Pipeline
from streamrag.testing import ScriptedBackend, ScriptedSource
from streamrag.trace.files import LineWriter
from streamrag.trace.read import read_trace
from streamrag.trace.recorder import TraceRecorder, record_queries
from streamrag.trace.values import TracedAppend, TracedSkip, TracedUpdate
from streamrag.trace.writer_thread import WriterThread

A = Chunk("alpha", "a.md", "A")
B = Chunk("beta", "b.md", "B", passage=2, score=0.5)
STEPS = (Append(A, Hint(num_chunks=1, end_s=2.0)), 0.02, Skipped("c.md", "empty"), Update((B, A)))


async def count(chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
    return [10 * number + len(chunk.text) for number, chunk in chunks]


async def record(path: Path, *queries: str, steps: Sequence[object] = STEPS, text: str = "full") -> None:
    source = ScriptedSource(steps)  # type: ignore[arg-type]
    recorder = TraceRecorder(path, text=text, provenance={"by": "a test"})  # type: ignore[arg-type]
    await record_queries(queries, source, recorder, count, tokenizer="letters")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
async def test_retrieval_events_are_recorded_with_their_times(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / f"trace{suffix}"
    await record(path, "one?", "two?")
    trace = read_trace(path)
    assert trace.provenance["by"] == "a test"
    assert trace.provenance["tokenizer"] == "letters"
    assert [query.text for query in trace.queries] == ["one?", "two?"]
    assert trace.queries[0].arrival_s == 0
    for query in trace.queries:
        append, update = query.events
        assert isinstance(append, TracedAppend)
        assert isinstance(update, TracedUpdate)
        assert (append.chunk.text, append.chunk.uri, append.chunk.title) == ("alpha", "a.md", "A")
        assert append.chunk.num_tokens == 15  # as the first passage of the prompt
        assert append.hint == Hint(num_chunks=1, end_s=2.0)
        assert [(chunk.text, chunk.score, chunk.passage) for chunk in update.chunks] == [
            ("beta", 0.5, 2),
            ("alpha", None, 0),
        ]
        assert update.chunks[1].key == append.chunk.key
        assert update.at_s - append.at_s >= 0.02
        assert query.skipped == (TracedSkip(query.skipped[0].at_s, "c.md", "empty"),)
        assert query.end_s >= update.at_s
        assert query.outcome == "complete"
    assert trace.queries[1].arrival_s >= trace.queries[0].end_s


async def test_without_texts_nothing_of_them_is_in_the_file_but_keys_are_the_same(tmp_path: Path) -> None:
    await record(tmp_path / "full.jsonl", "one?")
    await record(tmp_path / "hash.jsonl", "one?", text="hash")
    assert "alpha" not in (tmp_path / "hash.jsonl").read_text()
    full, short = (read_trace(tmp_path / name).queries[0].events[0] for name in ("full.jsonl", "hash.jsonl"))
    assert isinstance(full, TracedAppend)
    assert isinstance(short, TracedAppend)
    assert (full.chunk.key, full.chunk.num_tokens) == (short.chunk.key, short.chunk.num_tokens)
    assert (short.chunk.text, short.chunk.num_chars) == (None, 5)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
async def test_a_second_session_is_appended(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace{suffix}"
    await record(path, "one?")
    before = path.read_bytes()
    await record(path, "two?")
    assert path.read_bytes().startswith(before)
    trace = read_trace(path)
    assert [(query.query_id, query.text) for query in trace.queries] == [("1-1", "one?"), ("2-1", "two?")]
    assert trace.provenance["num_sessions"] == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
async def test_a_torn_file_is_repaired_before_it_is_appended_to(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace{suffix}"
    await record(path, "one?")
    await record(path, "two?")
    path.write_bytes(path.read_bytes()[:-9])
    path.chmod(0o600)
    await record(path, "three?")
    assert path.stat().st_mode & 0o777 == 0o600
    trace = read_trace(path)
    assert [query.text for query in trace.queries if query.text != "two?"] == ["one?", "three?"]
    assert not any("torn" in note for note in trace.provenance.get("notes", ()))


async def test_each_query_that_ended_survives_a_crash_of_the_recorder(tmp_path: Path) -> None:
    """The bytes are looked at while the recorder is at work, as a crash would leave them."""
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        path = tmp_path / f"trace{suffix}"
        async with TraceRecorder(path) as recorder:
            async for _ in recorder.record("one?", ScriptedSource(STEPS).stream("one?"), count, tokenizer="letters"):
                pass
            assert recorder._writer
            recorder._writer.catch_up()
            (tmp_path / f"crashed{suffix}").write_bytes(path.read_bytes())
        assert [query.text for query in read_trace(tmp_path / f"crashed{suffix}").queries] == ["one?"]


async def test_failed_and_abandoned_retrievals_are_recorded_as_that(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with TraceRecorder(path) as recorder:
        failing = ScriptedSource([Append(A), SourceError("the site is down")]).stream("one?")
        with pytest.raises(SourceError, match="the site is down"):
            async for _ in recorder.record("one?", failing, count, tokenizer="letters"):
                pass
        source = ScriptedSource(STEPS)
        async with aclosing(recorder.record("two?", source.stream("two?"), count, tokenizer="letters")) as events:
            await anext(events)
        assert source.num_streams == 0
    failed, cancelled = read_trace(path).queries
    assert (failed.outcome, failed.error, len(failed.events)) == ("failed", "the site is down", 1)
    assert (cancelled.outcome, cancelled.error, len(cancelled.events)) == ("cancelled", "", 1)


async def test_a_retrieval_that_was_cut_short_is_recorded_as_that(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    await record(path, "one?", steps=[Append(A), CutShort("time is up \ud800")])
    await record(path, "two?")
    one, two = read_trace(path).queries
    assert (one.outcome, one.cut_short, len(one.events)) == ("complete", "time is up \N{REPLACEMENT CHARACTER}", 1)
    assert two.cut_short is None


async def test_a_pipeline_records_tokens_as_its_prompt_has_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    backend = ScriptedBackend("Yes.")
    async with Pipeline(ScriptedSource(STEPS), backend, recorder=TraceRecorder(path)) as pipeline:
        async with pipeline.stream("one?") as stream:
            async for _ in stream:
                pass
        async with pipeline.stream("two?", overlap=False) as stream:
            async for _ in stream:
                pass
    trace = read_trace(path)
    assert [(query.text, query.outcome) for query in trace.queries] == [("one?", "complete"), ("two?", "complete")]
    assert trace.provenance["tokenizer"] == backend.model.name
    for query in trace.queries:
        append = query.events[0]
        assert isinstance(append, TracedAppend)
        assert append.chunk.num_tokens == len(backend.model.tokenizer.encode("[1] A (a.md)\nalpha\n\n"))


async def test_answers_are_the_same_with_and_without_a_recorder(tmp_path: Path) -> None:
    prompts = []
    for recorder in (None, TraceRecorder(tmp_path / "trace.jsonl")):
        backend = ScriptedBackend("Yes.")
        async with Pipeline(ScriptedSource(STEPS), backend, recorder=recorder) as pipeline:
            async with pipeline.stream("one?") as stream:
                async for _ in stream:
                    pass
        prompts.append(backend.prompts)
    assert prompts[0] == prompts[1]


async def test_a_cancelled_query_is_recorded_and_its_source_closed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    source = ScriptedSource([Append(A), 1000.0])
    async with Pipeline(source, ScriptedBackend("Yes."), recorder=TraceRecorder(path)) as pipeline:
        async with pipeline.events("one?") as events:
            async for event in events:
                if type(event).__name__ == "ContextChanged":
                    break
    assert source.num_streams == 0
    assert [query.outcome for query in read_trace(path).queries] == ["cancelled"]


async def test_counts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    await record(path, "one?")
    async with TraceRecorder(path) as recorder:
        events = recorder.record("two?", ScriptedSource(STEPS).stream("two?"), count, tokenizer="words")
        with pytest.raises(TraceError, match="has token counts of 'letters', and these would be of 'words'"):
            await anext(events)


async def test_recording_several_at_once_raises_what_went_wrong_itself(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    await record(path, "one?")
    source = ScriptedSource(STEPS)
    with pytest.raises(TraceError, match="has token counts of 'letters'"):
        await record_queries(["a?", "b?"], source, TraceRecorder(path), count, tokenizer="words", num_at_once=2)
    assert (source.is_started, source.num_streams) == (False, 0)


async def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, unfinished")
    with pytest.raises(TraceError, match=r"notes\.txt is not a trace"):
        await record(path, "one?")
    path.write_text("my notes\n")
    with pytest.raises(TraceError, match=r"notes\.txt is not a trace of streamrag"):
        await record(path, "one?")
    assert path.read_text() == "my notes\n"


async def test_two_recorders_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    async with TraceRecorder(path):
        with pytest.raises(TraceError, match="is open in another recorder"):
            await TraceRecorder(path).start(lambda line: None)
    await record(path, "one?")
    assert len(read_trace(path).queries) == 1


async def test_a_recorder_that_is_not_started_says_so(tmp_path: Path) -> None:
    events = TraceRecorder(tmp_path / "x.jsonl").record("one?", ScriptedSource(()).stream(""), count, tokenizer="x")
    with pytest.raises(TraceError, match="is not started"):
        await anext(events)


def test_values_that_cannot_work_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="text='some' must be 'full' or 'hash'"):
        TraceRecorder(tmp_path / "x.jsonl", text="some")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="must have JSON values only"):
        TraceRecorder(tmp_path / "x.jsonl", provenance={"path": tmp_path})


async def test_queries_go_on_when_the_disk_is_full_and_closing_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LineWriter, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    await recorder.start(lambda line: None)
    monkeypatch.setattr(LineWriter, "write", fail)
    source = ScriptedSource(STEPS).stream("one?")
    events = [event async for event in recorder.record("one?", source, count, tokenizer="letters")]
    assert len(events) == 3
    with pytest.raises(TraceError, match=r"trace\.jsonl cannot be written: No space left on device"):
        await recorder.aclose()
    await recorder.aclose()


async def test_the_loop_runs_on_while_the_disk_is_slow_and_lines_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    write = LineWriter.write

    def slow(self: LineWriter, line: bytes) -> None:
        assert disk.wait(60)
        write(self, line)

    monkeypatch.setattr(LineWriter, "write", slow)
    num_recorded = 0
    async with TraceRecorder(tmp_path / "trace.jsonl") as recorder:
        source = ScriptedSource([Append(Chunk(f"text {n}", "x")) for n in range(1000)])

        async def run() -> None:
            nonlocal num_recorded
            async for _ in recorder.record("one?", source.stream("one?"), count, tokenizer="letters"):
                num_recorded += 1

        task = asyncio.create_task(run())
        assert recorder._writer
        async with asyncio.timeout(120):
            while recorder._writer.num_behind <= 256:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(1000):
                await asyncio.sleep(0)
        assert num_recorded < 300
        disk.set()
        await task
    assert num_recorded == 1000
    assert len(read_trace(tmp_path / "trace.jsonl").queries[0].events) == 1000


class SlowWriter(WriterThread):
    """Takes as long to open as the test likes."""

    goes_on = threading.Event()

    def __init__(self, path: Path) -> None:
        assert self.goes_on.wait(30)
        super().__init__(path)


async def test_a_recorder_cancelled_while_it_starts_lets_go_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrag.trace.recorder.WriterThread", SlowWriter)

    async def enter() -> None:
        async with TraceRecorder(tmp_path / "trace.jsonl"):
            raise AssertionError("it was cancelled before")

    entering = asyncio.create_task(enter())
    while not any(task.get_name() == "streamrag trace opens" for task in asyncio.all_tasks()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    entering.cancel()
    SlowWriter.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with TraceRecorder(tmp_path / "trace.jsonl"):
        pass


async def test_the_second_of_two_starts_of_a_recorder_at_once_is_refused(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl")
    lines: list[str] = []
    starts = await asyncio.gather(*[recorder.start(lines.append) for _ in range(2)], return_exceptions=True)
    await recorder.aclose()
    assert [type(each) for each in starts] == [type(None), AlreadyStartedError]
    assert len(lines) == 1


async def test_queries_can_be_recorded_at_once_and_failures_are_returned(tmp_path: Path) -> None:
    def steps(query: str) -> list[object]:
        return [Append(A), SourceError("gone")] if query == "bad?" else [Append(A), 0.01, Append(B)]

    seen: list[tuple[int, int]] = []
    failed = await record_queries(
        ["one?", "bad?", "two?"],
        ScriptedSource(steps),  # type: ignore[arg-type]
        TraceRecorder(tmp_path / "trace.jsonl"),
        count,
        tokenizer="letters",
        num_at_once=3,
        on_recorded=lambda num_queries, num_events: seen.append((num_queries, num_events)),
    )
    assert {query: str(error) for query, error in failed.items()} == {"bad?": "gone"}
    assert seen[-1] == (3, 5)
    outcomes = {query.text: query.outcome for query in read_trace(tmp_path / "trace.jsonl").queries}
    assert outcomes == {"one?": "complete", "bad?": "failed", "two?": "complete"}


def test_opening_and_closing_a_compressed_trace_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"line\n")
    before = path.read_bytes()
    LineWriter(path).close()
    assert path.read_bytes() == before
    assert gzip.decompress(before) == b"line\n"
