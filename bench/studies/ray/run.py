"""Two replicas of a tiny engine on Ray Serve: what is lost when one is killed, and what Ray costs.

    python -m studies.ray.run demo                  kills a replica under load, by its process id
    python -m studies.ray.run costs [--json FILE]   what Ray itself costs, with engines that answer at once
    python -m studies.ray.run holds [--json FILE]   what choosing takes and an open stream holds, without Ray

Random weights: the answers mean nothing, the work is real. Linux only: the replica is killed by a signal.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from rich.console import Console
from rich.table import Table

from streamrag import AnswerChunk, BackendError, Prompt, SamplingParams, VllmBackend
from streamrag.backends.ray.backend import RayReplicas
from streamrag.backends.ray.cluster import Cluster
from streamrag.backends.ray.deployment import ENGINES, engines
from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.replicas.replica_chooser import ReplicaCandidate, ReplicaChooser
from streamrag.backends.replicas.replica_streams import ReplicaStreams
from streamrag.backends.replicas.wire import Delta, Open, Opened, WireEvent
from streamrag.routing import Opening, ReplicaState, make_router
from streamrag.routing.router import RoundRobin
from streamrag.support import clock
from streamrag.support.files import write_atomic
from streamrag.support.versions import installed_versions
from streamrag.testing import ScriptedBackend, make_tiny_llama
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
}
NUM_SYSTEM, NUM_DOCUMENT, NUM_QUESTION, NUM_ANSWER = 128, 1_024, 32, 12
NUM_DOCUMENTS = 12
KV_BYTES = 8 * (NUM_SYSTEM + NUM_DOCUMENT + 128) * 5 * 2 * 2 * 64 * 4
"""For eight documents: each replica holds some of them, and none all."""
DTYPE = "float32"
"""In bfloat16, tokens of random weights tie, and what else is in a batch decides which of them is sampled."""
PARAMS = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True)
APP = "streamrag"

console = Console(highlight=False, width=None if Console().is_terminal else 150)


@dataclass(frozen=True)
class Query:
    """What is asked, and when."""

    at_s: float
    prompts: tuple[Prompt, ...]
    gap_s: float


@dataclass
class Asked:
    """What became of it."""

    token_ids: tuple[int, ...] = ()
    error: str = ""


def queries(num: int, rate: float, *, parts: int = 1, gap_s: float = 0.0) -> list[Query]:
    """Poisson arrivals; each asks one of the documents, the first ones more often."""
    rng, of_texts = random.Random(0), random.Random(1)

    def text(length: int) -> tuple[int, ...]:
        return tuple(of_texts.randrange(10, 500) for _ in range(length))

    system, documents = text(NUM_SYSTEM), [text(NUM_DOCUMENT) for _ in range(NUM_DOCUMENTS)]
    weights = [1 / (rank + 2) for rank in range(NUM_DOCUMENTS)]
    at_s, made = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(rate)
        (document,) = rng.choices(range(NUM_DOCUMENTS), weights)
        whole = (*system, *documents[document], *text(NUM_QUESTION))
        ends = [NUM_SYSTEM + NUM_DOCUMENT * part // parts for part in range(1, parts)] + [len(whole)]
        shared = [0, *ends]
        prompts = tuple(
            Prompt(whole[:end], shared[part], end == len(whole), source_name="load") for part, end in enumerate(ends)
        )
        made.append(Query(at_s, prompts, gap_s))
    return made


async def ask(generate: Callable[..., Any], query: Query, began_s: float) -> Asked:
    """Ask it at its time."""
    asked = Asked()
    await asyncio.sleep(max(began_s + query.at_s - time.monotonic(), 0))

    async def prompts() -> AsyncIterator[Prompt]:
        for number, prompt in enumerate(query.prompts):
            if number:
                await asyncio.sleep(query.gap_s)
            yield prompt

    try:
        async with aclosing(generate(prompts(), PARAMS)) as events:
            async for event in events:
                if isinstance(event, AnswerChunk):
                    asked.token_ids += event.token_ids
    except BackendError as error:
        asked.error = str(error)
    return asked


async def load(generate: Callable[..., Any], given: Sequence[Query]) -> list[Asked]:
    began_s = time.monotonic() + 0.2
    return list(await asyncio.gather(*[ask(generate, query, began_s) for query in given]))


# ------------------------------------------------------------------------------------------------------------- replicas


def engine(folder: str) -> partial[VllmBackend]:
    return partial(
        VllmBackend,
        folder,
        kv_cache_bytes=KV_BYTES,
        max_model_len=2_048,
        collect_stats=True,
        max_num_seqs=16,
        engine_args={"dtype": DTYPE},
    )


OPTIONS = ReplicaOptions(number=2, num_cpus=1, max_open=16, health_s=1.0, drain_s=10)


@asynccontextmanager
async def replicas(make_engine: Callable[[], Any], options: ReplicaOptions) -> AsyncIterator[Any]:
    """A handle of them, on a cluster of their own."""
    cluster = Cluster(lambda: engines(make_engine, options), app_name=APP, num_cpus=4)
    began_s = time.monotonic()
    handle = await cluster.start(lambda line: console.print(line))
    try:
        await RayReplicas(handle).facts()
        console.print(f"two replicas are ready after {time.monotonic() - began_s:.0f} s")
        yield handle
    finally:
        await cluster.aclose()


@asynccontextmanager
async def reaching(handle: Any, choosing: ReplicaChooser) -> AsyncIterator[ReplicaStreams]:
    streams = ReplicaStreams(RayReplicas(handle), choosing)
    touching = asyncio.create_task(streams.send_heartbeats_forever())
    try:
        yield streams
    finally:
        touching.cancel()
        await asyncio.wait([touching])


def process_of(replica_id: str) -> int:
    """The process id of a replica, as Serve's controller knows it."""
    told = serve.context._get_global_client().get_serve_details()
    there = told["applications"][APP]["deployments"][ENGINES]["replicas"]
    return next(int(each["pid"]) for each in there if each["replica_id"] == replica_id)


