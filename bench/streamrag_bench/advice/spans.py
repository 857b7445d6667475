"""OpenTelemetry's spans of an application, as events of queries: a trace is a query.

Names and values are those of OpenTelemetry's semantic conventions, OpenInference, OpenLLMetry and others. Spans are
untrusted: one that cannot be read is a `BrokenSpan`.
"""

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from streamrag_bench.advice.documents import document_sizes
from streamrag_bench.advice.events import ClockTime, LogLine, QueryId, Sizes

Kind = Literal["retrieval", "database", "rerank", "model", "other"]
"""Kinds of spans. A query of a general database is retrieval only where there is no other."""

CONTAINERS = (
    "resourceSpans", "resource_spans", "batches", "scopeSpans", "scope_spans", "instrumentationLibrarySpans",
    "instrumentation_library_spans", "spans", "trace",
)  # fmt: skip
KIND_ATTRIBUTES = (
    "openinference.span.kind", "gen_ai.operation.name", "llm.request.type", "langsmith.span.kind",
    "langfuse.observation.type", "mlflow.spanType", "gen_ai.span.kind", "traceloop.span.kind",
)  # fmt: skip
"""Attributes that say what a span is, the most exact first."""
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("retriever", "retrieval", "vector_db_retrieve", "retrieve", "search_vector_store"), "retrieval"),
    **dict.fromkeys(("reranker", "rerank"), "rerank"),
    **dict.fromkeys(("llm", "chat", "chat_model", "text_completion", "completion"), "model"),
    **dict.fromkeys(("generate_content", "generation", "llm_request"), "model"),
}
ANY_STEP = ("", "unknown", "span", "task", "execute_task")
"""Kinds of any step, also of retrieval: such a span is recognised by its other attributes, or by its name."""
READING = (
    "query", "search", "select", "with", "get", "find", "scroll", "recommend", "discover", "aggregate", "fetch", "knn",
    "hybrid", "ft",
)  # fmt: skip
OPERATIONS = ("db.operation.name", "db.operation", "db.query.summary", "db.statement", "db.query.text")
GENERAL_DATABASES = (
    "sql", "postgres", "mysql", "mariadb", "sqlite", "oracle", "mongo", "redis", "memcached", "cassandra", "dynamo",
    "cosmos", "db2", "couch", "hbase", "neo4j",
)  # fmt: skip
RETRIEVAL_NAME = re.compile(r"retriev|(vector|similarity)[ _.-]?search", re.IGNORECASE)
RERANK_NAME = re.compile(r"re_?rank", re.IGNORECASE)
MODEL_NAME = re.compile(r"(?<![a-z])(chat|llm|(text_)?completions?|generate(_content)?)(?![a-z])", re.IGNORECASE)
CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
NOT_A_MODEL = re.compile(r"prompt|template|parser|history|memory|message|embed", re.IGNORECASE)

MAX_LEVELS = 100  # of spans in one another, in which documents are looked for
MAX_SPAN_S = 1e8  # three years: the start or the end is missing
PARENT_IDS = ("parentSpanId", "parent_span_id", "parent_id", "parentId")
NUM_TRACE_ID_BYTES, NUM_SPAN_ID_BYTES = 16, 8


class BrokenSpan(BaseModel):
    """A span that is left out, and why."""

    reason: str


class TraceSpan(BaseModel, frozen=True):
    """A span with the lengths of its documents."""

    query: QueryId
    id: Annotated[str, Field(min_length=1)]
    parent_id: str
    kind: Kind
    is_named: bool
    """Whether only its name says what the span is, so that it may be a chain that contains it."""
    seconds: ClockTime
    end_s: ClockTime
    sizes: Sizes


def has_spans(value: Any) -> bool:
    """Whether a JSON value contains spans, or is one."""
    names = (*CONTAINERS, "traceId", "trace_id", "context")
    return isinstance(value, dict) and any(name in value for name in names)


def spans_in(value: Any, *, are_spans: bool = True) -> Iterator[TraceSpan | BrokenSpan]:
    """Yield the spans in OTLP's JSON, in lists of it, or in other JSON of spans."""
    if isinstance(value, list):
        for each in value:
            yield from spans_in(each, are_spans=are_spans)
    elif isinstance(value, dict) and any(name in value for name in CONTAINERS):
        for name in CONTAINERS:
            if value.get(name) is not None:
                yield from spans_in(value[name], are_spans=name == "spans")
    elif are_spans or not isinstance(value, dict):
        try:
            yield _span(value)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            yield BrokenSpan(reason=f"{error!r:.200}")


