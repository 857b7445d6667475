"""`streamrag advise`: what streaming would save, from a log of an application's retrieval."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from streamrag.cli.output import Output, markup
from streamrag.trace.write import write_trace
from streamrag_bench.advice.advice import Advice, advise, first_token, name_of
from streamrag_bench.advice.logs import read_log
from streamrag_bench.advice.table import SEPARATORS
from streamrag_bench.cli.bench.options import DEFAULT_PROFILE, floats
from streamrag_bench.report.html import figure_text

DESCRIPTION = """Says what streaming would save and cost for the retrieval in a log, and which
settings to use (docs/advise.md). All times are simulated."""
EPILOG = """\
examples:
  streamrag advise queries.jsonl.gz
  streamrag advise langchain.jsonl --profile my-machine.json --qps 0.5,2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    about = "a trace, JSON lines of a LangChain application, OpenTelemetry spans, or a CSV with three columns"
    add("log", type=Path, metavar="LOG", help=about)
    add("--profile", default=DEFAULT_PROFILE, metavar="PROFILE", help="hardware: a name or a file (%(default)s)")
    add("--qps", type=floats, default=(), metavar="LIST", help="queries per second (the log's arrivals)")
    add("--output-tokens", type=int, default=64, metavar="N", help="tokens per answer (%(default)s)")
    add("--chunk-tokens", type=int, default=250, metavar="N", help="tokens of a chunk without a length (%(default)s)")
    add("--max-context-tokens", type=int, metavar="N", help="chunks that do not fit are left out")
    add("--trace", type=Path, metavar="FILE", help="also write the log as a trace, for `streamrag bench`")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    trace = read_log(arguments.log, arguments.chunk_tokens)
    if arguments.trace:
        write_trace(trace, arguments.trace, text="hash")
    limits = {"num_output_tokens": arguments.output_tokens, "max_context_tokens": arguments.max_context_tokens}
    advice = advise(trace, arguments.profile, qps=arguments.qps or (None,), **limits)
    if arguments.json:
        Output().print_json_text({**advice.as_json(), "log": dict(trace.provenance)})
    else:
        _print(advice, arguments.log, trace.provenance)
    return 0


def _print(advice: Advice, log: Path, provenance: Mapping[str, Any]) -> None:
    """Print the advice as one page: how the log was read, savings and costs, reasons, settings, error."""
    console = Output()
    console.print_line(markup("[bold]{}[/]: {} queries, simulated on {}", log, advice.num_queries, advice.hardware))
    if separator := provenance.get("separator"):
        console.print_line(f"Its columns are separated by {SEPARATORS.get(separator, repr(separator))}.")
    if num_broken := provenance.get("num_broken_spans"):
        console.print_line(
            markup("{} broken spans are left out, the first in {}", num_broken, provenance["first_broken_span"])
        )
    console.print("\nSimulated seconds from the end of retrieval to the first token, without streaming and saved:")
    names = ("without,\nP50", "saved,\nP50", "without,\nP95", "saved,\nP95", "engine\ntime")
    table = Table("", *names, box=None, pad_edge=False)
    for verdict in advice.verdicts:
        changes = [first_token(verdict, percentile) for percentile in ("p50", "p95")]
        figures = [figure_text(s) for c in changes for s in (c.baseline_s, c.baseline_s - c.arm_s)]
        table.add_row(name_of(verdict), *figures, f"{verdict.busy_s / verdict.baseline_busy_s - 1:+.0%}")
    console.print_table(table)
    for title, lines in (("Why not more", advice.reasons), ("Settings", advice.settings), ("Error", (advice.error,))):
        if lines:
            console.print(markup("\n[bold]{}", title))
            console.print("\n".join(f"- {line}" for line in lines))