# ----------------------------------------------------------------------------------------------------------------- demo


class ByReplica(ReplicaChooser):
    """Notes which queries have shown nothing yet."""

    def __init__(self) -> None:
        super().__init__(RoundRobin(), clock=clock.monotonic)
        self._shown: set[str] = set()

    def record_computed(
        self, stream_id: str, token_ids: Sequence[int], replica_id: str, *, is_complete: bool = True
    ) -> None:
        if is_complete:
            self._shown.add(stream_id)
        super().record_computed(stream_id, token_ids, replica_id, is_complete=is_complete)

    async def busiest(self) -> str:
        """The replica with most queries that have shown nothing, once there is such a query."""
        while True:
            waiting = Counter(name for each, name in self._replica_of.items() if name and each not in self._shown)
            if waiting:
                return waiting.most_common(1)[0][0]
            await asyncio.sleep(0.005)


class OneOnly(RoundRobin):
    """All queries go to one replica, as if there were no other."""

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        return sorted(replica.id for replica in replicas)[:1]


async def demo(folder: str) -> None:
    """Asks two replicas, kills one of them under load, and compares the answers with those of one engine."""
    given = queries(48, 6.0, parts=4, gap_s=0.3)
    async with replicas(engine(folder), OPTIONS) as handle, AsyncExitStack() as stack:
        async with reaching(handle, ReplicaChooser(OneOnly(), clock=clock.monotonic)) as alone:
            expected = await load(alone.generate, given)
        console.print("one engine alone has answered all queries")
        choosing = ByReplica()
        streams = await stack.enter_async_context(reaching(handle, choosing))
        asking = asyncio.create_task(load(streams.generate, given))
        await asyncio.sleep(given[len(given) // 3].at_s)
        killed = process_of(await choosing.busiest())
        os.kill(killed, signal.SIGKILL)
        console.print(f"killed the replica with process id {killed}, under load")
        asked = await asking
    counts = streams.counts
    shown_nothing = [each for each in asked if each.error and not each.token_ids]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(asked, expected, strict=True) if not a.error)
    console.print(f"asked                                   {counts.num_asked}")
    console.print(f"answered                                {counts.num_answered}")
    console.print(f"replayed on the other replica           {counts.num_replayed}")
    console.print(f"had shown tokens, ended with the error  {counts.num_lost}")
    console.print(f"had shown nothing, and were lost        {len(shown_nothing)}")
    console.print(f"answers equal to those of one engine    {equal} of {counts.num_answered}")
    for text, num in Counter(each.error.partition(" (")[0] for each in asked if each.error).items():
        console.print(f"  {num} x {text}")
    if shown_nothing or not counts.num_replayed or equal != counts.num_answered:
        raise SystemExit(
            "that is not what should be: none lost that had shown nothing, some replayed, all answers equal"
        )
    console.print("no query that had shown nothing was lost")


# ---------------------------------------------------------------------------------------------------------------- bench


def provenance(command: str) -> dict[str, Any]:
    """How figures came to be."""
    return {
        "command": f"python -m studies.ray.run {command}",
        "versions": versions() | installed_versions("ray"),
    }


# ---------------------------------------------------------------------------------------------------------------- costs


class Ages(ReplicaChooser):
    """Notes how old what replicas tell is when the router hears of it. Replicas are on this machine: one clock."""

    def __init__(self) -> None:
        super().__init__(RoundRobin(), clock=clock.monotonic)
        self.seen: dict[str, float] = {}
        self.ages_s: list[float] = []

    def rank(self, stream_id: str, opening: Any, candidates: Any) -> list[str]:
        for each in candidates:
            reported_s = each.stats.get("reported_s")
            if reported_s is not None and self.seen.get(each.id) != reported_s:
                self.seen[each.id] = reported_s
                self.ages_s.append(time.monotonic() - reported_s)
        return super().rank(stream_id, opening, candidates)


class Holding:
    """Replicas that take every stream, and never answer. See `replica_streams.Replicas`."""

    async def open(self, call: Open) -> AsyncGenerator[tuple[WireEvent, ...], None]:
        yield (Opened("r0"),)
        await asyncio.Event().wait()

    async def update(self, replica_id: str, stream_id: str, delta: Delta) -> bool:
        return True

    async def send_heartbeat(self, replica_id: str, caller_id: str) -> None:
        pass


NUM_HELD, NUM_TOKENS = 100, 4_000


async def held_bytes(*ends: int) -> float:
    """What Python has allocated in the caller for a stream that is open, whose prompt has grown to these lengths."""

    async def prompts(number: int) -> AsyncIterator[Prompt]:
        token_ids: tuple[int, ...] = ()
        for end in ends:
            known, token_ids = (
                len(token_ids),
                (*token_ids, *range(1_000 * number + len(token_ids), 1_000 * number + end)),
            )
            yield Prompt(token_ids, known, is_complete=False)
        await asyncio.Event().wait()

    async def hold(number: int) -> None:
        async with aclosing(streams.generate(prompts(number), PARAMS)) as events:
            async for _ in events:
                pass

    async def settle() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        gc.collect()

    streams = ReplicaStreams(Holding(), ReplicaChooser(make_router("soonest"), clock=clock.monotonic))
    first = asyncio.create_task(hold(1_000))  # whatever is made once
    await settle()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    holding = [asyncio.create_task(hold(number)) for number in range(1, NUM_HELD + 1)]
    await settle()
    per_stream = (tracemalloc.get_traced_memory()[0] - before) / NUM_HELD
    tracemalloc.stop()
    for task in (first, *holding):
        task.cancel()
    await asyncio.wait([first, *holding])
    return per_stream


def choosing_ms(num_replicas: int) -> float:
    """Processor time of a ticket and its ranking by "soonest", for a prompt of 4,096 tokens; best of three rounds."""
    choosing = ReplicaChooser(make_router("soonest"), clock=clock.monotonic)
    stats = {"tokens_per_s": 1e4, "num_kv_tokens": 436_000, "reported_s": 1.0}
    there = [
        ReplicaCandidate(f"r{number}", 256, {**stats, "kv_usage": number / num_replicas}, 0.0)
        for number in range(num_replicas)
    ]
    rng, best_s = random.Random(0), float("inf")
    given = [Prompt((*range(1_024), *(rng.randrange(100_000) for _ in range(3_072))), 0, False) for _ in range(20)]
    choosing.ticket("first", given[0]).rank(there)
    for number in range(num_replicas):  # what they share lies everywhere
        choosing.record_computed("first", given[0].token_ids, f"r{number}")
    for turn in range(3):
        began_s = time.process_time()
        for number, prompt in enumerate(given):
            choosing.ticket(f"{turn} {number}", prompt).rank(there)
        best_s = min(best_s, (time.process_time() - began_s) / len(given))
        for number in range(len(given)):
            choosing.record_ended(f"{turn} {number}")
    return 1e3 * best_s


async def holds() -> dict[str, Any]:
    """What choosing takes, and what a caller holds for each open stream."""
    return {
        "choosing_ms": {str(num): choosing_ms(num) for num in (2, 64, 1_000)},
        "bytes_per_open_stream": {
            "prompt of 4,000 tokens": await held_bytes(NUM_TOKENS),
            "opened with 1,000 of 4,000 tokens": await held_bytes(NUM_TOKENS // 4, NUM_TOKENS),
            "prompt of 1 token": await held_bytes(1),
        },
    }


async def costs(num: int) -> dict[str, Any]:
    """Milliseconds of Ray's own, where engines answer at once."""
    async with replicas(partial(ScriptedBackend, "x" * 64), replace(OPTIONS, num_cpus=0.5)) as handle:
        choosing = Ages()
        streams = ReplicaStreams(RayReplicas(handle), choosing)
        opened_s, update_s, event_s = [], [], []
        for number in range(num):
            first, done = asyncio.Event(), asyncio.Event()
            small = Prompt(tuple(range(1_000)), 0, False)

            async def prompts(small: Prompt = small, first: asyncio.Event = first) -> AsyncIterator[Prompt]:
                yield small
                await first.wait()
                yield Prompt((*small.token_ids, *range(200)), 1_000, True)

            began_s = time.monotonic()
            async with aclosing(streams.generate(prompts(), SamplingParams(max_tokens=64))) as events:
                told_s: list[float] = []
                async for event in events:
                    now_s = time.monotonic()
                    if not told_s and not first.is_set():
                        opened_s.append(now_s - began_s)
                        began_s = now_s
                        first.set()
                    elif isinstance(event, AnswerChunk):
                        told_s.append(now_s)
                update_s.append(told_s[0] - began_s)
                event_s.append((told_s[-1] - told_s[0]) / (len(told_s) - 1))
            done.set()
            if number % 10 == 9:
                await asyncio.sleep(0.05)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 15:
            async with aclosing(streams.generate(_one(), SamplingParams(max_tokens=1))) as events:
                async for _ in events:
                    pass
        ages_s = choosing.ages_s[4:]
    milliseconds: dict[str, Any] = {}
    for name, values in (
        ("open_ms", opened_s),
        ("update_ms", update_s),
        ("event_ms", event_s),
        ("stats_age_ms", ages_s),
    ):
        milliseconds[name] = {
            "p50": 1e3 * statistics.median(values),
            "p95": 1e3 * percentile(values, 0.95),
            "p99": 1e3 * percentile(values, 0.99),
            "num": len(values),
        }
    return milliseconds


async def _one() -> AsyncIterator[Prompt]:
    yield Prompt((1, 2, 3), 0, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["demo", "costs", "holds"])
    parser.add_argument("--num", type=int, default=64, help="queries of costs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    found: Any = None
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "costs":
            found = {**provenance(f"costs --num {arguments.num}"), **asyncio.run(costs(arguments.num))}
            table = Table("milliseconds", "P50", "P95", "P99", "measured")
            for name in ("open_ms", "update_ms", "event_ms", "stats_age_ms"):
                row = found[name]
                table.add_row(name, *[f"{row[each]:.2f}" for each in ("p50", "p95", "p99")], str(row["num"]))
            console.print(table)
        elif arguments.what == "holds":
            found = {**provenance("holds"), **asyncio.run(holds())}
            console.print(found)
        else:
            asyncio.run(demo(str(make_tiny_llama(Path(folder) / "model", **MODEL))))
    if arguments.json is not None and found is not None:
        write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: Ray and the replicas have been ended")
