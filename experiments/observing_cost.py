"""What watching a query costs the event loop: microseconds for a query of 8 chunks and 256 tokens, by observer.

python experiments/observing_cost.py
python experiments/observing_cost.py --engine

The second says what `collect_stats` costs: two engines with a tiny model, with it and without, answer in turns.
"""

import asyncio
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamrag import Append, Chunk, Pipeline, SamplingParams, VllmBackend
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.logs import QueryLog, log_to
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.tracing import Tracing
from streamrag.serve.observing import AllOf, Observer, ServedQuery
from streamrag.telemetry import (
    ChunkArrived,
    ContextChanged,
    ContextComplete,
    Event,
    PrefillProgressed,
    RetrievalStarted,
    TokensGenerated,
)
from streamrag.testing import ScriptedSource, make_tiny_llama

NUM_QUERIES = 500
NUM_CHUNKS = 8
NUM_TOKENS = 256


def events() -> list[Event]:
    """Of one query."""
    made: list[Event] = [RetrievalStarted(0.0, "Why?")]
    for number in range(NUM_CHUNKS):
        made.append(ChunkArrived(0.1, Chunk("text", "a.md", passage=number)))
        made.append(ContextChanged(0.1, number + 1, 100 * number, 90 * number, 10 * number))
        made.append(PrefillProgressed(0.2, 100 * number))
    made.append(ContextComplete(0.3, NUM_CHUNKS, 100 * NUM_CHUNKS, ()))
    return made + [TokensGenerated(0.4, "word ", (7,), None)] * NUM_TOKENS


def cost_us(observer: Observer, of_query: list[Event]) -> float:
    """Microseconds of the processor for one query."""
    told = AllOf([observer])
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

    def query_event(self, query: ServedQuery, event: Event) -> None: ...

    def query_ended(self, query: ServedQuery, *how: object) -> None: ...

    def query_refused(self, *how: object) -> None: ...


# ------------------------------------------------------------------------------------------------------- collect_stats

NUM_TURNS = 20
NUM_AT_ONCE = 8
PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)


class Engine:
    """One engine, and what the processor did for it: in its processes, and in ours while it answered."""

    def __init__(self, model: str, *, collect_stats: bool) -> None:
        self.backend = VllmBackend(model, dtype="float32", kv_cache_bytes=1 << 28, collect_stats=collect_stats)
        self._pipeline = Pipeline(
            ScriptedSource([Append(Chunk("Paris is the capital of France.", "a.md"))]),
            self.backend,
            max_concurrent_queries=NUM_AT_ONCE,
        )
        self.ours_s: list[float] = []
        self.engines_s: list[float] = []

    async def run(self) -> None:
        """One turn."""
        before = time.process_time(), self._cpu_s()
        await asyncio.gather(*(self._answer() for _ in range(NUM_AT_ONCE)))
        self.ours_s.append(time.process_time() - before[0])
        self.engines_s.append(self._cpu_s() - before[1])

    async def _answer(self) -> None:
        async with self._pipeline.stream("Why?", params=PARAMS) as stream:
            async for _ in stream:
                pass

    def _cpu_s(self) -> float:
        """User's and system's, whole ticks of 10 ms."""
        stats = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in self.backend.process_ids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")

    async def __aenter__(self) -> "Engine":
        await self._pipeline.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._pipeline.aclose()


async def stats_cost() -> None:
    """The cost of `collect_stats`, printed."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_llama(Path(folder) / "model"))
        async with Engine(model, collect_stats=False) as without, Engine(model, collect_stats=True) as with_stats:
            await without.run()
            await with_stats.run()
            for turn in range(NUM_TURNS):
                for engine in (without, with_stats)[:: 1 if turn % 2 else -1]:
                    await engine.run()
            for what in ("ours_s", "engines_s"):
                pairs = list(zip(getattr(with_stats, what)[1:], getattr(without, what)[1:], strict=True))
                ratio = median(a / b for a, b in pairs if b)
                a_ms, b_ms = (1e3 * median(values) / NUM_AT_ONCE for values in zip(*pairs, strict=True))
                print(f"{what:10} {b_ms:.2f} ms of CPU a query without, {a_ms:.2f} with: {ratio:.3f} times")


def main() -> None:
    """Measure, and print."""
    if "--engine" in sys.argv:
        asyncio.run(stats_cost())
        return
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
