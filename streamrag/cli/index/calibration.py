"""`streamrag index calibrate`: measure how early a search's results are final, for `SelectiveUpdates`."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from rich.table import Table

from streamrag.bench.report.calibration_picture import draw_calibration
from streamrag.cli.output import Output
from streamrag.cli.progress import step_bars
from streamrag.cli.source_options import add_search_arguments, make_source
from streamrag.core.lifecycle import start_all
from streamrag.errors import ConfigurationError, require_modules
from streamrag.sources.emission.calibrate import calibrate
from streamrag.sources.emission.calibration import Calibration, Odds
from streamrag.sources.emission.calibration_queries import LeaveOneOut, draw_sentences, read_queries

DESCRIPTION = """\
Searches INDEX for many queries, and counts the stage of the search at which the
result was final: its set of passages, their order, and each prefix. The queries
come from a file, or are sentences of the index's passages; the passage of such
a sentence is left out of its results.
"""
EPILOG = """\
examples:
  streamrag index calibrate ./handbook-index --queries asked.txt --out calibration.json --plot calibration.png
  streamrag index calibrate ./handbook-index --rerank late-interaction --out calibration.json
"""


def add_parser(verbs: Any) -> None:
    """Define the verb's arguments, and its `run`."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure how early a search's results are final",
        usage="%(prog)s INDEX --out FILE [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("index", metavar="INDEX", help="made by `streamrag index build`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file for the calibration")
    parser.add_argument("--queries", type=Path, metavar="FILE", help="a text file with one query a line")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="file for a plot")
    parser.add_argument(
        "--num-queries", type=int, default=200, metavar="N", help="maximum number of queries (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed for the choice of sentences (%(default)s)"
    )
    add_search_arguments(parser.add_argument_group("the search, with the options of `streamrag ask`"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, with a progress bar on stderr."""
    if arguments.num_queries < 1:
        raise ConfigurationError(f"--num-queries {arguments.num_queries}: give 1 or more")
    for path in filter(None, (arguments.out, arguments.plot)):
        if not path.parent.is_dir():  # before minutes of work
            raise ConfigurationError(f"there is no folder {path.parent}; create it, or name another place")
    if arguments.plot:
        require_modules("plot", "matplotlib")
    console = Output(stderr=True)
    calibration = asyncio.run(_calibrate(arguments, console))
    calibration.write(arguments.out)
    _print(calibration, Output())
    console.print_line(f"calibration: {arguments.out}")
    if arguments.plot:
        draw_calibration(arguments.plot, calibration)
        console.print_line(f"drawn: {arguments.plot}")
    return 0


async def _calibrate(arguments: argparse.Namespace, console: Output) -> Calibration:
    if arguments.queries:
        queries = await asyncio.to_thread(read_queries, arguments.queries, arguments.num_queries)
        source = make_source(arguments)
    else:
        places = await asyncio.to_thread(draw_sentences, arguments.index, arguments.num_queries, arguments.seed)
        twice = arguments.sentences and 2 * arguments.sentences  # the best ones may be in the passage left out
        whole = make_source(arguments, k=arguments.k + 1, draw_sentences=twice)
        queries, source = [*places], LeaveOneOut(whole, places, arguments.sentences or arguments.k)
    async with await start_all([source], lambda line: console.print_line(line, style="dim")):
        with step_bars(console) as show:
            return await calibrate(
                source, queries, on_progress=lambda num_done, num_total: show(num_done, num_total, "searching")
            )


def _print(calibration: Calibration, console: Output) -> None:
    odds = Odds(calibration)
    table = Table("stages left", "set final", "order final", "first final", box=None, pad_edge=False)
    for left in reversed(range(len(calibration.stages))):
        likely = (odds.final("set", 0, left), odds.final("order", 0, left), odds.final("prefix", 1, left))
        table.add_row(str(left), *(f"{each:.1%}" for each in likely))
    console.print_table(table)
    console.print_line(f"{calibration.num_queries:,} queries; smoothed probabilities")
