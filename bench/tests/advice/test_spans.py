"""Spans as OpenLLMetry, OpenInference and others write them, in every encoding, also broken ones."""

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrag.errors import TraceError
from streamrag.trace.values import Trace, TracedAppend
from streamrag_bench.advice.logs import read_log

TRACE = "5b8efff798038103d269b633813fc60c"
Spans = list[dict[str, Any]]


def read(tmp_path: Path, content: bytes | str) -> Trace:
    path = tmp_path / "log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_log(path, 250)


def shape(trace: Trace) -> list[tuple[float, list[tuple[float, int]]]]:
    """The end of each query, and the time and length of its chunks."""
    return [
        (
            round(query.end_s, 6),
            [(round(each.at_s, 6), each.chunk.num_tokens) for each in query.events if isinstance(each, TracedAppend)],
        )
        for query in trace.queries
    ]


def span(number: int, parent: int, name: str, start_s: float, end_s: float, **attributes: Any) -> dict[str, Any]:
    """A span in OTLP's JSON; in the names of attributes, __ stands for a dot."""
    kinds = {str: "stringValue", int: "intValue", bool: "boolValue"}
    listed = [
        {"key": key.replace("__", "."), "value": {kinds[type(value)]: value}} for key, value in attributes.items()
    ]
    return {
        "traceId": TRACE, "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}" if parent else "",
        "name": name, "kind": 1, "startTimeUnixNano": str(round(start_s * 1e9)),
        "endTimeUnixNano": str(round(end_s * 1e9)), "attributes": listed,
    }  # fmt: skip


def export(spans: Spans) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}


def read_spans(tmp_path: Path, *spans: dict[str, Any]) -> list[tuple[float, list[tuple[float, int]]]]:
    return shape(read(tmp_path, json.dumps(export(list(spans)))))


RIGHT = [(0.5, [(0.4, 250)])]


def retrieval_qa(kinds: bool, **more: Any) -> Spans:
    """The chain of the issue, with or without what OpenLLMetry says of the kinds of its steps."""
    workflow, task = ({"traceloop__span__kind": kind} if kinds else {} for kind in ("workflow", "task"))
    return [
        span(1, 0, "RetrievalQA.workflow", 0, 3, **workflow),
        span(2, 1, "VectorStoreRetriever.task", 0, 0.4, **task, **more),
        span(3, 1, "StuffDocumentsChain.task", 0.42, 3, **task),
        span(4, 3, "LLMChain.task", 0.43, 3, **task),
        span(5, 4, "ChatPromptTemplate.task", 0.44, 0.45, **task),
        span(6, 4, "ChatOpenAI.chat", 0.5, 3, **({"llm__request__type": "chat"} if kinds else {})),
    ]


@pytest.mark.parametrize("kinds", [True, False])
def test_the_innermost_span_that_fits_wins(tmp_path: Path, kinds: bool) -> None:
    assert read_spans(tmp_path, *retrieval_qa(kinds)) == RIGHT
    assert read_spans(tmp_path, *reversed(retrieval_qa(kinds))) == RIGHT
    first, second, *_, last = retrieval_qa(kinds)
    assert read_spans(tmp_path, first, second, last | {"parentSpanId": first["spanId"]}) == RIGHT


