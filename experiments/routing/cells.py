"""What is run: loads, fleets and routers, each cell in a process of its own."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from streamrag.engine.costs.profile_files import load_profile
from streamrag.routing import Opening, ReplicaState, Router
from streamrag.routing.basic_routers import ConsistentHash, RoundRobin
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.soonest import OPEN_TOKENS, Soonest

from .fleet import FAULTS, Engine, simulate
from .flowguard import FlowGuard, MendedFlowGuard, Weights
from .lean import LeanEngine
from .loads import BLOCK, LOADS
from .prefix_affinity import PrefixAffinity
from .queue_routers import PowerOfTwo, ShortestQueue

PROFILE = "a40-llama8b-tp2"
PROFILES: Mapping[str, tuple[int, float]] = {PROFILE: (436_000, 1.0), "h100-llama8b-tp2": (890_000, 5.0)}
"""Tokens that the KV of a replica holds, and how many times the load's rate it is given."""
RATES = {
    "mooncake": 0.4,
    "azure": 5.0,
    "conversations": 3.0,
    "trees": 1.0,
    "rag": 0.6,
    "hot document": 0.6,
}
"""Queries a second and replica: half to nine tenths of what replicas can do that find nothing in their caches."""

Q_MAX = 16
"""The paper does not say what a queue is a share of. Else it is what an engine runs at once, 256 here."""


def index() -> PrefixIndex:
    """A block of a load is what routers take for a token."""
    return PrefixIndex(block_size=1)


def soonest(**options: Any) -> Soonest:
    return Soonest(**{"open_tokens": OPEN_TOKENS / BLOCK, "index": index(), **options})


class Constant(Soonest):
    """Ours, as if prompts did not grow."""

    def growth(self) -> int:
        return 0


class Blind:
    """A router that is not told some of what replicas are like."""

    def __init__(self, router: Router, **fields: Any) -> None:
        self._router, self._fields = router, fields
        self.routed, self.completed, self.lost = router.routed, router.completed, router.lost
        self.prefilled = router.prefilled

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        return self._router.rank(opening, [replace(replica, **self._fields) for replica in replicas], now_s)


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "shortest queue": ShortestQueue,
    "consistent hash": ConsistentHash,
    "prefix affinity": lambda: PrefixAffinity(index=index()),
    "prefix affinity, 10": lambda: PrefixAffinity(imbalance=10, index=index()),
    "FlowGuard": FlowGuard,
    "FlowGuard, mended": lambda: MendedFlowGuard(index=index()),
    "FlowGuard, Qmax 16": lambda: Blind(FlowGuard(), max_open=Q_MAX),
    "mended, Qmax 16": lambda: Blind(MendedFlowGuard(index=index()), max_open=Q_MAX),
    "soonest": soonest,
}
FLOWGUARD_WITHOUT: Mapping[str, Callable[[], Router]] = {
    "FlowGuard": FlowGuard,
    "without C": lambda: FlowGuard(Weights(cache=0)),
    "without M": lambda: FlowGuard(Weights(memory=0)),
    "without Q": lambda: FlowGuard(Weights(queue=0)),
    "without L": lambda: FlowGuard(Weights(load=0)),
    "without exclusion": lambda: FlowGuard(threshold=inf),
    "without staleness": lambda: FlowGuard(stale_s=inf),
    "C of the prompt": lambda: MendedFlowGuard(index=index(), memory_divisor=100),
    "M not divided": lambda: FlowGuard(memory_divisor=1),
    "both: mended": lambda: MendedFlowGuard(index=index()),
}
SOONEST_WITHOUT: Mapping[str, Callable[[], Router]] = {
    "soonest": soonest,
    "without the prefix": lambda: soonest(index=PrefixIndex(max_blocks=0)),
    "without the queue": lambda: Blind(soonest(), num_new_tokens=0),
    "without the speed": lambda: Blind(soonest(), tokens_per_s=0.0),
    "without open queries": lambda: soonest(open_tokens=0),
    "recomputing counts once": lambda: soonest(recompute=1.0),
    "without growth": lambda: Constant(open_tokens=OPEN_TOKENS / BLOCK, index=index()),
}
SEVERAL = ("round robin", "consistent hash", "prefix affinity, 10", "soonest")
"""Routers of which several are tried side by side."""
PARAMETERS: Mapping[str, Callable[[], Router]] = {
    "soonest": soonest,
    **{f"open {num:g}": partial(soonest, open_tokens=num / BLOCK) for num in (128, 1_152)},
    **{f"recompute {num:g}": partial(soonest, recompute=num) for num in (1.0, 4.0)},
}
SETS = {
    "routers": ROUTERS,
    "FlowGuard": FLOWGUARD_WITHOUT,
    "soonest": SOONEST_WITHOUT,
    "parameters": PARAMETERS,
    "callers": ROUTERS,
}
SEEDS = (1, 2, 3)
"""Of the parameters. The others have the first."""
SHORT_KV = 0.2
"""Of the profile's KV, where memory is to count."""
BEYOND = 4.0
"""Times the usual rate, where throughput is to be seen: more than the replicas can do."""
SHARED = ("conversations", "trees", "rag")
"""Loads whose prompts have something in common."""


