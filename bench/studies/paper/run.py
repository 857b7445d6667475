"""Runs the cells of the paper's evaluation and of ours beside it, and writes the report.

    python -m studies.paper.run [--only SECTION,...] [--report FILE]

Finished cells stay in a folder that is named after the code they ran, and the same command goes on there.
"""

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from streamrag.cli.output import Output
from streamrag_bench.store import CellStore
from studies.folders import KEPT

from . import report
from .plan import SHORT, Plan, Scale, in_order, make_plan, total_s
from .results import code_hash, read, run

README = Path(__file__).with_name("README.md")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studies.paper.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = ", ".join(section.name for section in report.SECTIONS)
    add("--only", default="", metavar="NAME,...", help=f"run the cells of these sections only: {names}")
    add("--report", type=Path, metavar="FILE", help="default: README.md beside this file")
    add("--queries", type=int, metavar="N", help="at most so many queries a cell: to try it out")
    add("--seeds", type=int, metavar="N", help="at most so many seeds a point: to try it out")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=KEPT / "paper", metavar="FOLDER", help="default: %(default)s")
    add("--plan", action="store_true", help="only say how many cells there are, and how long they take")
    add("--write", action="store_true", help="only write the report of what is there")
    arguments = parser.parse_args()
    known = {section.name for section in report.SECTIONS}
    if unknown := set(filter(None, arguments.only.split(","))) - known:
        parser.error(f"there is no section {', '.join(unknown)}; choose from {names}")
    if (arguments.queries or arguments.seeds) and not (arguments.report or arguments.plan):
        parser.error("a smaller scale needs a --report of its own")
    arguments.report = arguments.report or README
    return arguments


def scaled(scale: Scale, num_queries: int | None, num_seeds: int | None) -> Scale:
    """At most so many queries and seeds."""
    sizes = {
        kind: size._replace(
            seeds=size.seeds[:num_seeds],
            num_crawls=min(size.num_crawls, num_queries or size.num_crawls),
            num_searches=min(size.num_searches or num_queries, num_queries) if num_queries else size.num_searches,
        )
        for kind, size in scale.sizes.items()
    }
    return replace(scale, sizes=sizes)


def plan_of(scale: Scale, names: Iterable[str]) -> Plan:
    """The cells of these sections; of all if there are none."""
    chosen = set(filter(None, names)) or {section.name for section in report.SECTIONS}
    return make_plan(scale, [each for s in report.SECTIONS if s.name in chosen for each in s.wanted(scale)])


def main() -> None:
    arguments = parse()
    console = Output()
    scale = scaled(SHORT, arguments.queries, arguments.seeds)
    whole, plan = plan_of(scale, ()), plan_of(scale, arguments.only.split(","))
    store = CellStore(arguments.output / code_hash())
    if arguments.plan:
        for section in report.SECTIONS:
            cells = [cell for cells in make_plan(scale, section.wanted(scale)).values() for cell in cells]
            console.print_line(f"{section.name}: {len(cells)} cells, {total_s(cells):,.0f} s of one core")
        cells = [cell for cells in plan.values() for cell in cells]
        console.print_line(f"all, each once: {len(cells)} cells, {total_s(cells):,.0f} s of one core")
        return
    failed = [] if arguments.write else run(in_order(plan), store, arguments.processes)
    report.write(arguments.report, scale, whole, read(whole, store))
    console.print_line(f"written: {arguments.report}")
    if failed:
        raise SystemExit(f"{len(failed)} cells failed; the same command tries them again")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
