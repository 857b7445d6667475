from dataclasses import replace
from pathlib import Path

import pytest
from any_trace import traces  # type: ignore[import-not-found]
from hypothesis import HealthCheck, given, settings

from streamrag.core import Hint
from streamrag.errors import TraceError
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag.trace.write import write_trace

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def one_query(*chunks: TracedChunk, text: str = "why?") -> Trace:
    events = tuple(TracedAppend(float(at_s), chunk) for at_s, chunk in enumerate(chunks))
    return Trace((TracedQuery("1", 0.0, text, events, end_s=9.0),))


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(trace=traces())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_trace_is_read_back_as_it_was(trace: Trace, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace{suffix}"
    write_trace(trace, path, overwrite=True)
    found = read_trace(path)
    assert found.queries == trace.queries
    assert found.provenance["made by"] == "hypothesis"


def test_without_texts_their_lengths_are_kept(tmp_path: Path) -> None:
    write_trace(one_query(TracedChunk("a", 3, "three words here")), tmp_path / "trace.jsonl", text="hash")
    assert "three words" not in (tmp_path / "trace.jsonl").read_text()
    assert read_trace(tmp_path / "trace.jsonl").queries == one_query(TracedChunk("a", 3, num_chars=16)).queries


def test_lone_surrogates_become_what_tokenizers_make_of_them(tmp_path: Path) -> None:
    write_trace(one_query(TracedChunk("a", 3, "x\ud800"), text="\udfff?"), tmp_path / "trace.jsonl.gz")
    query = read_trace(tmp_path / "trace.jsonl.gz").queries[0]
    assert query.text == "\N{REPLACEMENT CHARACTER}?"
    assert query.events[0] == TracedAppend(0.0, TracedChunk("a", 3, "x\N{REPLACEMENT CHARACTER}"))


def test_an_existing_file_is_not_overwritten_by_mistake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(one_query(), path)
    with pytest.raises(TraceError, match=r"trace\.jsonl exists"):
        write_trace(one_query(), path)


def test_a_key_with_two_lengths_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="chunk 'a' has 4 tokens here, and 3 elsewhere"):
        write_trace(one_query(TracedChunk("a", 3), TracedChunk("a", 4)), tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_provenance_must_be_plain(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="must have JSON values only"):
        write_trace(Trace((), {"path": tmp_path}), tmp_path / "trace.jsonl")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere/trace\.jsonl cannot be written: No such file"):
        write_trace(one_query(), tmp_path / "nowhere" / "trace.jsonl")


def test_a_trace_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    chunk = TracedChunk("a", 1)
    odd = (Hint(-1, float("inf")), Hint(2**40, float("nan")), Hint(1, 1e300))
    query = TracedQuery("1", 0.0, "", tuple(TracedAppend(1.0, chunk, hint) for hint in odd), 1.0)
    write_trace(Trace((query,)), path)
    assert [event.hint for event in read_trace(path).queries[0].events] == [Hint(), Hint(), Hint(1)]
    before = path.read_bytes()
    for wrong, message in (
        (replace(query, arrival_s=1e15), "arrival_s: Input should be less than or equal to"),
        (replace(query, events=(TracedAppend(1.0, TracedChunk("a", 2**31)),)), "num_tokens: Input should be less than"),
        (replace(query, text="x" * (17 << 20)), "a line of a trace would have"),
    ):
        with pytest.raises(TraceError, match=message):
            write_trace(Trace((wrong,)), path, overwrite=True)
    with pytest.raises(TraceError, match="must have JSON values only"):
        write_trace(Trace((query,), {"x": float("nan")}), path, overwrite=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
