"""Runs cells from all sections of the paper's evaluation, and writes a digest of each cell's numbers.

    python -m studies.paper.sample [--cells 60] [--json FILE] [--against FILE]

Two such files are equal when the simulated scheduler made the same decisions: with two versions of our code, or with
two releases of vLLM. `--against` prints the cells whose numbers differ from another file's.
"""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from streamrag.cli.output import Output
from streamrag_bench.cell import CellSettings
from streamrag_bench.store import CellStore, read_cell
from studies.folders import KEPT

from . import report
from .plan import SHORT, expected_s, make_plan
from .results import code_hash, run

NOT_NUMBERS = ("wall_s", "provenance")
"""What differs between two runs of the same cell."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--queries", type=int, help="at most so many queries a cell: to try it out")
    parser.add_argument("--json", type=Path, help="where the digests go")
    parser.add_argument("--against", type=Path, help="digests of another run, to compare with")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    return parser.parse_args()


def sampled_cells(num_cells: int, num_queries: int | None) -> list[CellSettings]:
    """As many cells of each section as of any other, evenly spaced in it; some sections have no cells of their own."""
    plans = [make_plan(SHORT, section.wanted(SHORT)) for section in report.SECTIONS]
    sections = [cells for plan in plans if (cells := [cell for cells in plan.values() for cell in cells])]
    chosen: dict[CellSettings, None] = {}
    for index, cells in enumerate(sections):
        share = (num_cells - len(chosen)) // (len(sections) - index)
        new = [cell for cell in cells if cell not in chosen]
        chosen.update(dict.fromkeys(new[(2 * i + 1) * len(new) // (2 * share)] for i in range(min(share, len(new)))))
    return [replace(cell, num_queries=num_queries or cell.num_queries) for cell in chosen]


def digest_of(path: Path) -> str:
    """Hash of all numbers of a result, 16 hexadecimal digits."""
    numbers = {name: value for name, value in asdict(read_cell(path)).items() if name not in NOT_NUMBERS}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def main() -> int:
    arguments = parse()
    console = Output()
    cells = sampled_cells(arguments.cells, arguments.queries)
    store = CellStore(KEPT / "paper-sample" / code_hash())
    if failed := run(sorted(cells, key=expected_s, reverse=True), store, arguments.processes):
        raise SystemExit(f"{len(failed)} cells failed; the same command tries them again")
    digests = {json.dumps(asdict(cell), sort_keys=True): digest_of(store.path(cell)) for cell in cells}
    if arguments.json:
        arguments.json.write_text(json.dumps(digests, indent=1) + "\n")
    if not arguments.against:
        console.print_line(f"{len(digests)} cells")
        return 0
    others = json.loads(arguments.against.read_text())
    different = [cell for cell, digest in digests.items() if others.get(cell) != digest]
    for cell in different:
        console.print_line(f"differs: {cell}")
    console.print_line(f"{len(digests) - len(different)} of {len(digests)} cells have the same numbers")
    return 1 if different else 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