@pytest.mark.parametrize(
    ("attributes", "is_retrieval"),
    [
        ({"openinference__span__kind": "RETRIEVER"}, True),
        ({"gen_ai__operation__name": "retrieval"}, True),
        ({"gen_ai__operation__name": "vector_db_retrieve", "traceloop__span__kind": "task"}, True),
        ({"langsmith__span__kind": "retriever"}, True),
        ({"langfuse__observation__type": "retriever"}, True),
        ({"mlflow__spanType": '"RETRIEVER"'}, True),
        ({"db__system": "chroma", "db__operation": "query"}, True),
        ({"db__system": "chroma", "db__operation": "_query"}, True),
        ({"db__system__name": "milvus", "db__operation__name": "search"}, True),
        ({"db__system": "postgresql", "db__statement": "SELECT text FROM docs ORDER BY embedding <-> $1"}, True),
        ({"db__system": "chroma", "db__operation": "add"}, False),
        ({"db__system": "postgresql", "db__statement": "INSERT INTO log SELECT 1"}, False),
        ({"db__system": "postgresql"}, False),
        ({"gen_ai__operation__name": "embeddings"}, False),
        ({"gen_ai__operation__name": "execute_tool"}, False),
        ({"gen_ai__operation__name": "invoke_agent"}, False),
        ({"openinference__span__kind": "TOOL"}, False),
        ({"openinference__span__kind": "CHAIN", "db__system": "chroma", "db__operation": "query"}, False),
        ({"llm__request__type": "embedding"}, False),
        ({"traceloop__span__kind": "workflow"}, False),
        ({"traceloop__span__kind": "agent"}, False),
    ],
)
def test_retrieval_is_recognised_by_attributes_whatever_the_name(
    tmp_path: Path, attributes: dict[str, str], is_retrieval: bool
) -> None:
    name = "connect" if is_retrieval or "db__system" in attributes else "my_retriever"
    spans = [span(1, 0, "root", 0, 3), span(2, 1, name, 0.1, 0.4, **attributes), span(3, 1, "openai.chat", 0.5, 3)]
    if is_retrieval:
        assert read_spans(tmp_path, *spans) == RIGHT
    else:
        with pytest.raises(TraceError, match="no query with chunks"):
            read_spans(tmp_path, *spans)


@pytest.mark.parametrize(
    ("name", "attributes", "is_model"),
    [
        ("step", {"openinference__span__kind": "LLM"}, True),
        ("step", {"gen_ai__operation__name": "chat"}, True),
        ("step", {"gen_ai__operation__name": "text_completion"}, True),
        ("step", {"gen_ai__operation__name": "generate_content"}, True),
        ("step", {"llm__request__type": "completion"}, True),
        ("step", {"langfuse__observation__type": "generation"}, True),
        ("chat gpt-4o", {}, True),
        ("ChatOpenAI", {}, True),
        ("openai.completion", {}, True),
        ("ollama.generate", {}, True),
        ("AzureChatOpenAI.chat", {"traceloop__span__kind": "task"}, True),
        ("ChatPromptTemplate.task", {"traceloop__span__kind": "task"}, False),
        ("chat_history.load", {}, False),
        ("chat gpt-4o", {"gen_ai__operation__name": "embeddings"}, False),
        ("chat", {"openinference__span__kind": "CHAIN"}, False),
        ("chatter", {}, False),
    ],
)
def test_models_are_recognised_by_attributes_or_else_by_their_name(
    tmp_path: Path, name: str, attributes: dict[str, str], is_model: bool
) -> None:
    spans = [span(1, 0, "find", 0, 0.4, gen_ai__operation__name="retrieval"), span(2, 0, name, 0.5, 3, **attributes)]
    assert read_spans(tmp_path, *spans) == [(0.5 if is_model else 0.4, [(0.4, 250)])]


def test_a_vector_database_in_a_retriever_is_the_innermost_and_has_the_documents_of_it(tmp_path: Path) -> None:
    documents = json.dumps({"documents": [{"page_content": "x" * 400}, {"page_content": "x" * 80}], "count": 2})
    chain = retrieval_qa(True, traceloop__entity__output=documents)
    query = span(7, 2, "chroma.query", 0.1, 0.38, db__system="chroma", db__operation="query")
    segment = span(8, 7, "chroma.query.segment._query", 0.2, 0.37, db__system="chroma", db__operation="_query")
    assert read_spans(tmp_path, *chain, query) == [(0.5, [(0.38, 100), (0.38, 20)])]
    assert read_spans(tmp_path, *chain, query, segment) == [(0.5, [(0.37, 100), (0.37, 20)])]
    other = span(9, 2, "chroma.query", 0.1, 0.2, db__system="chroma", db__operation="query")
    assert read_spans(tmp_path, *chain, query, other) == [(0.5, [(0.2, 100), (0.38, 20)])]


