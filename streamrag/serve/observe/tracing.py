"""OpenTelemetry traces: a span for each query, and below it retrieval, prefill, decode and preemptions.

    chat MODEL                    child of the caller's `traceparent`; parent of the source's own requests
    ├── retrieval                 an event for each chunk that arrives and each prompt that is sent
    ├── prefill                   from the engine's first step to the KV of the whole prompt
    │   └── preemption            from the loss of its KV until it runs again
    └── decode                    from the first token to the last

Attributes are named by OpenTelemetry's conventions for generative AI, which are still in development, or `streamrag.*`.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio.to_thread

from streamrag.errors import MissingDependencyError, install_line
from streamrag.records import RequestRecord
from streamrag.serve.failures import failure_of
from streamrag.serve.observe.logs import hide
from streamrag.serve.observe.observer import Observer, QueryOutcome, QueryProgress, ServedQuery
from streamrag.support.versions import __version__
from streamrag.telemetry import (
    Answer,
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    QueryEvent,
    RetrievalCutShort,
    RetrievalStarted,
    SourceFailed,
)
from streamrag.trace_context import trace_headers

try:
    from opentelemetry.context import Context, attach, get_current
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise MissingDependencyError("opentelemetry-sdk", install_line("serve")) from error

MAX_EVENTS = 100  # maximum events of one retrieval; `streamrag.num_events_left_out` counts the others
MAX_PREEMPTIONS = 32  # maximum preemption spans of one query; `streamrag.num_preemptions` counts all
MAX_TEXT = 4_000  # maximum characters of a text attribute
EXPORT_TIMEOUT_S = 5

_TRACEPARENT = re.compile(r"[0-9a-f-]{55,80}", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Traced:
    query: ServedQuery
    span: Span
    before: Context  # the context that was current before the query
    wall_ns: int  # offset from `time.monotonic` to the wall clock, in nanoseconds; read once, when the query starts
    retrieval: Span | None = None
    num_events: int = 0

    def at_ns(self, monotonic_s: float) -> int:
        """Convert a time of `time.monotonic` to nanoseconds of the wall clock."""
        return self.wall_ns + int(monotonic_s * 1e9)

    def event_ns(self, at_s: float) -> int:
        """Convert the `at_s` of one of the query's events to nanoseconds of the wall clock."""
        return self.at_ns(self.query.started_s + at_s)


