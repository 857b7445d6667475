"""`streamrag trace`: show a trace, or generate one."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from streamrag.cli.output import Output
from streamrag.cli.record import WORDS, WORDS_NOTE
from streamrag.display_text import one_line
from streamrag.errors import ConfigurationError
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace
from streamrag.trace.write import write_trace
from streamrag_bench.trace.generate import generate
from streamrag_bench.trace.picture import draw_trace
from streamrag_bench.trace.statistics import Distribution, TraceStatistics, describe

DESCRIPTION = """\
A trace is a record of retrieval for some questions: the chunks, their times and
their sizes. `streamrag record` writes one, `streamrag bench` replays it.
"""
EPILOG = """\
examples:
  streamrag trace show crawl.jsonl.gz
  streamrag trace generate crawler --queries 500 --output crawler-500.jsonl.gz

`streamrag trace VERB --help` has more.
"""
GENERATE_DESCRIPTION = """\
Writes a trace with the published statistics of one of the Stream2LLM paper's
workloads: crawled pages that are appended, or the pools of a vector search
that replace each other. No text, only lengths.
"""
GENERATE_EPILOG = """\
example:
  streamrag trace generate crawler --queries 500 --seed 2 --output crawler-500.jsonl.gz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show",
        help="print a trace's statistics and draw its distributions",
        description="Prints the statistics of a trace, and plots the times and sizes of its chunks.",
        epilog="example:\n  streamrag trace show crawl.jsonl.gz --plot crawl.png",
    )
    show.add_argument("file", type=Path, metavar="FILE", help="trace of `streamrag record` or of another verb")
    show.add_argument("--plot", type=Path, metavar="PNG", help="file for the plot (FILE.png)")
    show.add_argument("--no-plot", action="store_true", help="do not write a plot")
    show.add_argument("--json", action="store_true", help="print JSON, and plot only with --plot")
    show.set_defaults(run=_show)
    add_generate_arguments(verbs.add_parser("generate", help="make a workload like those of the Stream2LLM paper"))


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of `generate`, and its `run`."""
    parser.usage = "%(prog)s WORKLOAD [options]"
    parser.description, parser.epilog = GENERATE_DESCRIPTION, GENERATE_EPILOG
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
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
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


def _show(arguments: argparse.Namespace) -> int:
    """Print statistics as a table or JSON; draw to --plot or, without --json, beside the trace, unless --no-plot."""
    trace = read_trace(arguments.file)
    statistics = describe(trace)
    console = Output()
    if arguments.json:
        console.print_json_text({**statistics.as_dict(), "provenance": dict(trace.provenance)})
    else:
        _print(console, arguments.file, trace, statistics)
    plot = arguments.plot or (None if arguments.json else arguments.file.with_name(f"{arguments.file.name}.png"))
    if plot and not arguments.no_plot:
        _draw(plot, arguments.file.name, trace, statistics)
    return 0


def _draw(plot: Path, title: str, trace: Trace, statistics: TraceStatistics) -> None:
    """Draw the trace, and print the path on stderr.

    :raises ConfigurationError: the plot cannot be written.
    """
    try:
        draw_trace(plot, trace, statistics, title=title)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; name another place with --plot, or use --no-plot") from error
    Output(stderr=True).print_line(f"drawn: {plot}")


def _print(console: Output, file: Path, trace: Trace, statistics: TraceStatistics) -> None:
    """Print the trace's summary, provenance and notes, and a table of its distributions that are not empty."""
    texts = "with texts" if statistics.has_text else "without texts"
    console.print_line(f"{file}: {statistics.num_queries} queries, mode {statistics.mode}, {texts}")
    rate = f"{statistics.qps:.3g} arrivals per second" if statistics.qps else "all queries arrive at once"
    seen = f"{statistics.prefix_seen_share:.1%} of tokens in a prefix that an earlier query had too"
    console.print_line(f"{rate}; {seen}; {statistics.num_skipped} places skipped")
    for name, value in trace.provenance.items():
        if name != "notes":
            console.print_line(f"  {one_line(name)}: {one_line(str(value))}", style="dim")
    notes = list(trace.provenance.get("notes", ()))
    if statistics.num_incomplete:
        notes.append(f"{statistics.num_incomplete} retrievals failed or were cancelled")
    if trace.provenance.get("tokenizer") == WORDS:
        notes.append(WORDS_NOTE)
    for note in notes:
        console.print_line(f"note: {note}", style="yellow")
    table = Table("", "num", "mean", "P50", "P75", "P95", "P99", "max", box=None, pad_edge=False)
    for name, values, form in _rows(statistics):
        if values.num:
            figures = (values.mean, *(values.percentile(percent) for percent in (50, 75, 95, 99)), values.max)
            table.add_row(name, f"{values.num:,}", *(form(figure) for figure in figures))
    console.print_table(table)


def _rows(statistics: TraceStatistics) -> list[tuple[str, Distribution, Callable[[float], str]]]:
    """Return name, distribution and number format of each possible row of the table, empty distributions included."""
    whole, two = "{:,.0f}".format, "{:,.2f}".format
    return [
        ("tokens per query", statistics.tokens_per_query, whole),
        ("tokens per chunk", statistics.tokens_per_chunk, whole),
        ("chunk events per query", statistics.chunks_per_query, two),
        ("passages per query", statistics.passages_per_query, two),
        ("retrieval, s", statistics.retrieval_s, two),
        ("until first chunk, s", statistics.first_chunk_s, two),
        ("first chunk to end, s", statistics.first_chunk_to_end_s, two),
        ("gap between chunks, ms", statistics.gap_ms, lambda ms: f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"),
        ("changed by an update, %", statistics.changed_share, lambda share: f"{100 * share:.1f}"),
        ("tokens invalidated per query", statistics.num_invalidated, whole),
        ("between arrivals, s", statistics.interarrival_s, two),
        ("tokens per answer", statistics.num_output_tokens, whole),
    ]