def test_a_general_database_is_retrieval_only_where_there_is_no_other(tmp_path: Path) -> None:
    user = span(7, 1, "SELECT users", 0, 0.1, db__system="postgresql", db__statement="SELECT * FROM users")
    assert read_spans(tmp_path, *retrieval_qa(True), user) == RIGHT
    assert read_spans(tmp_path, user, span(8, 0, "openai.chat", 0.2, 1)) == [(0.2, [(0.1, 250)])]


def test_a_reranker_brings_no_chunks_but_ends_retrieval(tmp_path: Path) -> None:
    rerank = span(7, 1, "step", 0.4, 0.45, openinference__span__kind="RERANKER")
    assert read_spans(tmp_path, *retrieval_qa(True)[:2], rerank) == [(0.45, [(0.4, 250)])]
    assert read_spans(tmp_path, *retrieval_qa(True), rerank) == RIGHT
    with pytest.raises(TraceError, match="no query with chunks"):
        read_spans(tmp_path, rerank)


def test_a_retriever_around_others_ends_retrieval_at_its_own_end(tmp_path: Path) -> None:
    kind = {"openinference__span__kind": "RETRIEVER"}
    spans = [
        span(1, 0, "EnsembleRetriever", 0, 1.1, **kind),
        span(2, 1, "BM25Retriever", 0, 0.2, **kind, retrieval__documents__0__document__content="x" * 40),
        span(3, 1, "VectorStoreRetriever", 0, 1.0, **kind, retrieval__documents__0__document__content="x" * 80),
    ]
    assert read_spans(tmp_path, *spans) == [(1.1, [(0.2, 10), (1.0, 20)])]


def documents(*texts: str) -> Spans:
    return [{"page_content": text, "metadata": {"source": "a"}} for text in texts]


LONG, SHORT = "x" * 400, "x" * 80
SERIALISED = [
    {"lc": 1, "type": "constructor", "id": ["Document"], "kwargs": {"page_content": text}} for text in (LONG, SHORT)
]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"traceloop__entity__output": json.dumps({"documents": documents(LONG, SHORT), "count": 2})}, [100, 20]),
        ({"gen_ai__task__output": json.dumps({"documents": documents(LONG, SHORT)})}, [100, 20]),
        ({"traceloop__entity__output": json.dumps({"documents": [LONG, SHORT]})}, [100, 20]),
        ({"traceloop__entity__output": json.dumps(documents(LONG, SHORT))}, [100, 20]),
        ({"traceloop__entity__output": json.dumps({"outputs": SERIALISED, "kwargs": {"tags": []}})}, [100, 20]),
        ({"traceloop__entity__output": json.dumps([{"node": {"text": LONG}, "score": 1}, {"node": {}}])}, [100, 250]),
        ({"traceloop__entity__output": json.dumps({"documents": [[LONG], [SHORT]]})}, [100, 20]),
        ({"traceloop__entity__output": json.dumps({"count": 3})}, [250, 250, 250]),
        ({"traceloop__entity__output": json.dumps({"documents": []})}, None),
        ({"traceloop__entity__output": "[Document(page_content='x')]"}, [250]),
        ({"output__value": json.dumps({"documents": documents(LONG)})}, [100]),
        ({"gen_ai__retrieval__documents": json.dumps([{"id": "a", "score": 0.5}, {"id": "b"}])}, [250, 250]),
        ({"retrieval__documents__0__document__content": LONG, "retrieval__documents__0__document__id": "a",
          "retrieval__documents__1__document__id": "b", "retrieval__documents__1__document__score": 1}, [100, 250]),
        ({f"retrieval__documents__{n}__document__content": "x" * 4 * (n + 1) for n in (0, 10, 2)}, [1, 3, 11]),
        ({"db__response__returned_rows": 3}, [250, 250, 250]),
        ({}, [250]),
    ],
)  # fmt: skip
def test_the_number_and_lengths_of_documents_are_read(
    tmp_path: Path, attributes: dict[str, Any], expected: list[int] | None
) -> None:
    spans = [span(1, 0, "find", 0, 0.4, gen_ai__operation__name="retrieval", **attributes)]
    if expected is None:
        with pytest.raises(TraceError, match="no query with chunks"):
            read_spans(tmp_path, *spans)
    else:
        assert read_spans(tmp_path, *spans) == [(0.4, [(0.4, size) for size in expected])]


