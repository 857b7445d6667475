"""`GET /metrics` for Prometheus: durations and token counts of queries, followed by vLLM's own metrics.

Names follow vLLM's conventions: `streamrag:ttft_after_retrieval_seconds`. Labels have few values, and never a client's
text.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, get_args, runtime_checkable

import anyio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.open_questions import QueriesAhead
from streamrag.records import KvUse, RequestRecord
from streamrag.serve.observe.observer import (
    FailedRequest,
    Interface,
    Observer,
    Phase,
    QueryOutcome,
    Refusal,
    ServedQuery,
)
from streamrag.serve.service import Service
from streamrag.telemetry import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTS = (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 500)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)

TIMES = {
    "queued_s": ("queue", "From a query's admission until retrieval began"),
    "first_chunk_s": ("first_chunk", "From a query to the first chunk of context"),
    "retrieval_s": ("retrieval", "From a query to the end of retrieval"),
    "ttft_s": ("ttft", "From a query to the first token of the answer"),
    "ttft_after_retrieval_s": ("ttft_after_retrieval", "From the end of retrieval to the first token of the answer"),
}
"""Histograms of seconds, by field of `QueryProgress`."""

SIZES = {
    "num_chunks": ("query_chunks", "Chunks of context that retrieval brought", COUNTS),
    "num_prompts": ("query_prompts", "Prompts that a query sent to the engine", COUNTS),
    "num_updates": ("query_updates", "Prompts that replaced something of the one before", COUNTS),
    "num_prompt_tokens": ("query_prompt_tokens", "Tokens of the last prompt", TOKENS),
    "num_output_tokens": ("query_output_tokens", "Tokens of the answer", TOKENS),
}
"""Histograms of sizes, by field of `QueryProgress`."""

TOTALS = {
    "num_skipped": ("documents_skipped", "Documents that sources could not use"),
    "num_shared": ("shared_tokens", "Tokens that prompts shared with the prompt before"),
    "num_invalidated": ("replaced_tokens", "Tokens of prompts that the next prompt replaced"),
}
"""Counters, by field of `QueryProgress`."""

WORK = {
    "num_computed": ("computed_tokens", "Prompt tokens that the engine computed"),
    "num_recomputed": ("recomputed_tokens", "Prompt tokens computed again, because their KV had been lost"),
    "num_invalidated": ("invalidated_tokens", "Computed prompt tokens that updates made useless"),
    "num_from_cache": ("from_cache_tokens", "Prompt tokens found in the prefix cache"),
    "num_loaded": ("loaded_tokens", "Prompt tokens loaded from host memory"),
    "num_written_through": ("written_through_tokens", "Prompt tokens copied to host memory while they were still held"),
}
"""Counters, by field of `RequestRecord`, which only answered queries have."""

KV = {
    "num_capacity": ("kv_capacity_tokens", "Tokens whose KV the device has room for"),
    "num_host": ("host_kv_tokens", "Tokens whose KV is in host memory"),
    "num_host_capacity": ("host_kv_capacity_tokens", "Tokens whose KV host memory has room for"),
}
"""Gauges, by field of `KvUse`."""

AHEAD = {
    "num_begun": ("queries_ahead_begun", "Queries ahead that began"),
    "num_used": ("queries_ahead_used", "Queries ahead that a committed question used"),
    "num_unused_tokens": ("queries_ahead_unused_tokens", "Prompt tokens computed for the others"),
}
"""Counters, by field of `QueriesAhead`."""

OTHER = "other"  # label of clients that are not distinguished


@runtime_checkable
class HasKvUse(Protocol):
    """A backend that reports the use of its KV memory."""

    @property
    def kv_use(self) -> KvUse | None:
        """The use after the engine's last step, or None if unknown."""


def kv_use_of(service: Service) -> KvUse | None:
    """Return the use of the engine's KV memory, if the backend reports it."""
    return service.backend.kv_use if isinstance(service.backend, HasKvUse) else None