def protobuf_values(content: bytes) -> list[Any]:
    """Return the values of OTLP's protobuf as JSON: one, or as in the Collector's files several with their lengths.

    The list is empty if the content is something else.
    """
    from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    def messages() -> Iterator[bytes]:
        place = 0
        while content[:1] == b"\0" and place < len(content):
            end = place + 4 + int.from_bytes(content[place : place + 4], "big")
            yield content[place + 4 : end]
            place = end
        if not place:
            yield content

    def spans(message: bytes, *path: int) -> Iterator[Any]:
        """Yield the spans at the end of a path of fields, each decoded by itself; None for what is broken."""
        try:
            if not path:
                yield MessageToDict(Span.FromString(message))
            for field in UnknownFieldSet(Empty.FromString(message)) if path else ():
                if field.field_number == path[0] and isinstance(field.data, bytes):
                    yield from spans(field.data, *path[1:])
        except DecodeError:  # text that is no UTF-8, or a file that ends early, as a killed program's
            yield None

    path = (1, 2, 2)  # resource_spans, scope_spans, spans
    values = [span for message in messages() for span in spans(message, *path)]
    return [{"spans": values}] if any(values) else []


def lines_of(spans: Sequence[TraceSpan]) -> Iterator[LogLine]:
    """Yield the events of a trace; none without retrieval.

    The question is at the first span, and documents at the end of the innermost span that retrieves them. The end is
    at the first start of a model after all retrieval, or at the last end of this.
    """
    retrieval = [span for span in spans if span.kind == "retrieval"]
    retrieval = retrieval or [span for span in spans if span.kind == "database"]
    if not retrieval:
        return
    parents = {span.id: span.parent_id for span in spans}
    outer = _surrounding(retrieval, parents)
    inner = sorted((span for span in retrieval if span.id not in outer), key=lambda span: span.end_s)
    # A chain with such a name also contains the model, but retrieval that is known as such lasts as long as its span.
    known = [span for span in retrieval if not span.is_named]
    end_s = max(span.end_s for span in (*inner, *known, *(span for span in spans if span.kind == "rerank")))
    query = retrieval[0].query
    yield LogLine(query=query, event="question", seconds=min(span.seconds for span in spans))
    for span, sizes in zip(inner, _sizes(inner, outer, parents), strict=True):
        yield LogLine(query=query, event="chunks", seconds=span.end_s, tokens=sizes)
    models = [span for span in spans if span.kind == "model"]
    surrounding = _surrounding(models, parents)
    starts = (span.seconds for span in models if span.id not in surrounding and span.seconds >= end_s)
    yield LogLine(query=query, event="end", seconds=min(starts, default=end_s))


def _surrounding(spans: Sequence[TraceSpan], parents: Mapping[str, str]) -> dict[str, TraceSpan]:
    """Return those of the spans that have another of them somewhere inside."""
    by_id = {span.id: span for span in spans}
    seen: set[str] = set()
    for span in spans:
        place = span.parent_id
        while place in parents and place not in seen:  # every span is visited once, also in a circle
            seen.add(place)
            place = parents[place]
    return {id: span for id, span in by_id.items() if id in seen}