def test_events_of_a_vector_database_are_documents(tmp_path: Path) -> None:
    query = span(1, 0, "chroma.query", 0, 0.4, db__system="chroma", db__operation="query")
    query["events"] = [{"name": "db.query.embeddings"}, {"name": "db.query.result"}, {"name": "db.query.result"}]
    assert read_spans(tmp_path, query) == [(0.4, [(0.4, 250), (0.4, 250)])]


# ---------------------------------------------------------------------------------------------------------- encodings


def renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [renamed(each, rename) for each in value]
    if isinstance(value, dict):
        return {rename(name): renamed(each, rename) for name, each in value.items()}
    return value


def snake_case(name: str) -> str:
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in name)


def with_fields(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Spans], bytes]:
    return lambda spans: json.dumps(export([change(dict(each)) for each in spans])).encode()


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name not in names}


def timed(name: str, time: Callable[[int], Any]) -> Callable[[Spans], bytes]:
    """The spans with other times, under `start...` and `end...`."""

    def change(value: dict[str, Any]) -> dict[str, Any]:
        others = without(value, "startTimeUnixNano", "endTimeUnixNano")
        times = {f"{each}{name}": time(int(value[f"{each}TimeUnixNano"])) for each in ("start", "end")}
        return others | times

    return with_fields(change)


def in_base64(value: dict[str, Any]) -> dict[str, Any]:
    ids = ("traceId", "spanId", "parentSpanId")
    return value | {name: base64.b64encode(bytes.fromhex(value[name])).decode() for name in ids}


def protobuf(spans: Spans) -> bytes:
    from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    message = TracesData()
    ParseDict(export([in_base64(each) for each in spans]), message)
    return bytes(message.SerializeToString())


def console(spans: Spans) -> bytes:
    """What Python's ConsoleSpanExporter prints: one object after the other, on many lines."""
    printed = []
    for each in spans:
        times = {
            f"{name}_time": f"2026-11-29T10:00:{int(each[f'{name}TimeUnixNano']) / 1e9:09.6f}Z"
            for name in ("start", "end")
        }
        printed.append(json.dumps({
            "name": each["name"],
            "context": {"trace_id": "0x" + each["traceId"], "span_id": "0x" + each["spanId"], "trace_state": "[]"},
            "kind": "SpanKind.INTERNAL", "parent_id": f"0x{each['parentSpanId']}" if each["parentSpanId"] else None,
            **times, "status": {"status_code": "UNSET"}, "events": [], "links": [],
            "attributes": {item["key"]: next(iter(item["value"].values())) for item in each["attributes"]},
        }, indent=4))  # fmt: skip
    return "\n".join(printed).encode()


EPOCH = 1_764_252_000