class Metrics(Observer):
    """An observer that collects Prometheus metrics. Takes a few microseconds per query.

    clients: names of the few clients that `streamrag:queries` and `streamrag:refusals` distinguish by a label; all
        others are "other". None for no such label.
    with_default_registry: whether to include prometheus_client's default registry, which has vLLM's metrics.
    """

    def __init__(self, *, clients: Collection[str] | None = None, with_default_registry: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._kv_registry = CollectorRegistry()  # exposed once the engine reports it
        self._others = [REGISTRY] if with_default_registry else []
        self._clients = None if clients is None else frozenset(clients)
        self._num_restarts = 0
        self._ahead = QueriesAhead(0)  # counted so far
        self._rendering = anyio.CapacityLimiter(1)
        by_client = () if clients is None else ("client",)
        self.queries = self._counter("queries", "Queries that ended", "interface", "outcome", *by_client)
        self.refusals = self._counter("refusals", "Queries that were not admitted", "interface", "reason", *by_client)
        self.errors = self._counter("request_errors", "Requests, and frames, that got an error", "route", "status")
        self.engine_restarts = self._counter("engine_restarts", "Times that a dead engine was started again")
        self.ready = self._gauge("ready", "1 if queries are admitted, else 0")
        self.open_queries = self._gauge("open_queries", "Queries that are open, by what they are doing", "phase")
        self.queued_tokens = self._gauge("queued_tokens", "Tokens of prompts and answers still to be computed")
        self.overlaps = self._counter("overlaps", "Queries that retrieved, by when they were prefilled", "way")
        self.queries_ahead = self._gauge("queries_ahead", "Queries ahead that run, for questions still being asked")
        self.ahead = {field: self._counter(*what) for field, what in AHEAD.items()}
        self.total = self._seconds("query", "From a query's admission to its end, however it ended")
        self.times = {field: self._seconds(*what) for field, what in TIMES.items()}
        self.sizes = {field: self._sizes(*what) for field, what in SIZES.items()}
        self.totals = {field: self._counter(*what) for field, what in TOTALS.items()}
        self.work = {field: self._counter(*what) for field, what in WORK.items()}
        self.preemptions = self._counter("preemptions", "Times that a request lost its KV to others", "fate")
        self.preempted_tokens = self._counter("preempted_tokens", "Tokens whose KV was lost so", "fate")
        self.saved_tokens = self._counter("saved_tokens", "Lost tokens that were copied to host memory before")
        self.restores = self._counter("restores", "Times that a request got lost KV back", "choice")
        self.kv_tokens = self._kv_gauge("kv_tokens", "Tokens whose KV requests hold on the device, by state", "state")
        self.kv_requests = self._kv_gauge("kv_requests", "Requests in the engine, by state", "state")
        self.kv = {field: self._kv_gauge(*what) for field, what in KV.items()}

    def query_ended(
        self, query: ServedQuery, outcome: QueryOutcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        """Count the query by interface and outcome; add its duration, known times, sizes, totals and recorded work."""
        self.queries.labels(query.interface, outcome, *self._client(query.client)).inc()
        self.total.labels(query.interface).observe(query.age_s)
        for field, histogram in self.times.items():
            if (value_s := getattr(query.progress, field)) is not None:
                histogram.labels(query.interface).observe(max(value_s, 0.0))
        for field, histogram in self.sizes.items():
            if (num := getattr(query.progress, field)) is not None:
                histogram.observe(num)
        for field, counter in self.totals.items():
            counter.inc(getattr(query.progress, field) or 0)
        if query.progress.overlap is not None:
            self.overlaps.labels(query.progress.overlap.way).inc()
        if answer is not None and answer.record is not None:
            self._count_work(answer.record)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self.refusals.labels(interface, why, *self._client(client)).inc()

    def request_failed(self, request: FailedRequest) -> None:
        self.errors.labels(request.route, str(request.status)).inc()

    def _count_work(self, record: RequestRecord) -> None:
        """Add the engine's tokens, preemptions and restores of one query to the counters."""
        for field, counter in self.work.items():
            counter.inc(getattr(record, field))
        for preemption in record.preemptions:
            self.preemptions.labels(preemption.fate).inc()
            self.preempted_tokens.labels(preemption.fate).inc(preemption.num_tokens_lost)
            self.saved_tokens.inc(preemption.num_tokens_saved)
        for restore in record.restores:
            self.restores.labels(restore.choice).inc()

    def _client(self, client: str) -> tuple[str, ...]:
        """Return the client's label as a tuple: `OTHER` if it is not distinguished, () if there is no such label."""
        if self._clients is None:
            return ()
        return (client if client in self._clients else OTHER,)

    async def render(self, service: Service) -> bytes:
        """Return the metrics in Prometheus' text format: collected ones, the service's present state, KV use if known,
        and the default registry's if wanted.

        Not as OpenMetrics, which Prometheus prefers: prometheus_client 0.26 replaces the colons in the names of vLLM's
        metrics and ours there.
        """
        self._read_state(service)
        if use := kv_use_of(service):
            self._read_kv(use)
        registries = _Registries([self.registry, *([self._kv_registry] if use else []), *self._others])
        # In a thread: vLLM's metrics are thousands of lines.
        return await anyio.to_thread.run_sync(generate_latest, registries, limiter=self._rendering)

    def _read_state(self, service: Service) -> None:
        """Set the gauges from the service, and count engine restarts and queries ahead since the last call."""
        phases = [query.progress.phase for query in service.queries]
        for phase in get_args(Phase):
            self.open_queries.labels(phase).set(phases.count(phase))
        self.queued_tokens.set(service.admission.num_queued_tokens)
        self.engine_restarts.inc(service.num_restarts - self._num_restarts)
        self._num_restarts = service.num_restarts
        self.ready.set(service.is_ready)
        if (ahead := service.queries_ahead) is not None:
            self.queries_ahead.set(ahead.num_running)
            for field, counter in self.ahead.items():
                counter.inc(getattr(ahead, field) - getattr(self._ahead, field))
            self._ahead = replace(ahead)

    def _read_kv(self, use: KvUse) -> None:
        """Set the gauges of KV memory: tokens and requests by state, and the capacities."""
        for state, state_use in use.by_state.items():
            self.kv_tokens.labels(state).set(state_use.num_tokens)
            self.kv_requests.labels(state).set(state_use.num_requests)
        for field, gauge in self.kv.items():
            gauge.set(getattr(use, field))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"streamrag:{name}", f"{what}.", labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"streamrag:{name}", f"{what}.", labels, registry=self.registry)

    def _kv_gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """Register a gauge that is exposed only once the engine reports its KV memory."""
        return Gauge(f"streamrag:{name}", f"{what}.", labels, registry=self._kv_registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        name = f"streamrag:{name}_seconds"
        return Histogram(name, f"{what}.", ("interface",), buckets=SECONDS, registry=self.registry)

    def _sizes(self, name: str, what: str, buckets: tuple[int, ...]) -> Histogram:
        return Histogram(f"streamrag:{name}", f"{what}.", buckets=buckets, registry=self.registry)


class _Registries(Collector):
    """The metrics of several registries, without the `_created` samples, which would double their number."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            for metric in registry.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric


def routes(service: Service) -> list[Route]:
    """Return `GET /metrics` of the service's first `Metrics` observer; no route if it has none."""
    observer = next((each for each in service.observers if isinstance(each, Metrics)), None)
    if observer is None:
        return []

    async def metrics(request: Request) -> Response:
        return Response(await observer.render(service), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [Route("/metrics", metrics)]
