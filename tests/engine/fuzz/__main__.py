"""Plays many seeds, on as many processes as the machine has cores, two at most."""

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import ModuleType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.engine import fuzz

BATCH = 50
"""Seeds that a process plays before it says how it went."""


def main(fuzz: ModuleType = fuzz) -> int:
    parser = argparse.ArgumentParser(description=fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes; by default %(default)s"
    )
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    arguments = parser.parse_args()
    end = arguments.first + arguments.seeds
    batches = [range(start, min(start + BATCH, end)) for start in range(arguments.first, end, BATCH)]
    met: Counter[str] = Counter()
    failed: list[int] = []
    columns = (TextColumn("fuzz"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        task = progress.add_task("fuzz", total=arguments.seeds)
        futures = {pool.submit(fuzz.play_batch, batch): len(batch) for batch in batches}
        for future in as_completed(futures):
            met_here, failures = future.result()
            met.update(met_here)
            progress.advance(task, futures[future])
            for seed, text in failures:
                progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
                failed.append(seed)
            if failed and not arguments.all:
                pool.shutdown(cancel_futures=True)
                break
    for name, count in sorted(met.items()):
        print(f"{count:>12,}  {name}")
    for seed in sorted(failed):
        print(f"seed {seed} FAILED; repeat it:  python -m {fuzz.__name__} --first {seed} --seeds 1")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
