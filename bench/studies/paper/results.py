"""Runs the cells that are missing, and reads what all of them found."""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from streamrag.cli.output import Output
from streamrag_bench.cell import CellSettings
from streamrag_bench.cli.bench.display import CellsView
from streamrag_bench.report.comparison import Pool
from streamrag_bench.runner import CellFailed, run_cells
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import Digest, digest

from .plan import Plan, expected_s
from .points import Point, more_of
from .ways import Way

SIMULATOR = (
    "streamrag.core",
    "streamrag.records",
    "streamrag.engine",
    "streamrag.backends.simulated",
    "streamrag.backends.vllm",
    "streamrag_bench.trace.generate",
    "streamrag_bench.arms",
    "streamrag_bench.request_results",
    "streamrag_bench.simulate",
    "streamrag_bench.simulated_step_times",
    "streamrag.backends.simulated.virtual_time",
    "streamrag_bench.workload",
)
"""Modules and packages on which a cell's result depends."""


def code_hash() -> str:
    """Of the code that cells run, but for its comments: results of other code are others. 12 hexadecimal digits."""
    found = hashlib.sha256()
    for name in SIMULATOR:
        spec = find_spec(name)
        assert spec is not None, name
        path = Path(str(spec.origin))
        for file in sorted(path.parent.rglob("*")) if spec.submodule_search_locations else [path]:
            if file.suffix == ".py":
                found.update(ast.dump(ast.parse(file.read_text())).encode())
            elif file.suffix == ".json":
                found.update(file.read_bytes())
    return found.hexdigest()[:12]


def run(cells: Sequence[CellSettings], store: CellStore, num_processes: int) -> list[CellFailed]:
    """The cells that have no result yet; the others stay."""
    todo = [cell for cell in cells if store.find(cell) is None]
    console = Output(stderr=True)
    console.print_line(f"{len(cells) - len(todo)} of {len(cells)} cells are finished, in {store.folder}")
    failed = []
    with CellsView(todo, console, work=expected_s) as view:
        for event in run_cells(todo, store, num_processes=num_processes):
            view.show(event)
            failed += [event] if isinstance(event, CellFailed) else []
    return failed


@dataclass(frozen=True)
class Results:
    """What the cells found, pooled over seeds."""

    pools: Mapping[tuple[Point, Way], Pool]

    def pool(self, point: Point, way: Way) -> Pool | None:
        """None if not all of its cells are there."""
        return self.pools.get((point, way))

    def all_seeds(self, point: Point, way: Way) -> Pool | None:
        """Of its first seed and of those that its like of `more_of` has; None if one of the two is not there."""
        first, more = self.pool(point, way), more_of(point)
        if more is None or not any(other.kind == more.kind for other, _ in self.pools):
            return first  # all of its seeds are there
        rest = self.pool(more, way)
        return Pool(first.digests + rest.digests) if first and rest else None

    def at(self, point: Point, ways: Sequence[Way]) -> Iterator[tuple[Way, Pool]]:
        """Those of these ways that are there."""
        for way in ways:
            if found := self.pool(point, way):
                yield way, found


def read(plan: Plan, store: CellStore) -> Results:
    """One file after the other, and of each what sections need: results are large, and there may be thousands."""
    pools = {}
    for key, cells in plan.items():
        paths = [store.find(cell) for cell in cells]
        if all(paths):
            pools[key] = Pool(tuple(_slim(digest(read_cell(path))) for path in paths if path))
    return Results(pools)


def _slim(of: Digest) -> Digest:
    nothing = dict.fromkeys(("ttft_s", "total_s", "retrieval_s", "gaps_s", "num_chunks", "num_tokens"), ())
    return replace(of, **nothing, num_recomputed=(), provenance={})  # type: ignore[arg-type]
