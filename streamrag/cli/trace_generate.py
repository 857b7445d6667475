"""`streamrag trace generate`: a workload like those of the Stream2LLM paper becomes a trace file."""

import argparse
from pathlib import Path

from streamrag.cli.output import Output

__all__ = ["add_parser"]


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command to the parser of `streamrag trace`."""
    generate = verbs.add_parser(
        "generate",
        help="make a workload like those of the Stream2LLM paper",
        description=(
            "Writes a trace with the published statistics of one of the Stream2LLM paper's workloads: crawled pages "
            "that are appended, or the pools of a vector search that replace each other. No text, only lengths."
        ),
        epilog="Example: streamrag trace generate crawler --queries 500 --seed 2 --output crawler-500.jsonl.gz",
    )
    generate.add_argument("workload", choices=("crawler", "anns"))
    generate.add_argument("--queries", type=int, metavar="N", help="how many (default: as published, 4322 or 500)")
    generate.add_argument("--seed", type=int, default=1, help="the same seed makes the same trace (%(default)s)")
    generate.add_argument("--qps", type=float, default=1.0, help="queries per second, arriving at random (%(default)s)")
    generate.add_argument(
        "--long-window",
        choices=("first", "last"),
        default="first",
        help="of a vector search: whether its long window is the one before its first pool or its last (%(default)s)",
    )
    generate.add_argument("--output", type=Path, metavar="FILE", help="gzip or zstd by suffix (WORKLOAD.jsonl.gz)")
    generate.add_argument("--force", action="store_true", help="replace the file that is there")
    generate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, write, and say what was written on stderr."""
    from streamrag.trace.generate import generate
    from streamrag.trace.statistics import describe
    from streamrag.trace.write import write_trace

    trace = generate(
        arguments.workload, arguments.queries, arguments.seed, arguments.qps, long_window=arguments.long_window
    )
    path = arguments.output or Path(f"{arguments.workload}.jsonl.gz")
    write_trace(trace, path, overwrite=arguments.force)
    statistics = describe(trace)
    Output(stderr=True).print(
        f"{path}: {statistics.num_queries} queries of {statistics.tokens_per_query.mean:.0f} tokens in "
        f"{statistics.chunks_per_query.mean:.2f} chunk events over {statistics.retrieval_s.mean:.2f} s (means)",
        soft_wrap=True,
    )
    return 0