def _sizes(inner: list[TraceSpan], outer: Mapping[str, TraceSpan], parents: Mapping[str, str]) -> Iterator[Sizes]:
    """Yield the sizes of each span, in this order; those without share the documents of the span around them."""
    around = [_documented(span, outer, parents) for span in inner]
    num_sharing = Counter(span.id for span in around if span)
    num_done: Counter[str] = Counter()
    for span, whole in zip(inner, around, strict=True):
        if whole is None or whole.sizes is None:
            yield span.sizes
            continue
        begin, end = (len(whole.sizes) * (num_done[whole.id] + each) // num_sharing[whole.id] for each in (0, 1))
        num_done[whole.id] += 1
        yield whole.sizes[begin:end]


def _documented(span: TraceSpan, outer: Mapping[str, TraceSpan], parents: Mapping[str, str]) -> TraceSpan | None:
    """Return the innermost span around one without documents that has some."""
    place = span.parent_id
    for _ in range(MAX_LEVELS if span.sizes is None else 0):
        if place in outer and outer[place].sizes is not None:
            return outer[place]
        place = parents.get(place, "")
    return None


def _span(value: Any) -> TraceSpan:
    """Return a span from JSON; raise an error of its conversion, or ValidationError."""
    context = value.get("context") or {}  # as the SDKs' console exporters write it
    attributes = _attributes(value["attributes"]) if "attributes" in value else {}
    kind, is_named = _kind(attributes, str(value.get("name") or ""))
    start_s, end_s = (_seconds(value, name) for name in ("start", "end"))
    if not start_s <= end_s <= start_s + MAX_SPAN_S:
        raise ValueError(f"it lasts from {start_s:g} s to {end_s:g} s")
    return TraceSpan(
        query=_id(_first({**context, **value}, "traceId", "trace_id"), NUM_TRACE_ID_BYTES),
        id=_id(_first({**context, **value}, "spanId", "span_id"), NUM_SPAN_ID_BYTES),
        parent_id=_id(
            _first(value, "parentSpanId", "parent_span_id", "parent_id", "parentId") or "", NUM_SPAN_ID_BYTES
        ),
        kind=kind,
        is_named=is_named,
        seconds=start_s,
        end_s=end_s,
        sizes=document_sizes(attributes, value.get("events") or ()) if kind in ("retrieval", "database") else None,
    )


def _kind(attributes: Mapping[str, Any], name: str) -> tuple[Kind, bool]:
    """Return what a span is, and whether only its name says so."""
    for attribute in KIND_ATTRIBUTES:
        value = str(attributes.get(attribute) or "").strip('"').lower()
        if value not in ANY_STEP and (attribute, value) != ("traceloop.span.kind", "tool"):
            return KINDS.get(value, "other"), False
    if system := str(attributes.get("db.system.name") or attributes.get("db.system") or "").lower():
        operation = next((str(attributes[each]) for each in OPERATIONS if attributes.get(each)), "")
        words = re.findall("[a-z]+", operation.lower())[:1] or re.findall("[a-z]+", name.lower())
        if not any(word.startswith(READING) for word in words):
            return "other", False
        return ("database" if any(each in system for each in GENERAL_DATABASES) else "retrieval"), False
    if RERANK_NAME.search(name):
        return "rerank", True
    if RETRIEVAL_NAME.search(name):
        return "retrieval", True
    spaced = CAMEL_CASE.sub(" ", name)
    return ("model" if MODEL_NAME.search(spaced) and not NOT_A_MODEL.search(spaced) else "other"), True


def _attributes(values: Any) -> dict[str, Any]:
    """Return attributes by name, from OTLP's list or from an object."""
    if isinstance(values, Mapping):
        return dict(values)
    return {each["key"]: _plain(each.get("value") or {}) for each in values}


def _plain(value: Any) -> Any:
    """Return a value of OTLP's JSON as plain JSON. One of no known type is its text."""
    kind = next(iter(value), "")
    content = value.get(kind)
    match kind.replace("_", "").lower():
        case "arrayvalue":
            return [_plain(each) for each in content.get("values", ())]
        case "kvlistvalue":
            return _attributes(content.get("values", ()))
        case "intvalue" if content is not None:
            return int(content)
        case _:
            return content


def _first(value: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these fields that is there and not null; None without any."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def _seconds(span: Mapping[str, Any], which: str) -> float:
    """Return the time of the start or end in seconds, on any clock. Raises TypeError or ValueError if it is none."""
    exact = _first(span, f"{which}TimeUnixNano", f"{which}_time_unix_nano")
    value: Any = _first(span, f"{which}Time", f"{which}_time") if exact is None else exact
    match value:
        case {"seconds": seconds} | {"seconds": seconds, "nanos": _}:  # protobuf's Timestamp
            return int(seconds) + int(value.get("nanos", 0)) / 1e9
        case [seconds, nanos]:  # JavaScript's
            return int(seconds) + int(nanos) / 1e9
        case str() if re.search(r"\d-\d\d-\d\d", value):
            time = datetime.fromisoformat(value)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        case None if which == "start":
            return 0.0  # which protobuf leaves out
        case bool() | None:
            raise ValueError(f"it has no {which} time")
        case str() if exact is not None and value.isdecimal():
            return int(value) / 1e9
    number = float(value)
    if exact is not None and (number.is_integer() or number > 1e12):
        return number / 1e9
    return number / next((unit for unit in (1e9, 1e6, 1e3) if number > 1e8 * unit), 1.0)


def _id(value: Any, num_bytes: int) -> str:
    """Return an id in lower-case hexadecimal, from hexadecimal or base64; one of another form stays as it is.

    An id of zeros is none. Raises AttributeError if `value` is no text.
    """
    text: str = value.removeprefix("0x")
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * num_bytes}}}", text):
        with suppress(ValueError):
            padded = text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4)
            found = base64.b64decode(padded, validate=True)
            text = {num_bytes: found.hex(), 2 * num_bytes: found.decode(errors="replace")}.get(len(found), text)
    return text.lower().strip("0") and text.lower() if len(text) == 2 * num_bytes else text
