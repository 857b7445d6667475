"""`GET /metrics` for Prometheus: what queries took and cost, followed by vLLM's own metrics.

Names follow vLLM's conventions: `streamrag:ttft_after_retrieval_seconds`. Labels have few values, and none of them is
text of a client.
"""

from collections.abc import Collection, Iterator, Sequence
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
from streamrag.serve.observe.observer import Interface, Observer, Outcome, Refusal, ServedQuery
from streamrag.serve.observe.progress import Phase, QueryProgress
from streamrag.serve.service import Service
from streamrag.telemetry import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTS = (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 500)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)

OTHER = "other"
"""Label of clients that are not told apart."""


@runtime_checkable
class TellsKvUse(Protocol):
    """A backend that reports what its KV memory is used for."""

    @property
    def kv_use(self) -> KvUse | None:
        """The use in the engine's last step; None if that is not known."""


def kv_use_of(service: Service) -> KvUse | None:
    """Return the use of the engine's KV memory, if its backend reports it."""
    return service.backend.kv_use if isinstance(service.backend, TellsKvUse) else None


class MetricGroup:
    """Metrics of one kind, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"streamrag:{name}", f"{what}.", labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"streamrag:{name}", f"{what}.", labels, registry=self._registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(f"streamrag:{name}", f"{what}.", ("interface",), buckets=SECONDS, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[int, ...]) -> Histogram:
        return Histogram(f"streamrag:{name}", f"{what}.", buckets=buckets, registry=self._registry)


class ServiceState(MetricGroup):
    """The state of the service, read when it is scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ready = self._gauge("ready", "1 if queries are admitted, else 0")
        self.open_queries = self._gauge("open_queries", "Queries that are open, by what they are doing", "phase")
        self.queued_tokens = self._gauge("queued_tokens", "Tokens of prompts and answers still to be computed")
        self.engine_restarts = self._counter("engine_restarts", "Times that a dead engine was started again")
        self._num_restarts = 0

    def read(self, service: Service) -> None:
        """Set the metrics to the service's state."""
        phases = [query.progress.phase for query in service.queries]
        for phase in get_args(Phase):
            self.open_queries.labels(phase).set(phases.count(phase))
        self.queued_tokens.set(service.admission.num_queued_tokens)
        self.engine_restarts.inc(service.num_restarts - self._num_restarts)
        self._num_restarts = service.num_restarts
        self.ready.set(service.is_ready)


class QueryTimes(MetricGroup):
    """Seconds that queries took, by protocol."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.queue = self._seconds("queue_seconds", "From a query's admission until retrieval began")
        self.first_chunk = self._seconds("first_chunk_seconds", "From a query to the first chunk of context")
        self.retrieval = self._seconds("retrieval_seconds", "From a query to the end of retrieval")
        self.ttft = self._seconds("ttft_seconds", "From a query to the first token of the answer")
        self.ttft_after_retrieval = self._seconds(
            "ttft_after_retrieval_seconds", "From the end of retrieval to the first token of the answer"
        )
        self.total = self._seconds("query_seconds", "From a query's admission to its end, however it ended")

    def observe(self, query: ServedQuery) -> None:
        """Record the times of a query that has ended."""
        progress = query.progress
        for histogram, value_s in (
            (self.queue, progress.queued_s),
            (self.first_chunk, progress.first_chunk_s),
            (self.retrieval, progress.retrieval_s),
            (self.ttft, progress.ttft_s),
            (self.ttft_after_retrieval, progress.ttft_after_retrieval_s),
            (self.total, query.age_s),
        ):
            if value_s is not None:
                histogram.labels(query.interface).observe(max(value_s, 0.0))


class QuerySizes(MetricGroup):
    """Chunks, prompts and tokens of queries."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.chunks = self._histogram("query_chunks", "Chunks of context that retrieval brought", COUNTS)
        self.prompts = self._histogram("query_prompts", "Prompts that a query sent to the engine", COUNTS)
        self.updates = self._histogram("query_updates", "Prompts that replaced something of the one before", COUNTS)
        self.prompt_tokens = self._histogram("query_prompt_tokens", "Tokens of the last prompt", TOKENS)
        self.output_tokens = self._histogram("query_output_tokens", "Tokens of the answer", TOKENS)
        self.skipped = self._counter("documents_skipped", "Documents that sources could not use")
        self.shared_tokens = self._counter("shared_tokens", "Tokens that prompts shared with the prompt before")
        self.replaced_tokens = self._counter("replaced_tokens", "Tokens of prompts that the next prompt replaced")

    def observe(self, progress: QueryProgress) -> None:
        """Record the sizes of a query that has ended."""
        self.chunks.observe(progress.num_chunks)
        self.prompts.observe(progress.num_prompts)
        self.updates.observe(progress.num_updates)
        self.prompt_tokens.observe(progress.num_prompt_tokens)
        self.output_tokens.observe(progress.num_output_tokens)
        self.skipped.inc(progress.num_skipped)
        self.shared_tokens.inc(progress.num_shared)
        self.replaced_tokens.inc(progress.num_invalidated)


