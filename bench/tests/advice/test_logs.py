"""Logs of applications as traces, also broken and hostile ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrag.errors import ConfigurationError, TraceError
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend
from streamrag_bench.advice.logs import read_log

TRACES = Path(__file__).resolve().parents[3] / "traces"


def read(tmp_path: Path, content: str | bytes, name: str = "log") -> Trace:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_log(path, 250)


def shape(trace: Trace) -> list[tuple[float, float, list[tuple[float, int]]]]:
    """Arrival, end, and the time and length of each chunk of each query."""
    shapes = []
    for query in trace.queries:
        events = [event for event in query.events if isinstance(event, TracedAppend)]
        assert len(events) == len(query.events)
        chunks = [(round(event.at_s, 6), event.chunk.num_tokens) for event in events]
        shapes.append((round(query.arrival_s, 6), round(query.end_s, 6), chunks))
    return shapes


def lines(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


TWO_QUERIES = [(0.0, 1.5, [(0.5, 300), (1.0, 250)]), (2.0, 0.25, [(0.25, 80)])]


def test_a_csv_has_three_columns_with_or_without_a_heading(tmp_path: Path) -> None:
    rows = 'a,question,10\na,chunk:300,10.5\n"a",chunk,11\na,end,11.5\nb,question,12\nb,chunk:80,12.25\n'
    assert shape(read(tmp_path, rows)) == TWO_QUERIES
    assert shape(read(tmp_path, "query,event,seconds\r\n" + rows.replace("\n", "\r\n"))) == TWO_QUERIES


def test_json_lines_are_those_of_the_langchain_handler(tmp_path: Path) -> None:
    log = lines(
        {"query": "a", "event": "question", "seconds": 10},
        {"query": "b", "event": "question", "seconds": 12},  # lines of queries alternate
        {"query": "a", "event": "chunks", "seconds": 10.5, "tokens": [300], "more": 1},
        {"query": "a", "event": "chunks", "seconds": 11},
        {"query": "a", "event": "end", "seconds": 11.5},
        {"query": "b", "event": "chunks", "seconds": 12.25, "tokens": [80]},
        {"query": "without chunks", "event": "question", "seconds": 13},
    )
    trace = read(tmp_path, log)
    assert shape(trace) == TWO_QUERIES
    assert trace.provenance["num_without_chunks"] == 1


def test_events_after_the_end_do_not_count_and_an_empty_list_is_no_chunk(tmp_path: Path) -> None:
    log = lines(
        {"query": "a", "event": "question", "seconds": 1},
        {"query": "a", "event": "chunks", "seconds": 2, "tokens": []},
        {"query": "a", "event": "end", "seconds": 3},
        {"query": "a", "event": "chunks", "seconds": 3, "tokens": [7]},  # at the end, whatever the order of lines
        {"query": "a", "event": "chunks", "seconds": 4, "tokens": [300]},
        {"query": "a", "event": "end", "seconds": 5},
    )
    assert shape(read(tmp_path, log)) == [(0.0, 2.0, [(2.0, 7)])]


def test_a_model_that_starts_before_retrieval_ends_nothing(tmp_path: Path) -> None:
    assert shape(read(tmp_path, "a,question,1\na,end,2\na,chunk:7,3\na,end,4\n")) == [(0.0, 3.0, [(2.0, 7)])]


def span(trace: str, name: str, start_s: float, end_s: float, **attributes: str) -> dict[str, Any]:
    listed = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    times = {"startTimeUnixNano": str(int(start_s * 1e9)), "endTimeUnixNano": str(int(end_s * 1e9))}
    return {"traceId": trace, "spanId": name, "name": name, **times, "attributes": listed}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": list(spans)}]}]}


KIND, TEXT = "openinference__span__kind", "retrieval__documents__0__document__content"


def test_spans_of_opentelemetry_are_one_value_or_a_value_in_each_line(tmp_path: Path) -> None:
    spans = [
        span("a", "find", 10.2, 10.5, **{KIND: "RETRIEVER", TEXT: "x" * 1_200}),
        span("a", "VectorStoreRetriever", 10.1, 11),
        span("a", "chat", 11.5, 14, **{KIND: "LLM"}),
        span("a", "chain", 10, 14),
        span("b", "retrieve", 12, 12.25, **{KIND: "RETRIEVER", TEXT: "x" * 320}),
    ]
    expected = [(0.0, 1.5, [(0.5, 300), (1.0, 250)]), (2.0, 0.25, [(0.25, 80)])]
    assert shape(read(tmp_path, json.dumps(otlp(*spans)))) == expected
    assert shape(read(tmp_path, json.dumps(otlp(*spans), indent=2))) == expected
    assert shape(read(tmp_path, lines(*(otlp(each) for each in spans)))) == expected


def test_retrieval_ends_with_the_last_retriever_or_as_the_model_starts_after_it(tmp_path: Path) -> None:
    spans = [
        span("a", "chain", 10, 14, **{KIND: "CHAIN"}),
        span("a", "rewrite", 10, 10.2, **{KIND: "LLM"}),
        span("a", "find", 10.2, 10.5, **{KIND: "RETRIEVER", TEXT: "x" * 1_200}),
        span("a", "log", 11, 13, **{KIND: "TOOL"}),
    ]
    assert shape(read(tmp_path, json.dumps(otlp(*spans)))) == [(0.0, 0.5, [(0.5, 300)])]
    for attributes in ({KIND: "LLM"}, {"gen_ai__operation__name": "chat"}):
        models = [span("a", "answer", 10.7, 11, **attributes), span("a", "check", 12, 13, **attributes)]
        assert shape(read(tmp_path, json.dumps(otlp(*spans, *models)))) == [(0.0, 0.7, [(0.5, 300)])]


def test_a_span_s_kind_is_trusted_before_its_name_and_the_innermost_retriever_has_the_documents(
    tmp_path: Path,
) -> None:
    spans = [
        span("a", "retrieval_chain", 10, 14, **{KIND: "CHAIN"}),
        span("a", "both", 10.1, 11, **{KIND: "RETRIEVER", TEXT: "x" * 1_200}),
        span("a", "step", 10.1, 10.6) | {"parentSpanId": "both"},
        span("a", "one", 10.1, 10.5, **{KIND: "RETRIEVER", TEXT: "x" * 80}) | {"parentSpanId": "step"},
    ]
    assert shape(read(tmp_path, json.dumps(otlp(*spans)))) == [(0.0, 1.0, [(0.5, 20)])]


def test_spans_may_have_empty_values_and_times_as_numbers(tmp_path: Path) -> None:
    times = {"startTimeUnixNano": 1_764_252_000_000_000_000, "endTimeUnixNano": 1_764_252_000_500_000_000}
    empty = [{"key": "user", "value": {}}, {"key": "session"}]
    value = otlp(span("a", "retrieve", 0, 0) | times | {"attributes": empty, "parentSpanId": None})
    value["resourceSpans"].append({"resource": {}})
    assert shape(read(tmp_path, json.dumps(value))) == [(0.0, 0.5, [(0.5, 250)])]


def test_a_trace_of_ours_is_read_as_it_is() -> None:
    path = TRACES / "search-python-docs.jsonl.gz"
    assert read_log(path, 250) == read_trace(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no query with chunks"),
        ("\n\n", "has no query with chunks"),
        ("query,event,seconds\n", "has no query with chunks"),
        ("a,question,1\n", "has no query with chunks"),
        ("a,b\n", "line 1: it is no event of a log"),
        ("a,chunk,1\na,chunk,x\n", "line 2: seconds"),
        ("a,chunk,1\na,sleep,2\n", "line 2: event"),
        ("a,chunk:0,1\n", "line 1: tokens"),
        ("a,chunk:many,1\n", "line 1: tokens"),
        ("a,chunk,nan\n", "line 1: seconds"),
        ("a,chunk,-1\n", "line 1: seconds"),
        ('a,"chunk,1\n', "line 1: it is no event of a log"),
        (",chunk,1\n", "line 1: query"),
        ("[1, 2]\n", "line 1"),
        ("{}\n", "line 1: query"),
        ('{"query": "a", "event": "chunks", "seconds": 1}\n{"query": \n', "line 2: it is no event of a log"),
        ('{"query": 1, "event": "chunks", "seconds": 1}\n', "line 1: query"),
        ('{"query": "a", "event": "chunks", "seconds": 1e999}\n', "line 1"),
        ('{"query": "a", "event": "chunks", "seconds": 1, "tokens": "many"}\n', "line 1: tokens"),
        ('{"query": "a", "event": "chunks", "seconds": 1, "tokens": [' + "1," * 20_000 + "1]}\n", "line 1: tokens"),
        ("{" + '"a":[' * 500 + "]" * 500 + "}\n", "line 1"),
        ('{"resourceSpans": 3}\n', "line 1: it is no event of a log"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}\n', "line 1: it is no event of a log"),
        (json.dumps(otlp(span("a", "retrieve", 1, 2) | {"endTimeUnixNano": "soon"})), "line 1: it is no event"),
        (json.dumps(otlp(span("a", "retrieve", 1, 2) | {"endTimeUnixNano": "9" * 400})), "line 1: it is no event"),
        (json.dumps(otlp(span("a", "retrieve", 1, 2) | {"attributes": 7})), "line 1: it is no event"),
        (json.dumps(otlp(span("a", "chat", 1, 2))), "has no query with chunks"),
        ('{"format":"streamrag-trace","version":9}\n', "is not a trace of streamrag"),
        (b"\x00\xff\xfe\x80", "line 1"),
    ],
)
def test_broken_and_hostile_logs_are_errors_that_name_the_line(
    tmp_path: Path, content: str | bytes, problem: str
) -> None:
    with pytest.raises(TraceError, match=problem) as raised:
        read(tmp_path, content)
    assert len(str(raised.value)) < 800


def test_a_usual_length_is_a_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="usual_tokens"):
        read_log(tmp_path / "none", 0)


def test_a_missing_or_damaged_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_log(tmp_path / "none", 250)
    with pytest.raises(TraceError, match="damaged"):
        read(tmp_path, b"\x1f\x8b\x08\x00" + b"\xff" * 50, "log.gz")