ENCODINGS: dict[str, Callable[[Spans], bytes]] = {
    "one value": lambda spans: json.dumps(export(spans)).encode(),
    "on many lines": lambda spans: json.dumps(export(spans), indent=2).encode(),
    "many lines without indent": lambda spans: json.dumps(export(spans), indent=0).encode(),
    "a span in each line": lambda spans: b"\n".join(json.dumps(export([each])).encode() for each in spans),
    "a list": lambda spans: json.dumps([export([each]) for each in spans]).encode(),
    "a byte order mark": lambda spans: b"\xef\xbb\xbf" + json.dumps(export(spans)).encode(),
    "UTF-16": lambda spans: json.dumps(export(spans)).encode("utf-16"),
    "snake case": lambda spans: json.dumps(renamed(export(spans), snake_case)).encode(),
    "base64": with_fields(in_base64),
    "base64 and snake case": lambda spans: json.dumps(
        renamed(export([in_base64(each) for each in spans]), snake_case)
    ).encode(),
    "upper case": with_fields(lambda value: value | {"parentSpanId": value["parentSpanId"].upper()}),
    "no parent": with_fields(lambda value: value if value["parentSpanId"] else value | {"parentSpanId": "0" * 16}),
    "integers": with_fields(
        lambda value: value | {f"{name}TimeUnixNano": int(value[f"{name}TimeUnixNano"]) for name in ("start", "end")}
    ),
    "nanoseconds": timed("TimeUnixNano", lambda ns: str(EPOCH * 10**9 + ns)),
    "integer nanoseconds": timed("TimeUnixNano", lambda ns: EPOCH * 10**9 + ns),
    "snake case nanoseconds": timed("_time_unix_nano", lambda ns: EPOCH * 10**9 + ns),
    "fractions of nanoseconds": timed("TimeUnixNano", lambda ns: float(EPOCH * 10**9 + ns)),
    "seconds": timed("Time", lambda ns: EPOCH + ns / 1e9),
    "seconds as text": timed("_time", lambda ns: str(EPOCH + ns / 1e9)),
    "seconds in the field of nanoseconds": timed("TimeUnixNano", lambda ns: EPOCH + 0.25 + ns / 1e9),
    "milliseconds": timed("Time", lambda ns: EPOCH * 1000 + ns / 1e6),
    "a timestamp": timed("Time", lambda ns: {"seconds": str(EPOCH + ns // 10**9), "nanos": ns % 10**9}),
    "a pair": timed("Time", lambda ns: [EPOCH + ns // 10**9, ns % 10**9]),
    "ISO 8601": timed("_time", lambda ns: f"2026-11-29T10:00:{ns / 1e9:09.6f}Z"),
    "older fields": lambda spans: json.dumps(
        {"resourceSpans": [{"instrumentationLibrarySpans": [{"spans": spans}]}]}
    ).encode(),
    "batches": lambda spans: json.dumps({"batches": [{"resource": {}, "scopeSpans": [{"spans": spans}]}]}).encode(),
    "the console": console,
    "spans alone": lambda spans: b"\n".join(json.dumps(each).encode() for each in spans),
    "protobuf": protobuf,
    "protobuf with lengths": lambda spans: b"".join(
        len(message).to_bytes(4, "big") + message for message in (protobuf([each]) for each in spans)
    ),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_spans_are_read_from_every_encoding(tmp_path: Path, encoding: str) -> None:
    trace = read(tmp_path, ENCODINGS[encoding](retrieval_qa(True)))
    assert [(round(end_s, 3), [(round(at_s, 3), size) for at_s, size in chunks]) for end_s, chunks in shape(trace)] == (
        RIGHT
    )
    assert "num_broken_spans" not in trace.provenance


# -------------------------------------------------------------------------------------------------------- broken spans


BROKEN: dict[str, Any] = {
    "no end": without(span(9, 1, "VectorStoreRetriever", 0, 9), "endTimeUnixNano"),
    "an empty end": span(9, 1, "VectorStoreRetriever", 0, 9) | {"endTimeUnixNano": ""},
    "an end of zero": span(9, 1, "VectorStoreRetriever", 1, 9) | {"endTimeUnixNano": "0"},
    "null as end": span(9, 1, "VectorStoreRetriever", 0, 9) | {"endTimeUnixNano": None},
    "an end that is text": span(9, 1, "VectorStoreRetriever", 0, 9) | {"endTimeUnixNano": "soon"},
    "an end that is infinite": span(9, 1, "VectorStoreRetriever", 0, 9) | {"endTimeUnixNano": math.inf},
    "an end without end": span(9, 1, "VectorStoreRetriever", 0, 9) | {"endTimeUnixNano": "9" * 400},
    "no start": without(span(9, 1, "VectorStoreRetriever", 0, EPOCH), "startTimeUnixNano"),
    "attributes of null": span(9, 1, "VectorStoreRetriever", 0, 9) | {"attributes": None},
    "attributes that are text": span(9, 1, "VectorStoreRetriever", 0, 9) | {"attributes": "eJwDAAAAAAE="},
    "attributes of null values": span(9, 1, "VectorStoreRetriever", 0, 9) | {"attributes": [None]},
    "no trace": without(span(9, 1, "VectorStoreRetriever", 0, 9), "traceId"),
    "no id": without(span(9, 1, "VectorStoreRetriever", 0, 9), "spanId"),
    "bytes as id": span(9, 1, "VectorStoreRetriever", 0, 9) | {"spanId": [1, 2, 3]},
    "null": None,
    "text": "span",
    "too many documents": span(
        9, 1, "find", 0, 9, gen_ai__operation__name="retrieval", traceloop__entity__output=json.dumps(["x"] * 20_000)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_span_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    for spans in ([BROKEN[name], *retrieval_qa(True)], [*retrieval_qa(True), BROKEN[name], BROKEN[name]]):
        trace = read(tmp_path, json.dumps(export(spans)))
        assert shape(trace) == RIGHT
        assert trace.provenance["num_broken_spans"] == spans.count(BROKEN[name])
        assert "line 1: it is no event" in trace.provenance["first_broken_span"]


def test_a_broken_line_among_spans_is_left_out_too(tmp_path: Path) -> None:
    lines = [json.dumps(export([each])) for each in retrieval_qa(True)]
    trace = read(tmp_path, "\n".join([*lines, "{}", lines[0][:100]]))
    assert shape(trace) == RIGHT
    assert trace.provenance["num_broken_spans"] == 2


@pytest.mark.parametrize("encoding", ["a span in each line", "the console"])
@pytest.mark.parametrize("before", ['ngValue": "x"}}]}]}]}]}', '{"resourceSpans": [{"scopeSp', "started"])
def test_text_around_values_is_left_out_and_the_values_are_read(tmp_path: Path, encoding: str, before: str) -> None:
    content = ENCODINGS[encoding](retrieval_qa(True)).decode().replace("}\n{", "}\nan answer\n{", 1)
    trace = read(tmp_path, f"{before}\n{content}")
    assert shape(trace) == RIGHT
    assert trace.provenance["num_broken_spans"] == 2
    assert "line 1: it is no event" in trace.provenance["first_broken_span"]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "18446744073709551615"])
def test_a_number_that_is_not_needed_may_be_any(tmp_path: Path, value: str) -> None:
    content = json.dumps(export([*retrieval_qa(True, score=123456789)])).replace("123456789", value)
    trace = read(tmp_path, content)
    assert (shape(trace), trace.provenance.get("num_broken_spans")) == (RIGHT, None)


def test_null_in_place_of_lists_and_resources_is_left_out(tmp_path: Path) -> None:
    value = export(retrieval_qa(True))
    value["resourceSpans"] += [None, {"scopeSpans": None}, {"scopeSpans": [None, {"spans": None}]}]
    trace = read(tmp_path, json.dumps(value))
    assert (shape(trace), trace.provenance["num_broken_spans"]) == (RIGHT, 2)


def test_a_broken_span_in_protobuf_is_left_out_alone(tmp_path: Path) -> None:
    spans = retrieval_qa(True)
    messages = [protobuf([each]) for each in [*spans[:1], span(9, 1, "Retriever", 0, 9), *spans[1:]]]
    messages[1] = messages[1].replace(b"Retriever", b"Retri\xffver")
    torn = len(messages[0]).to_bytes(4, "big") + messages[0][:-5]
    content = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    for whole, num_broken in ((content, 1), (content + torn, 2), (b"".join(messages), 1)):
        trace = read(tmp_path, whole)
        assert (shape(trace), trace.provenance["num_broken_spans"]) == (RIGHT, num_broken)


def test_spans_that_were_exported_twice_count_once(tmp_path: Path) -> None:
    assert read_spans(tmp_path, *retrieval_qa(True), *retrieval_qa(True)) == RIGHT


def test_spans_in_a_circle_and_a_long_chain_of_them_are_read(tmp_path: Path) -> None:
    kind = {"openinference__span__kind": "RETRIEVER"}
    circle = [span(1, 2, "a", 0, 0.4, **kind), span(2, 1, "b", 0, 0.4, **kind)]
    assert read_spans(tmp_path, *circle, span(3, 0, "c", 0, 0.4, **kind)) == [(0.4, [(0.4, 250)])]
    chain = [span(number, number - 1, "a", 0, 0.4, **kind) for number in range(1, 5_000)]
    assert read_spans(tmp_path, *chain) == [(0.4, [(0.4, 250)])]