class Tracing(Observer):
    """An observer that creates spans.

    provider: exports the spans; `to_otlp` makes one. `aclose` shuts it down.
    model: name of the model.
    data_source: name of the data source.
    with_text: whether spans include questions, answers, and the URIs and texts of chunks.
    """

    def __init__(
        self,
        provider: TracerProvider,
        *,
        model: str | None = None,
        data_source: str | None = None,
        with_text: bool = False,
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("streamrag", __version__)
        self._model = model
        self._data_source = data_source
        self._with_text = with_text
        self._traced: dict[int, _Traced] = {}

    async def aclose(self) -> None:
        """Export the remaining spans and stop. Takes seconds if no collector responds."""
        await anyio.to_thread.run_sync(self._provider.shutdown)

    def query_started(self, query: ServedQuery) -> None:
        """Start the query's span, and make it current for this task, its children and the source's requests."""
        wall_ns = time.time_ns() - time.monotonic_ns()
        operation = "retrieval" if query.interface == "retrieve" else "chat"
        span = self._tracer.start_span(
            f"{operation} {self._model}" if self._model else operation,
            context=context_of(query),
            kind=SpanKind.SERVER,
            start_time=wall_ns + int(query.started_s * 1e9),
            attributes=_without_none(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "streamrag",
                    "gen_ai.request.model": self._model,
                    "streamrag.interface": query.interface,
                    "streamrag.client": query.client,
                    "streamrag.request_id": query.id,
                    "gen_ai.retrieval.query.text": query.text[:MAX_TEXT] if self._with_text else None,
                }
            ),
        )
        self._traced[id(query)] = _Traced(query, span, get_current(), wall_ns)
        attach(current := set_span_in_context(span))  # for this task and the tasks that it starts
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, current)
        trace_headers.set(headers)

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None:
        """Start or end the span of retrieval, or add an event: a chunk, prompt, skipped document, cut or failure."""
        traced = self._traced[id(query)]
        match event:
            case RetrievalStarted():
                attributes = {"gen_ai.operation.name": "retrieval", "gen_ai.data_source.id": self._data_source}
                traced.retrieval = self._child(traced, "retrieval", traced.event_ns(event.at_s), attributes)
            case ContextComplete():
                self._end_retrieval(traced, event.at_s)
            case ChunkArrived(chunk=chunk):
                sizes = {"passage": chunk.passage, "num_characters": len(chunk.text)}
                self._add_event(traced, "chunk", event.at_s, sizes, {"uri": chunk.uri, "text": chunk.text})
            case ContextChanged():
                names = ("num_tokens", "num_shared", "num_invalidated", "unit")
                self._add_event(traced, "prompt", event.at_s, {name: getattr(event, name) for name in names})
            case DocumentSkipped():
                self._add_event(traced, "skipped", event.at_s, {}, {"uri": event.uri, "reason": event.reason})
            case RetrievalCutShort() | SourceFailed():
                self._add_event(traced, "cut_short", event.at_s, {})

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """End the query's spans with the answer's figures, or the error unless the client left; restore the context."""
        traced = self._traced.pop(id(query))
        attach(traced.before)
        trace_headers.set({})
        now_s = time.monotonic()
        self._end_retrieval(traced, now_s - query.started_s)
        self._add_generation(traced, answer, now_s)
        traced.span.set_attributes(_without_none(self._end_attributes(traced.query.progress, outcome, answer)))
        if error is not None and outcome not in ("answered", "left"):
            kind = type(error).__name__
            reason = str(error) if self._with_text else hide(str(error), query.text)
            traced.span.set_attributes({"error.type": kind, "http.response.status_code": failure_of(error).status})
            traced.span.set_status(StatusCode.ERROR, f"{kind}: {reason[:MAX_TEXT]}")
        traced.span.end(traced.at_ns(now_s))

    def _end_attributes(self, progress: QueryProgress, outcome: QueryOutcome, answer: Answer | None) -> dict[str, Any]:
        """Return the last attributes of a query's span: outcome, counts, times, and the answer's text if that is
        permitted. A value that is unknown is None."""
        record = None if answer is None else answer.record
        return {
            "streamrag.outcome": outcome,
            "gen_ai.usage.input_tokens": progress.num_prompt_tokens,
            "gen_ai.usage.output_tokens": progress.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": None if record is None else record.num_from_cache,
            "gen_ai.response.time_to_first_chunk": progress.ttft_s,
            "gen_ai.response.finish_reasons": None if answer is None else (answer.finish_reason,),
            "gen_ai.response.text": answer.text[:MAX_TEXT] if answer is not None and self._with_text else None,
            "streamrag.ttft_after_retrieval_s": progress.ttft_after_retrieval_s,
            "streamrag.num_chunks": progress.num_chunks,
            "streamrag.num_prompts": progress.num_prompts,
            "streamrag.num_invalidated": progress.num_invalidated,
            "streamrag.num_computed": None if record is None else record.num_computed,
            "streamrag.num_preemptions": None if record is None else len(record.preemptions),
        }

    def _add_generation(self, traced: _Traced, answer: Answer | None, now_s: float) -> None:
        """Add the spans of prefill, timed by the engine's record or else by events, and of decode, timed by the events.

        There is no prefill without a prompt, and no decode without a token; without a known end, they end at `now_s`. A
        record also gives prefill the spans of its preemptions.
        """
        progress, started_s = traced.query.progress, traced.query.started_s
        record = None if answer is None else answer.record
        first_s = None if progress.queued_s is None else started_s + progress.queued_s
        token_s = None if progress.ttft_s is None else started_s + progress.ttft_s
        if record is not None and record.scheduled_s is not None:
            first_s = record.scheduled_s
        computed_s = record.last_kv_s if record is not None and record.last_kv_s is not None else token_s
        if first_s is not None and progress.num_prompts:
            tokens = {"streamrag.num_tokens": progress.num_prompt_tokens}
            prefill = self._child(traced, "prefill", traced.at_ns(first_s), tokens)
            if record is not None:
                self._add_preemptions(traced, prefill, record)
            prefill.end(traced.at_ns(max(computed_s or now_s, first_s)))
        if token_s is not None:
            tokens = {"streamrag.num_tokens": progress.num_output_tokens}
            decode = self._child(traced, "decode", traced.at_ns(token_s), tokens)
            decode.end(traced.at_ns(now_s if answer is None else started_s + answer.timings.total_s))

    def _add_preemptions(self, traced: _Traced, parent: Span, record: RequestRecord) -> None:
        """Add a span for each preemption, up to `MAX_PREEMPTIONS`, until the next restore; of no length without one."""
        for preemption in record.preemptions[:MAX_PREEMPTIONS]:
            again_s = next((each.at_s for each in record.restores if each.at_s >= preemption.at_s), preemption.at_s)
            attributes = {"streamrag.fate": preemption.fate, "streamrag.num_tokens": preemption.num_tokens_lost}
            span = self._child(traced, "preemption", traced.at_ns(preemption.at_s), attributes, parent)
            span.end(traced.at_ns(again_s))

    def _child(
        self, traced: _Traced, name: str, start_ns: int, attributes: Mapping[str, Any], parent: Span | None = None
    ) -> Span:
        """Start a span below the query's, or below `parent`; attributes that are None are left out."""
        context = set_span_in_context(parent or traced.span)
        return self._tracer.start_span(name, context=context, start_time=start_ns, attributes=_without_none(attributes))

    def _end_retrieval(self, traced: _Traced, at_s: float) -> None:
        """End the span of retrieval, if it is open, with the numbers of its chunks and of events over `MAX_EVENTS`."""
        if traced.retrieval is None:
            return
        traced.retrieval.set_attribute("streamrag.num_chunks", traced.query.progress.num_chunks)
        if traced.num_events > MAX_EVENTS:
            traced.retrieval.set_attribute("streamrag.num_events_left_out", traced.num_events - MAX_EVENTS)
        traced.retrieval.end(traced.event_ns(at_s))
        traced.retrieval = None

    def _add_event(
        self, traced: _Traced, name: str, at_s: float, sizes: Mapping[str, Any], texts: Mapping[str, str] | None = None
    ) -> None:
        """Add an event to the open span of retrieval, or else the query's; only count it after `MAX_EVENTS`.

        texts: attributes that are added only with `with_text`, cut.
        """
        span = traced.retrieval or traced.span
        traced.num_events += 1
        if traced.num_events <= MAX_EVENTS:
            short_texts = {key: text[:MAX_TEXT] for key, text in (texts or {}).items()} if self._with_text else {}
            attributes = {f"streamrag.{key}": value for key, value in {**sizes, **short_texts}.items()}
            span.add_event(f"streamrag.{name}", attributes, traced.event_ns(at_s))


def context_of(query: ServedQuery) -> Context:
    """Return the trace context of the caller's headers, empty without a valid `traceparent`. Drops an invalid
    `tracestate`."""
    carrier = {}
    if query.traceparent and _TRACEPARENT.fullmatch(query.traceparent):
        carrier["traceparent"] = query.traceparent
        if query.tracestate and _TRACESTATE.fullmatch(query.tracestate):
            carrier["tracestate"] = query.tracestate
    return _PROPAGATOR.extract(carrier, context=Context())


def to_otlp(
    endpoint: str, *, headers: Mapping[str, str] | None = None, service_name: str = "streamrag"
) -> TracerProvider:
    """Return a provider that sends spans to a collector in the background, until shut down, by OTLP over HTTP.

    endpoint: the collector's address, such as "http://127.0.0.1:4318"; "/v1/traces" is appended if missing.
    headers: additional HTTP headers, such as a key.

    :raises MissingDependencyError: the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-http"
        raise MissingDependencyError(package, install_line("serve")) from error
    address = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
    exporter = OTLPSpanExporter(address, headers=dict(headers or {}), timeout=EXPORT_TIMEOUT_S)
    resource = Resource.create({"service.name": service_name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
