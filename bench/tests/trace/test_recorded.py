"""The traces that come with the project."""

import gzip
from pathlib import Path

import pytest

from streamrag.trace.read import read_trace
from streamrag_bench.trace.statistics import describe

TRACES = Path(__file__).resolve().parents[3] / "traces"


@pytest.mark.parametrize(("name", "mode"), [("crawl-python-docs", "append"), ("search-python-docs", "update")])
def test_recorded_traces_are_whole_small_and_tell_nothing_of_the_machine(name: str, mode: str) -> None:
    path = TRACES / f"{name}.jsonl.gz"
    assert path.stat().st_size < 300_000
    lines = gzip.decompress(path.read_bytes()).decode()
    assert not any(word in lines for word in ("127.0.0.1", "localhost", "/home", "/tmp", "/root"))
    trace = read_trace(path)
    found = describe(trace)
    assert "notes" not in trace.provenance
    assert (found.num_queries, found.num_incomplete, found.mode, found.has_text) == (32, 0, mode, False)
    assert found.tokens_per_query.min > 0
    assert found.num_invalidated.max > 0 if mode == "update" else found.num_invalidated.max == 0
