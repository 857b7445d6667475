"""What watching a query costs the event loop: microseconds for a query of 8 chunks and 256 tokens, by observer.

python experiments/observing_cost.py
"""

import logging
import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamrag import AnswerChunk, Chunk
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.logs import QueryLog, log_to
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.observer import Observer, Observers, ServedQuery
from streamrag.serve.observe.tracing import Tracing
from streamrag.telemetry import (
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    PrefillProgressed,
    QueryEvent,
    RetrievalStarted,
    TokensGenerated,
)

NUM_QUERIES = 500
NUM_CHUNKS = 8
NUM_TOKENS = 256


def events() -> list[QueryEvent]:
    """Of one query."""
    made: list[QueryEvent] = [RetrievalStarted(0.0, "Why?")]
    for number in range(NUM_CHUNKS):
        made.append(ChunkArrived(0.1, Chunk("text", "a.md", passage=number)))
        made.append(ContextChanged(0.1, number + 1, 100 * number, 90 * number, 10 * number))
        made.append(PrefillProgressed(0.2, 100 * number))
    made.append(ContextComplete(0.3, NUM_CHUNKS, 100 * NUM_CHUNKS, ()))
    return made + [TokensGenerated(0.4, AnswerChunk("word ", (7,)))] * NUM_TOKENS


def cost_us(observer: Observer, of_query: list[QueryEvent]) -> float:
    """Microseconds of the processor for one query."""
    told = Observers([observer])
    began_s = time.process_time()
    for number in range(NUM_QUERIES):
        query = ServedQuery(str(number), "chat", "anonymous", time.monotonic(), "Why?")
        told.query_started(query)
        for event in of_query:
            told.query_event(query, event)
        told.query_ended(query, "answered", None, None)
    return (time.process_time() - began_s) / NUM_QUERIES * 1e6


class Nobody:
    """An observer that does nothing: the calls alone."""

    def query_started(self, query: ServedQuery) -> None: ...

    def query_event(self, query: ServedQuery, event: QueryEvent) -> None: ...

    def query_ended(self, query: ServedQuery, *how: object) -> None: ...

    def query_refused(self, *how: object) -> None: ...
    def request_failed(self, *how: object) -> None: ...


def main() -> None:
    """Measure, and print."""
    with open("/dev/null", "w") as nowhere:
        log_to(nowhere, level=logging.INFO)
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
        of_query = events()
        for observer in (Nobody(), Metrics(), Live(), QueryLog(), Tracing(provider)):
            best = min(cost_us(observer, of_query) for _ in range(5))
            print(f"{type(observer).__name__:10} {best:7.0f} us a query, {best / len(of_query):5.2f} us an event")
        provider.shutdown()


if __name__ == "__main__":
    main()