def digest(path: Path) -> str:
    """The beginning of a file's SHA-256, which tells whether finished runs had the same arrivals."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def code_digest() -> str:
    """Of the code that decides what a run gives: runs of other code are not kept."""
    root, found = Path(__file__).parents[2], hashlib.sha256()
    folders = ("streamrag/routing", "streamrag/engine", "streamrag/backends/simulated", "streamrag/backends/vllm")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    files += [
        Path(__file__).with_name(f"{name}.py")
        for name in ("cells", "fleet", "flowguard", "lean", "loads", "queue_routers", "whole")
    ]
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    load: str
    num_replicas: int
    of: str
    router: str
    num_queries: int
    fault: str = ""
    rate: float = 0.0
    """Queries a second and replica; 0 is the load's own."""
    engine: str = "lean"
    trace: str = ""
    """The beginning of the SHA-256 of the file of its arrivals, whatever that is called; empty: they are generated."""
    seed: int = 1
    profile: str = PROFILE
    num_callers: int = 1
    """Who route, and do not know of each other."""
    is_sticky: bool = False
    """Whether a session always comes to the same caller."""
    kv_share: float = 1.0
    """Of the profile's KV that a replica has."""
    is_foretold: bool = False
    """Whether routers are told the complete prompt when a query opens."""


def make_engine(kind: str, profile_name: str = PROFILE, kv_share: float = 1.0) -> Callable[[], Engine]:
    profile, kv_tokens = load_profile(profile_name), round(PROFILES[profile_name][0] * kv_share)
    if kind == "whole":
        from .whole import WholeEngine  # vLLM takes seconds to import

        return lambda: WholeEngine(profile, kv_tokens)
    return lambda: LeanEngine(profile, kv_tokens, looks_again=kind != "looks once")


def run_cell(cell: Cell, paths: Mapping[str, Path]) -> dict[str, Any]:
    """The cell and its figures. `paths` are files of traces, by load."""
    rate = (cell.rate or RATES[cell.load]) * cell.num_replicas * PROFILES[cell.profile][1]
    files = {"path": paths[cell.load]} if cell.trace else {}
    queries = LOADS[cell.load](rate, cell.num_queries, cell.seed, **files)
    engine = make_engine(cell.engine, cell.profile, cell.kv_share)
    routers = [SETS[cell.of][cell.router]() for _ in range(cell.num_callers)]
    began_s = time.process_time()
    fault = FAULTS.get(cell.fault)
    outcome = simulate(
        cell.num_replicas, engine, routers, queries, fault, is_sticky=cell.is_sticky, is_foretold=cell.is_foretold
    )
    return {**asdict(cell), **outcome.figures(), "cpu_s": time.process_time() - began_s}


def cells(scale: float, paths: Mapping[str, Path]) -> list[Cell]:
    """All that is run; `scale` stretches the number of queries. `paths` are files of traces, by load."""

    def num(base: int) -> int:
        return round(base * scale)

    found = []
    for router in ROUTERS:
        for load in LOADS:
            found.append(Cell(load, 2, "routers", router, num(500)))
            found.append(Cell(load, 8, "routers", router, num(1_500)))
        found += [Cell(load, 64, "routers", router, num(5_000)) for load in LOADS]
        found += [Cell("conversations", 8, "routers", router, num(1_500), fault) for fault in FAULTS]
        found.append(Cell("trees", 8, "routers", router, num(1_500), "killed"))
        found += [Cell("azure", 2, "routers", router, num(800), rate=rate) for rate in (1.0, 3.0)]
        found += [Cell("rag", 2, "routers", router, num(300), engine=engine) for engine in ("lean", "whole")]
        if router in ("round robin", "prefix affinity, 10", "soonest"):
            found.append(Cell("rag", 8, "routers", router, num(1_500), engine="looks once"))
            found += [
                Cell(load, 2, "routers", router, num(200), engine=engine)
                for load in ("conversations", "trees")
                for engine in ("lean", "whole")
            ]
    for router, num_callers in product(SEVERAL, (1, 2, 4)):
        for load in SHARED:
            found.append(Cell(load, 8, "callers", router, num(1_500), num_callers=num_callers))
        sticky = Cell("conversations", 8, "callers", router, num(1_500), num_callers=num_callers, is_sticky=True)
        found += [sticky] * (num_callers > 1)
    for router, profile in product(PARAMETERS, PROFILES):
        for load, seed in product(LOADS, SEEDS):
            found.append(Cell(load, 8, "parameters", router, num(1_500), seed=seed, profile=profile))
        found.append(Cell("hot document", 64, "parameters", router, num(5_000), profile=profile))
    for of in ("FlowGuard", "soonest"):
        for router in SETS[of]:
            found += [Cell(load, 8, of, router, num(1_500)) for load in SHARED]
            found.append(Cell("conversations", 8, of, router, num(1_500), "slow"))
            for load in SHARED:
                found.append(Cell(load, 2, of, router, num(1_500)))
                found.append(Cell(load, 2, of, router, num(1_500), rate=BEYOND * RATES[load]))
            if of == "FlowGuard":
                found += [Cell(load, 8, of, router, num(1_500), kv_share=SHORT_KV) for load in ("mooncake", *SHARED)]
    for router in ("soonest", "without growth"):
        found += [Cell("rag", 8, "soonest", router, num(1_500), seed=seed) for seed in (2, 3, 4, 5)]
    for load, seed in product(("rag", "hot document"), SEEDS):
        found.append(Cell(load, 8, "soonest", "soonest", num(1_500), seed=seed, is_foretold=True))
    digests = {load: digest(path) for load, path in paths.items()}
    return [replace(cell, trace=digests.get(cell.load, "")) for cell in dict.fromkeys(found)]
