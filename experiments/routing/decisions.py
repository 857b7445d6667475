"""What a decision costs, and what a router holds."""

import random
import time
import tracemalloc
from collections.abc import Iterator

from streamrag.routing import Opening, ReplicaTracker, Report, make_router

from .routers import ALL_ROUTERS

NUM_TOKENS = 4_096
NUM_DECISIONS = 50
SIZES = (2, 64, 1_000)


def prompts(num: int, rng: random.Random) -> list[Opening]:
    """Of 4,096 tokens, of which they share 1,024."""
    system = tuple(range(1_024))
    return [
        Opening((*system, *(rng.randrange(100_000) for _ in range(NUM_TOKENS - 1_024))), session=str(n))
        for n in range(num)
    ]


def microseconds() -> Iterator[dict[str, object]]:
    """Of the processor, for choosing and noting a decision, the best of three rounds; and for reading the tracker."""
    openings = prompts(NUM_DECISIONS, random.Random("decisions"))
    for num_replicas in SIZES:
        names = [f"r{n}" for n in range(num_replicas)]
        tracker = ReplicaTracker()
        for name in names:
            tracker.reported(name, Report(256, 0.5, 0.5, 0, 436_000, 10_000.0), 0.0)
        tracker.states(names)
        began_s = time.process_time()
        for n in range(10):
            tracker.routed(str(n), names[n % num_replicas], 1)
            states = tracker.states(names)
        yield {"what": "tracker", "num_replicas": num_replicas, "us": (time.process_time() - began_s) / 10 * 1e6}
        for router_name, make in ALL_ROUTERS.items():
            router = make()
            for name in names:
                router.completed(openings[0].token_ids, name)
            best_s = float("inf")
            for _ in range(3):
                began_s = time.process_time()
                for opening in openings:
                    router.routed(opening, router.rank(opening, states, 0.0)[0])
                best_s = min(best_s, (time.process_time() - began_s) / NUM_DECISIONS)
            yield {"what": router_name, "num_replicas": num_replicas, "us": best_s * 1e6}


def held_bytes() -> dict[str, float]:
    """Per open query in the tracker, per replica there, and per block in the index."""
    tracemalloc.start()
    tracker, num = ReplicaTracker(), 2_000
    before = tracemalloc.get_traced_memory()[0]
    for n in range(num):
        tracker.reported(f"replica-{n}", Report(256, n / num, n / num, n, 436_000 + n, float(n)), float(n))
    tracker.states(f"replica-{n}" for n in range(num))
    replica = (tracemalloc.get_traced_memory()[0] - before) / num
    before = tracemalloc.get_traced_memory()[0]
    for n in range(num):
        tracker.routed(f"query-{n}", f"replica-{n}", 1_000 + n)
    tracker.states(f"replica-{n}" for n in range(num))
    query = (tracemalloc.get_traced_memory()[0] - before) / num
    router = make_router("soonest")
    openings = prompts(200, random.Random("bytes"))
    before = tracemalloc.get_traced_memory()[0]
    for n, opening in enumerate(openings):
        router.completed(opening.token_ids, f"replica-{n}")
    block = (tracemalloc.get_traced_memory()[0] - before) / (200 * NUM_TOKENS / 64)
    tracemalloc.stop()
    return {"per_open_query": query, "per_replica": replica, "per_block_of_the_index": block}
