"""`GET /metrics` for Prometheus: what queries took and cost, and behind it what vLLM counts itself.

Names follow vLLM's conventions: `streamrag:ttft_after_retrieval_seconds`. Labels have few values, and none of them is
a client's text.
"""

from collections.abc import Collection, Iterator
from typing import Protocol, get_args, runtime_checkable

import anyio
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.records import KvUse, RequestRecord
from streamrag.serve.observe.observer import Interface, Outcome, Refusal, ServedQuery
from streamrag.serve.observe.progress import Course, Phase
from streamrag.serve.service import Service
from streamrag.telemetry import Answer, Event

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTS = (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 500)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)

OTHER = "other"
"""Clients that have no name of their own in the metrics."""


@runtime_checkable
class TellsKvUse(Protocol):
    """A backend that knows what its KV memory is used for."""

    @property
    def kv_use(self) -> KvUse | None:
        """As of the engine's last step; None if it does not tell."""


class Metrics:
    """An observer that counts. Costs a query some microseconds.

    clients: names of clients that are told apart in `streamrag:queries` and `streamrag:refusals`; others are "other".
        They must be few, such as the names of the configured keys. None for no such label.
    with_default_registry: whether what other code has registered with prometheus_client is shown too, such as vLLM's
        own metrics.
    """

    def __init__(self, *, clients: Collection[str] | None = None, with_default_registry: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._clients = None if clients is None else frozenset(clients)
        self._others = [REGISTRY] if with_default_registry else []
        self._shown = _Shown()
        self._rendering = anyio.CapacityLimiter(1)
        self._num_restarts_seen = 0
        self._of_kv = CollectorRegistry()  # shown once the engine has told of it
        by_client = () if clients is None else ("client",)
        interface = ("interface",)

        self.queries = self._counter("queries", "Queries that ended", *interface, "outcome", *by_client)
        self.refusals = self._counter("refusals", "Queries that were not admitted", *interface, "reason", *by_client)
        self.engine_restarts = self._counter("engine_restarts", "Times that a dead engine was started again")
        self.ready = self._gauge("ready", "1 if queries are admitted, else 0")
        self.open_queries = self._gauge("open_queries", "Queries that are open, by what they are doing", "phase")
        self.queued_tokens = self._gauge("queued_tokens", "Tokens of prompts and answers still to be computed")

        self.queue = self._seconds("queue_seconds", "From a query's admission until retrieval began")
        self.first_chunk = self._seconds("first_chunk_seconds", "From a query to the first chunk of context")
        self.retrieval = self._seconds("retrieval_seconds", "From a query to the end of retrieval")
        self.ttft = self._seconds("ttft_seconds", "From a query to the first token of the answer")
        self.ttft_after_retrieval = self._seconds(
            "ttft_after_retrieval_seconds", "From the end of retrieval to the first token of the answer"
        )
        self.total = self._seconds("query_seconds", "From a query's admission to its end, however it ended")

        self.chunks = self._histogram("query_chunks", "Chunks of context that retrieval brought", COUNTS)
        self.prompts = self._histogram("query_prompts", "Prompts that a query sent to the engine", COUNTS)
        self.updates = self._histogram("query_updates", "Prompts that replaced something of the one before", COUNTS)
        self.prompt_tokens = self._histogram("query_prompt_tokens", "Tokens of the last prompt", TOKENS)
        self.output_tokens = self._histogram("query_output_tokens", "Tokens of the answer", TOKENS)
        self.skipped = self._counter("documents_skipped", "Documents that sources could not use")

        self.shared_tokens = self._counter("shared_tokens", "Tokens that prompts shared with the prompt before")
        self.replaced_tokens = self._counter("replaced_tokens", "Tokens of prompts that the next prompt replaced")
        self.of_record = {
            name: self._counter(f"{name.removeprefix('num_')}_tokens", what)
            for name, what in (
                ("num_computed", "Prompt tokens that the engine computed"),
                ("num_recomputed", "Prompt tokens computed again, because their KV had been lost"),
                ("num_invalidated", "Computed prompt tokens that updates made useless"),
                ("num_from_cache", "Prompt tokens found in the prefix cache"),
                ("num_loaded", "Prompt tokens loaded from host memory"),
                ("num_written_through", "Prompt tokens copied to host memory while they were still held"),
            )
        }
        """By field of `RequestRecord`; only of answered queries, which have a record."""
        self.preemptions = self._counter("preemptions", "Times that a request lost its KV to others", "fate")
        self.preempted_tokens = self._counter("preempted_tokens", "Tokens whose KV was lost so", "fate")
        self.saved_tokens = self._counter("saved_tokens", "Lost tokens that were copied to host memory before")
        self.restores = self._counter("restores", "Times that a request got lost KV back", "choice")

        self.kv_tokens = self._kv_gauge("kv_tokens", "Tokens whose KV requests hold on the device, by state", "state")
        self.kv_requests = self._kv_gauge("kv_requests", "Requests in the engine, by state", "state")
        self.kv_capacity = self._kv_gauge("kv_capacity_tokens", "Tokens whose KV the device has room for")
        self.host_kv = self._kv_gauge("host_kv_tokens", "Tokens whose KV is in host memory")
        self.host_kv_capacity = self._kv_gauge("host_kv_capacity_tokens", "Tokens whose KV host memory has room for")

    # ------------------------------------------------------------------------------------------------ as an observer

    def query_started(self, query: ServedQuery) -> None:
        """A query is counted when it ends."""

    def query_event(self, query: ServedQuery, event: Event) -> None:
        """Its course knows."""

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        course = query.course
        interface = query.interface
        self.queries.labels(interface, outcome, *self._client(query.client)).inc()
        for histogram, value_s in (
            (self.queue, course.queued_s),
            (self.first_chunk, course.first_chunk_s),
            (self.retrieval, course.retrieval_s),
            (self.ttft, course.ttft_s),
            (self.ttft_after_retrieval, course.ttft_after_retrieval_s),
            (self.total, query.age_s),
        ):
            if value_s is not None:
                histogram.labels(interface).observe(max(value_s, 0.0))
        self._count(course)
        if answer is not None and answer.record is not None:
            self._count_record(answer.record)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self.refusals.labels(interface, why, *self._client(client)).inc()

    def _count(self, course: Course) -> None:
        self.chunks.observe(course.num_chunks)
        self.prompts.observe(course.num_prompts)
        self.updates.observe(course.num_updates)
        self.prompt_tokens.observe(course.num_prompt_tokens)
        self.output_tokens.observe(course.num_output_tokens)
        self.skipped.inc(course.num_skipped)
        self.shared_tokens.inc(course.num_shared)
        self.replaced_tokens.inc(course.num_invalidated)

    def _count_record(self, record: RequestRecord) -> None:
        for name, counter in self.of_record.items():
            counter.inc(getattr(record, name))
        for preemption in record.preemptions:
            self.preemptions.labels(preemption.fate).inc()
            self.preempted_tokens.labels(preemption.fate).inc(preemption.num_tokens_lost)
            self.saved_tokens.inc(preemption.num_tokens_saved)
        for restore in record.restores:
            self.restores.labels(restore.choice).inc()

    def _client(self, client: str) -> tuple[str, ...]:
        if self._clients is None:
            return ()
        return (client if client in self._clients else OTHER,)

    # --------------------------------------------------------------------------------------------------- as a scrape

    async def render(self, service: Service) -> bytes:
        """All metrics as they are now, in Prometheus' text format.

        Not as OpenMetrics, which Prometheus asks for first: prometheus_client 0.26 writes the names of samples with
        an underscore there, in which vLLM's and ours have a colon.
        """
        self._look_at(service)
        # vLLM's are thousands of lines.
        return await anyio.to_thread.run_sync(generate_latest, self._shown, limiter=self._rendering)

    def _look_at(self, service: Service) -> None:
        """Set what is not counted, but seen."""
        phases = [query.course.phase for query in service.queries]
        for phase in get_args(Phase):
            self.open_queries.labels(phase).set(phases.count(phase))
        self.queued_tokens.set(service.admission.num_queued_tokens)
        self.engine_restarts.inc(service.num_restarts - self._num_restarts_seen)
        self._num_restarts_seen = service.num_restarts
        self.ready.set(service.is_ready)
        backend = service.backend
        use = backend.kv_use if isinstance(backend, TellsKvUse) else None
        self._shown.registries = [self.registry, *([self._of_kv] if use else []), *self._others]
        if use is None:
            return
        for state, of_state in use.by_state.items():
            self.kv_tokens.labels(state).set(of_state.num_tokens)
            self.kv_requests.labels(state).set(of_state.num_requests)
        self.kv_capacity.set(use.num_capacity)
        self.host_kv.set(use.num_host)
        self.host_kv_capacity.set(use.num_host_capacity)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"streamrag:{name}", f"{what}.", labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"streamrag:{name}", f"{what}.", labels, registry=self.registry)

    def _kv_gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"streamrag:{name}", f"{what}.", labels, registry=self._of_kv)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(f"streamrag:{name}", f"{what}.", ("interface",), buckets=SECONDS, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[int, ...]) -> Histogram:
        return Histogram(f"streamrag:{name}", f"{what}.", buckets=buckets, registry=self.registry)


class _Shown(Collector):
    """What is registered, without the times at which each series was made, which double it."""

    def __init__(self) -> None:
        self.registries: list[CollectorRegistry] = []

    def collect(self) -> Iterator[Metric]:
        for registry in self.registries:
            for metric in registry.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric


def routes(service: Service) -> list[Route]:
    """`GET /metrics`, if one of the service's observers counts."""
    found = [observer for observer in service.observers if isinstance(observer, Metrics)]

    async def metrics(request: Request) -> Response:
        return Response(await found[0].render(service), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [Route("/metrics", metrics)] if found else []