class EngineWork(MetricGroup):
    """The engine's work for answered queries, which have a record of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.by_field = {
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
        """Counters by field of `RequestRecord`."""
        self.preemptions = self._counter("preemptions", "Times that a request lost its KV to others", "fate")
        self.preempted_tokens = self._counter("preempted_tokens", "Tokens whose KV was lost so", "fate")
        self.saved_tokens = self._counter("saved_tokens", "Lost tokens that were copied to host memory before")
        self.restores = self._counter("restores", "Times that a request got lost KV back", "choice")

    def count(self, record: RequestRecord) -> None:
        """Add the work for one query."""
        for name, counter in self.by_field.items():
            counter.inc(getattr(record, name))
        for preemption in record.preemptions:
            self.preemptions.labels(preemption.fate).inc()
            self.preempted_tokens.labels(preemption.fate).inc(preemption.num_tokens_lost)
            self.saved_tokens.inc(preemption.num_tokens_saved)
        for restore in record.restores:
            self.restores.labels(restore.choice).inc()


class KvMemory(MetricGroup):
    """The use of KV memory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.tokens = self._gauge("kv_tokens", "Tokens whose KV requests hold on the device, by state", "state")
        self.requests = self._gauge("kv_requests", "Requests in the engine, by state", "state")
        self.capacity = self._gauge("kv_capacity_tokens", "Tokens whose KV the device has room for")
        self.host = self._gauge("host_kv_tokens", "Tokens whose KV is in host memory")
        self.host_capacity = self._gauge("host_kv_capacity_tokens", "Tokens whose KV host memory has room for")

    def read(self, use: KvUse) -> None:
        """Set the metrics to a use of KV memory."""
        for state, of_state in use.by_state.items():
            self.tokens.labels(state).set(of_state.num_tokens)
            self.requests.labels(state).set(of_state.num_requests)
        self.capacity.set(use.num_capacity)
        self.host.set(use.num_host)
        self.host_capacity.set(use.num_host_capacity)


class Metrics(MetricGroup, Observer):
    """An observer that counts. Costs a query some microseconds.

    clients: names of clients that are told apart in `streamrag:queries` and `streamrag:refusals`; others are "other".
        They must be few, such as the names of the configured keys. None for no such label.
    with_default_registry: whether what other code has registered with prometheus_client is shown too, such as vLLM's
        own metrics.
    """

    def __init__(self, *, clients: Collection[str] | None = None, with_default_registry: bool = True) -> None:
        self.registry = CollectorRegistry()
        super().__init__(self.registry)
        by_client = () if clients is None else ("client",)
        self.queries = self._counter("queries", "Queries that ended", "interface", "outcome", *by_client)
        self.refusals = self._counter("refusals", "Queries that were not admitted", "interface", "reason", *by_client)
        self.state = ServiceState(self.registry)
        self.times = QueryTimes(self.registry)
        self.sizes = QuerySizes(self.registry)
        self.work = EngineWork(self.registry)
        self._kv_registry = CollectorRegistry()  # shown once the engine has reported it
        self.kv = KvMemory(self._kv_registry)
        self._clients = None if clients is None else frozenset(clients)
        self._others = [REGISTRY] if with_default_registry else []
        self._rendering = anyio.CapacityLimiter(1)

    def query_ended(
        self, query: ServedQuery, outcome: Outcome, answer: Answer | None, error: BaseException | None
    ) -> None:
        self.queries.labels(query.interface, outcome, *self._client(query.client)).inc()
        self.times.observe(query)
        self.sizes.observe(query.progress)
        if answer is not None and answer.record is not None:
            self.work.count(answer.record)

    def query_refused(self, client: str, interface: Interface, why: Refusal) -> None:
        self.refusals.labels(interface, why, *self._client(client)).inc()

    def _client(self, client: str) -> tuple[str, ...]:
        if self._clients is None:
            return ()
        return (client if client in self._clients else OTHER,)

    async def render(self, service: Service) -> bytes:
        """Return all metrics as they are now, in Prometheus' text format.

        Not as OpenMetrics, which Prometheus asks for first: prometheus_client 0.26 writes the names of samples with
        an underscore there, in which vLLM's and ours have a colon.
        """
        self.state.read(service)
        if use := kv_use_of(service):
            self.kv.read(use)
        shown = _Registries([self.registry, *([self._kv_registry] if use else []), *self._others])
        # vLLM's are thousands of lines.
        return await anyio.to_thread.run_sync(generate_latest, shown, limiter=self._rendering)


class _Registries(Collector):
    """The metrics of several registries, without the times at which each series was made, which double them."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            for metric in registry.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric


def routes(service: Service) -> list[Route]:
    """Return `GET /metrics`, if one of the service's observers counts."""
    found = [observer for observer in service.observers if isinstance(observer, Metrics)]

    async def metrics(request: Request) -> Response:
        return Response(await found[0].render(service), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [Route("/metrics", metrics)] if found else []
