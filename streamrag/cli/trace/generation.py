"""`streamrag trace generate`: write a trace with the statistics of a workload of the Stream2LLM paper."""

import argparse
from pathlib import Path

from streamrag.cli.output import Output
from streamrag.trace.generate import generate
from streamrag.trace.statistics import describe
from streamrag.trace.write import write_trace

DESCRIPTION = """\
Writes a trace with the published statistics of one of the Stream2LLM paper's
workloads: crawled pages that are appended, or the pools of a vector search
that replace each other. No text, only lengths.
"""
EPILOG = """\
example:
  streamrag trace generate crawler --queries 500 --seed 2 --output crawler-500.jsonl.gz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's arguments, and its `run`."""
    parser.usage, parser.description, parser.epilog = "%(prog)s WORKLOAD [options]", DESCRIPTION, EPILOG
    add = parser.add_argument
    about = "crawler, which appends chunks, or anns, which replaces them"
    add("workload", choices=("crawler", "anns"), metavar="WORKLOAD", help=about)
    add("--queries", type=int, metavar="N", help="number of queries (as published: 4322 or 500)")
    add("--seed", type=int, default=1, metavar="N", help="the same seed makes the same trace (%(default)s)")
    add("--qps", type=float, default=1.0, metavar="QPS", help="queries per second, arriving at random (%(default)g)")
    about = "for anns: whether the longest gap precedes the first or the last pool (%(default)s)"
    add("--long-window", choices=("first", "last"), default="first", help=about)
    add("--output", type=Path, metavar="FILE", help="gzip or zstd by suffix (WORKLOAD.jsonl.gz)")
    add("--force", action="store_true", help="replace an existing file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate and write the trace, print a summary on stderr, return 0. TraceError for an old file without --force."""
    trace = generate(
        arguments.workload, arguments.queries, arguments.seed, arguments.qps, long_window=arguments.long_window
    )
    path = arguments.output or Path(f"{arguments.workload}.jsonl.gz")
    write_trace(trace, path, overwrite=arguments.force)
    statistics = describe(trace)
    Output(stderr=True).print_line(
        f"{path}: {statistics.num_queries} queries of {statistics.tokens_per_query.mean:.0f} tokens in "
        f"{statistics.chunks_per_query.mean:.2f} chunk events over {statistics.retrieval_s.mean:.2f} s (means)",
    )
    return 0
