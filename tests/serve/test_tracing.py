"""Spans of queries, and whose children they are."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from streamrag import Append, Chunk, CrawlOptions, SourceError, WebSource, search_engine
from streamrag.serve import Service
from streamrag.serve.observe.observer import ServedQuery
from streamrag.serve.observe.tracing import MAX_EVENTS, Tracing, context_of, to_otlp
from streamrag.serve.open_queries import Caller
from streamrag.telemetry import ChunkArrived
from streamrag.testing import ScriptedBackend, Step
from streamrag.trace_context import trace_headers
from tests.serve.serving import CHUNKS, PARIS, serving
from tests.serve.test_metrics import RecordingBackend

SECRET = "Where is the Sapphire treasure?"
BODY = {"messages": [{"role": "user", "content": SECRET}]}
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracing(spans: InMemorySpanExporter, **options: Any) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracing(provider, model="scripted", **options)


def by_name(spans: InMemorySpanExporter) -> Mapping[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def test_a_query_is_a_span_with_children_below_the_callers(spans: InMemorySpanExporter) -> None:
    async with serving(CHUNKS, backend=RecordingBackend(), observers=[tracing(spans, data_source="web")]) as served:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        await served.http.post("/v1/chat/completions", json=BODY, headers=headers)
    found = by_name(spans)
    query, retrieval, prefill = found["chat scripted"], found["retrieval"], found["prefill"]
    assert query.kind == SpanKind.SERVER
    assert query.parent is not None
    assert f"{query.parent.trace_id:032x}" == f"{query.context.trace_id:032x}" == TRACE_ID
    assert f"{query.parent.span_id:016x}" == SPAN_ID
    assert query.context.trace_state.get("vendor") == "1"
    for child in (retrieval, prefill, found["decode"]):
        assert child.parent is not None
        assert child.parent.span_id == query.context.span_id
    assert found["preemption"].parent is not None
    assert found["preemption"].parent.span_id == prefill.context.span_id
    assert query.start_time <= retrieval.start_time <= retrieval.end_time <= query.end_time
    assert found["decode"].end_time <= query.end_time
    (answer,) = served.watcher.answers
    assert answer is not None
    assert answer.record is not None
    for name, expected in {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "streamrag",
        "gen_ai.request.model": "scripted",
        "gen_ai.usage.input_tokens": answer.num_prompt_tokens,
        "gen_ai.usage.output_tokens": len(answer.token_ids),
        "gen_ai.usage.cache_read.input_tokens": answer.record.num_from_cache,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": answer.timings.ttft_s,
        "streamrag.outcome": "answered",
    }.items():
        assert query.attributes[name] == expected, name
    assert retrieval.attributes["gen_ai.operation.name"] == "retrieval"
    assert retrieval.attributes["gen_ai.data_source.id"] == "web"
    chunks = [event for event in retrieval.events if event.name == "streamrag.chunk"]
    assert len(chunks) == sum(isinstance(event, ChunkArrived) for event in served.watcher.events) == 2
    # The engine's clock is the process's: 0.1 s after the machine started is long before the query.
    assert prefill.end_time - prefill.start_time == pytest.approx(0.2e9, abs=1e6)
    lost = [span for span in spans.get_finished_spans() if span.name == "preemption"]
    assert [span.attributes["streamrag.fate"] for span in lost] == ["swap", "recompute"]
    assert lost[0].end_time - lost[0].start_time == pytest.approx(0.1e9, abs=1e6)


async def test_texts_are_in_no_span_unless_that_is_switched_on(spans: InMemorySpanExporter) -> None:
    for with_text in (False, True):
        steps = [*CHUNKS, SourceError(f"nobody answers {SECRET}")] if not with_text else CHUNKS
        async with serving(steps, observers=[tracing(spans, with_text=with_text)]) as served:
            await served.http.post("/v1/chat/completions", json=BODY)
        everything = "".join(span.to_json() for span in spans.get_finished_spans())
        for text in (SECRET, PARIS.text, PARIS.uri):
            assert (text in everything) == with_text, text
        spans.clear()


async def test_a_failed_query_has_an_error_span_and_an_abandoned_one_does_not(spans: InMemorySpanExporter) -> None:
    waits = anyio.Event()

    def steps(query: str) -> Iterator[Step]:
        yield Append(PARIS)
        yield SourceError("the site is gone") if "fail" in query else waits

    async with serving(steps, observers=[tracing(spans)]) as served:
        body = {"messages": [{"role": "user", "content": "fail"}]}
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 502
        failed = by_name(spans)["chat scripted"]
        assert failed.status.status_code == StatusCode.ERROR
        assert failed.status.description == "SourceError: the site is gone"
        assert failed.attributes["error.type"] == "SourceError"
        spans.clear()
        served.watcher.has_begun.clear()
        served.watcher.has_ended.clear()
        asking = asyncio.create_task(served.http.post("/v1/chat/completions", json=BODY))
        await served.watcher.has_begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await served.watcher.has_ended.wait()
        await served.service.aclose()
    found = by_name(spans)
    assert found["chat scripted"].status.status_code == StatusCode.UNSET
    assert found["chat scripted"].attributes["streamrag.outcome"] == "left"
    assert found["retrieval"].end_time <= found["chat scripted"].end_time
    assert "decode" not in found


async def test_a_source_sees_the_querys_span_and_queries_do_not_mix(spans: InMemorySpanExporter) -> None:
    seen: dict[str, int] = {}

    def steps(query: str) -> Iterator[Step]:
        yield Append(PARIS)
        seen[query] = get_current_span().get_span_context().span_id

    async with serving(steps, observers=[tracing(spans, with_text=True)]) as served:
        await asyncio.gather(
            *(
                served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": name}]})
                for name in ("one", "two", "three")
            )
        )
    expected = {
        span.attributes["gen_ai.retrieval.query.text"]: span.context.span_id
        for span in spans.get_finished_spans()
        if span.name == "chat scripted"
    }
    assert seen == expected
    assert len(set(seen.values())) == 3
    assert not get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("send_traceparent", [False, True])
async def test_a_search_engine_is_told_of_the_trace_and_pages_only_if_that_is_switched_on(
    spans: InMemorySpanExporter, send_traceparent: bool
) -> None:
    asked: dict[str, str | None] = {}

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked[path] = self.headers["traceparent"]
            page = f"http://127.0.0.1:{self.server.server_address[1]}/page"
            found = json.dumps({"results": [{"url": page}]})
            body = {"/search": found, "/page": "<p>The capital of France is Paris.</p>"}.get(path, "")
            self.send_response(200 if body else 404)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with listening(Site) as url:
        source = WebSource(
            search_engine(url), CrawlOptions(allow_private=True, max_depth=0, send_traceparent=send_traceparent)
        )
        service = Service(ScriptedBackend(), source, observers=[tracing(spans)])
        await service.start()
        caller = Caller("1", "ada", TRACEPARENT)
        async with service.events(caller, "retrieve", "What is the capital of France?") as events:
            chunks = [event async for event in events if isinstance(event, ChunkArrived)]
        await service.aclose()
    assert chunks
    span = by_name(spans)["retrieval scripted"]
    sent = f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert asked == {
        "/search": sent,
        "/robots.txt": sent if send_traceparent else None,
        "/page": sent if send_traceparent else None,
    }
    assert not trace_headers.get()


async def test_events_of_a_retrieval_are_bounded(spans: InMemorySpanExporter) -> None:
    chunks = [Append(Chunk(f"chunk {number}", "a.md", passage=number)) for number in range(MAX_EVENTS)]
    async with serving(chunks, observers=[tracing(spans)]) as served:
        await served.http.post("/v1/chat/completions", json=BODY)
    retrieval = by_name(spans)["retrieval"]
    assert len(retrieval.events) == MAX_EVENTS
    assert retrieval.attributes["streamrag.num_chunks"] == MAX_EVENTS
    assert retrieval.attributes["streamrag.num_events_left_out"] >= MAX_EVENTS


QUERY = ServedQuery("id", "chat", "anonymous", 0.0, "text", TRACEPARENT)


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "00",
        "x" * 100_000,
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01\r\nx: y",
        "００-" + TRACE_ID,
    ],
)
def test_a_traceparent_that_is_none_is_ignored(traceparent: str | None) -> None:
    context = context_of(replace(QUERY, traceparent=traceparent))
    assert not get_current_span(context).get_span_context().is_valid


@pytest.mark.parametrize("tracestate", ["", "=", "a=b," * 1000, "a=\x00", "é=1", "no pairs at all", "a=1,a=2"])
def test_a_tracestate_that_is_none_leaves_the_trace_as_it_is(tracestate: str) -> None:
    found = get_current_span(context_of(replace(QUERY, tracestate=tracestate))).get_span_context()
    assert f"{found.trace_id:032x}" == TRACE_ID
    assert len(found.trace_state) == 0


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_a_missing_tracing_package_is_named_with_its_extra(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from streamrag.errors import MissingDependencyError\n"
        "try:\n    from streamrag.serve.observe.tracing import to_otlp; to_otlp('http://127.0.0.1:1')\n"
        "except MissingDependencyError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install '.[serve]'" in ran.stdout


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    received: list[ExportTraceServiceRequest]
    headers_seen: list[Mapping[str, str]]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.headers_seen.append(dict(self.headers))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextmanager
def collector() -> Iterator[tuple[str, type[Collector]]]:
    kind = type("Received", (Collector,), {"received": [], "headers_seen": []})
    with listening(kind) as url:
        yield url, kind


@contextmanager
def listening(kind: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_collector_gets_the_spans_over_http() -> None:
    with collector() as (address, received):
        observer = Tracing(to_otlp(address, headers={"x-key": "secret"}, service_name="mine"), model="scripted")
        async with serving(CHUNKS, observers=[observer]) as served:
            await served.http.post("/v1/chat/completions", json=BODY, headers={"traceparent": TRACEPARENT})
        await observer.aclose()
    (request,) = received.received
    (of_resource,) = request.resource_spans
    resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
    assert resource["service.name"] == "mine"
    spans = {span.name: span for each in of_resource.scope_spans for span in each.spans}
    assert set(spans) == {"chat scripted", "retrieval", "prefill", "decode"}
    assert spans["chat scripted"].trace_id.hex() == TRACE_ID
    assert spans["chat scripted"].parent_span_id.hex() == SPAN_ID
    assert received.headers_seen[0]["x-key"] == "secret"


async def test_an_absent_collector_fails_no_request() -> None:
    with collector() as (address, _):
        pass
    observer = Tracing(to_otlp(address))
    async with serving(observers=[observer]) as served:
        assert (await served.http.post("/v1/chat/completions", json=BODY)).status_code == 200
    async with asyncio.timeout(60):
        await observer.aclose()
