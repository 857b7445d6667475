"""What is run: loads, fleets and routers, each cell in a process of its own."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from streamrag.engine.costs.profile_files import load_profile
from streamrag.routing import Router
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.router import ConsistentHash, RoundRobin
from streamrag.routing.soonest import OPEN_TOKENS, Soonest
from studies.folders import ROOT

from .fleet import FAULTS, Engine, simulate
from .lean import LeanEngine
from .loads import BLOCK, LOADS
from .prefix_affinity import PrefixAffinity
from .queue_routers import PowerOfTwo, ShortestQueue

PROFILE = "a40-llama8b-tp2"
KV_TOKENS = 436_000
"""Tokens that the KV of a replica holds."""
RATES = {
    "mooncake": 0.4,
    "azure": 5.0,
    "conversations": 3.0,
    "trees": 1.0,
    "rag": 0.6,
    "hot document": 0.6,
}
"""Queries a second and replica: half to nine tenths of what replicas can do that find nothing in their caches."""


def index() -> PrefixIndex:
    """A block of a load is what routers take for a token."""
    return PrefixIndex(block_size=1)


def soonest() -> Soonest:
    return Soonest(open_tokens=OPEN_TOKENS / BLOCK, index=index())


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "shortest queue": ShortestQueue,
    "consistent hash": ConsistentHash,
    "prefix affinity": lambda: PrefixAffinity(index=index()),
    "prefix affinity, 10": lambda: PrefixAffinity(imbalance=10, index=index()),
    "soonest": soonest,
}
SEVERAL = ("round robin", "consistent hash", "prefix affinity, 10", "soonest")
"""Routers of which several are tried side by side."""
SHARED = ("conversations", "trees", "rag")
"""Loads whose prompts have something in common."""


def digest(path: Path) -> str:
    """The beginning of a file's SHA-256, which tells whether finished runs had the same arrivals."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def code_digest() -> str:
    """Of the code that decides what a run gives: runs of other code are not kept."""
    found = hashlib.sha256()
    folders = ("streamrag/routing", "streamrag/engine", "streamrag/backends/simulated", "streamrag/backends/vllm")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files += [
        Path(__file__).with_name(f"{name}.py")
        for name in ("cells", "fleet", "lean", "loads", "prefix_affinity", "queue_routers", "whole")
    ]
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    load: str
    num_replicas: int
    router: str
    num_queries: int
    fault: str = ""
    rate: float = 0.0
    """Queries a second and replica; 0 is the load's own."""
    engine: str = "lean"
    trace: str = ""
    """The beginning of the SHA-256 of the file of its arrivals, whatever that is called; empty: they are generated."""
    seed: int = 1
    num_callers: int = 1
    """Who route, and do not know of each other."""
    is_sticky: bool = False
    """Whether a session always comes to the same caller."""


def make_engine(kind: str) -> Callable[[], Engine]:
    profile = load_profile(PROFILE)
    if kind == "whole":
        from .whole import WholeEngine  # vLLM takes seconds to import

        return lambda: WholeEngine(profile, KV_TOKENS)
    return lambda: LeanEngine(profile, KV_TOKENS)


def run_cell(cell: Cell, paths: Mapping[str, Path]) -> dict[str, Any]:
    """The cell and its figures. `paths` are files of traces, by load."""
    rate = (cell.rate or RATES[cell.load]) * cell.num_replicas
    files = {"path": paths[cell.load]} if cell.trace else {}
    queries = LOADS[cell.load](rate, cell.num_queries, cell.seed, **files)
    routers = [ROUTERS[cell.router]() for _ in range(cell.num_callers)]
    began_s = time.process_time()
    engine, fault = make_engine(cell.engine), FAULTS.get(cell.fault)
    outcome = simulate(cell.num_replicas, engine, routers, queries, fault, is_sticky=cell.is_sticky)
    return {**asdict(cell), **outcome.figures(), "cpu_s": time.process_time() - began_s}


def cells(scale: float, paths: Mapping[str, Path]) -> list[Cell]:
    """All that is run; `scale` stretches the number of queries. `paths` are files of traces, by load."""

    def num(base: int) -> int:
        return round(base * scale)

    found = []
    for router in ROUTERS:
        for load in LOADS:
            found.append(Cell(load, 2, router, num(500)))
            found.append(Cell(load, 8, router, num(1_500)))
        found += [Cell(load, 64, router, num(5_000)) for load in LOADS]
        found += [Cell("conversations", 8, router, num(1_500), fault) for fault in FAULTS]
        found.append(Cell("trees", 8, router, num(1_500), "killed"))
        found += [Cell("rag", 2, router, num(300), engine=engine) for engine in ("lean", "whole")]
        if router in ("round robin", "prefix affinity, 10", "soonest"):
            found += [
                Cell(load, 2, router, num(200), engine=engine)
                for load in ("conversations", "trees")
                for engine in ("lean", "whole")
            ]
    for router, num_callers in product(SEVERAL, (2, 4)):
        for load in SHARED:
            found.append(Cell(load, 8, router, num(1_500), num_callers=num_callers))
        found.append(Cell("conversations", 8, router, num(1_500), num_callers=num_callers, is_sticky=True))
    digests = {load: digest(path) for load, path in paths.items()}
    return [replace(cell, trace=digests.get(cell.load, "")) for cell in dict.fromkeys(found)]
