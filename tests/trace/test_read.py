import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from streamrag.errors import MissingDependencyError, TraceError
from streamrag.trace.files import LineWriter
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag.trace.write import write_trace

HEADER = {"format": "streamrag-trace", "version": 1}
QUERY = {"kind": "query", "id": "1", "arrival_s": 0, "text": "why?"}
CHUNK = {"kind": "chunk", "key": "a", "num_tokens": 3}
APPEND = {"kind": "append", "query": "1", "at_s": 1.5, "key": "a"}
END = {"kind": "end", "query": "1", "end_s": 2, "outcome": "complete"}
GOOD = (HEADER, QUERY, CHUNK, APPEND, END)


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def three_queries() -> Trace:
    return Trace(
        tuple(
            TracedQuery(str(n), float(n), "why?", (TracedAppend(0.5, TracedChunk(f"chunk {n}", n, "x" * 99)),), 1.0)
            for n in range(3)
        )
    )


def test_a_trace_can_be_written_by_hand(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "trace.jsonl", *GOOD))
    assert trace.queries == (TracedQuery("1", 0.0, "why?", (TracedAppend(1.5, TracedChunk("a", 3)),), 2.0),)
    assert "notes" not in trace.provenance


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_file_torn_anywhere_is_read_up_to_its_last_whole_line(suffix: str, tmp_path: Path) -> None:
    write_trace(three_queries(), tmp_path / "trace.jsonl")
    path = tmp_path / f"torn{suffix}"
    first_line = 0
    with LineWriter(path) as writer:
        for line in (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True):
            writer.write(line)
            writer.flush()
            first_line = first_line or path.stat().st_size
    whole, expected = path.read_bytes(), read_trace(path).queries
    seen = set()
    for length in range(first_line, len(whole) + 1):
        path.write_bytes(whole[:length])
        trace = read_trace(path)
        seen.add(len(trace.queries))
        assert trace.queries == expected[: len(trace.queries)]
    assert seen == {0, 1, 2, 3}


def test_the_torn_parts_of_a_trace_are_noted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *GOOD, {**QUERY, "id": "2"}, '{"kind": "app')
    trace = read_trace(path)
    assert len(trace.queries) == 1
    assert trace.provenance["notes"] == [
        "the file was torn: an incomplete line at its end is left out",
        "1 queries without an end are left out",
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER, "nonsense\n"), "line 2: it is not JSON"),
        ((HEADER, "[]\n"), "line 2: it is not a JSON object"),
        (
            (HEADER, {"kind": "verse"}),
            "line 2: Input tag 'verse' found using 'kind'",
        ),
        ((HEADER, {**QUERY, "arrival_s": -1}), "line 2: arrival_s: Input should be greater than or equal to 0"),
        ((HEADER, {"kind": "query"}), "line 2: id: Field required"),
        ((HEADER, QUERY, QUERY), "line 3: query id '1' occurs twice"),
        ((HEADER, QUERY, APPEND), "line 3: chunk 'a' is used before its definition"),
        ((HEADER, CHUNK, APPEND), "line 3: query '1' has not begun"),
        ((*GOOD, APPEND), "line 6: query '1' has ended"),
        ((*GOOD[:4], {**END, "end_s": 1}), "line 5: 1.0 s is before the query's last event, at 1.5 s"),
        ((*GOOD[:4], {**END, "outcome": "odd"}), "line 5: outcome: Input should be 'complete', 'failed' or"),
        (
            (*GOOD[:3], {"kind": "update", "query": "1", "at_s": 1, "keys": ["a"], "scores": []}, END),
            None,  # no scores are as good as none
        ),
        (
            (*GOOD[:3], {"kind": "update", "query": "1", "at_s": 1, "keys": ["a"], "scores": [1, 2]}),
            "line 4: 1 keys and 2 scores",
        ),
        ((HEADER, QUERY, CHUNK, {**HEADER}, QUERY, APPEND), "line 6: chunk 'a' is used before its definition"),
    ],
)
def test_a_broken_line_is_named(lines: tuple[Any, ...], message: str | None, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *lines)
    if message is None:
        assert len(read_trace(path).queries) == 1
        return
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "is not a trace: it has no complete line"),
        (("a,b\n",), "is not a trace of streamrag: in line 1, it is not JSON"),
        ((QUERY,), 'is not a trace of streamrag: line 1 has no "format"'),
        (({"format": "other"},), "is not a trace of streamrag: in line 1, format: Input should be 'streamrag-trace'"),
        (({**HEADER, "version": 2},), "it has version 2 of the format, and this streamrag reads version 1 only"),
        (({**HEADER, "version": 0},), "it has version 0 of the format, and this streamrag reads version 1 only"),
    ],
)
def test_other_files_and_other_versions_are_refused(lines: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", *lines)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert message in str(raised.value)


def test_fields_of_later_writers_are_passed_over(tmp_path: Path) -> None:
    lines = ({**line, "new": 1} for line in GOOD)
    assert len(read_trace(write_lines(tmp_path / "trace.jsonl", *lines)).queries) == 1


def test_sessions_follow_each_other_without_a_pause(tmp_path: Path) -> None:
    second = ({**HEADER, "provenance": {"x": 2}}, {**QUERY, "id": "2", "arrival_s": 0.5}, CHUNK)
    update = {"kind": "update", "query": "2", "at_s": 1, "keys": ["a"], "scores": [0.5], "hint": {"num_chunks": 0}}
    first = ({**HEADER, "provenance": {"x": 1}}, *GOOD[1:], {**QUERY, "id": "lost"})
    trace = read_trace(write_lines(tmp_path / "trace.jsonl", *first, *second, update, {**END, "query": "2"}))
    assert [query.arrival_s for query in trace.queries] == [0, 2.5]
    event = trace.queries[1].events[0]
    assert isinstance(event, TracedUpdate)
    assert (event.chunks[0].score, event.hint and event.hint.num_chunks) == (0.5, 0)
    assert trace.provenance["num_sessions"] == 2
    assert trace.provenance["x"] == 1
    assert trace.provenance["notes"] == ["1 queries without an end are left out"]


def test_damage_in_compressed_data_is_no_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in GOOD)
    path.write_bytes(path.read_bytes() + b"garbage of a page that was never written")
    with pytest.raises(TraceError, match="is damaged after line 5: its compressed data cannot be decoded"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_without_zstandard_its_install_line_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install zstandard"):
        write_trace(three_queries(), tmp_path / "trace.jsonl.zst")
