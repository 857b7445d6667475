"""`streamrag index calibrate`: how soon a search of this index is final, as a file that `WorthSending` decides by."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from rich.table import Table

from streamrag.cli.output import Output
from streamrag.cli.progress import step_bars
from streamrag.cli.source_options import add_search_arguments, make_source
from streamrag.core.lifecycle import start_all
from streamrag.errors import ConfigurationError
from streamrag.sources.emission.calibration import Calibration, Odds

DESCRIPTION = """\
Searches INDEX for many queries, and counts at which stage of the search the
result was final: all of it, its order, and each of its first passages. The
queries are yours, or sentences of the index's own passages, each asked as if its
own passage were not there.
"""
EPILOG = """\
examples:
  streamrag index calibrate ./handbook-index --queries asked.txt --out calibration.json --plot calibration.png
  streamrag index calibrate ./handbook-index --rerank late-interaction --out calibration.json
"""


def add_parser(verbs: Any) -> None:
    """Adds the verb, and what runs it."""
    parser = verbs.add_parser(
        "calibrate",
        help="find out how soon a search of an index is final",
        usage="%(prog)s INDEX --out FILE [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("index", metavar="INDEX", help="made by `streamrag index build`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what to write, JSON")
    parser.add_argument("--queries", type=Path, metavar="FILE", help="a text file with one query a line")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to draw it")
    parser.add_argument("--num-queries", type=int, default=200, metavar="N", help="most queries (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which sentences are drawn (%(default)s)")
    add_search_arguments(parser.add_argument_group("the search, as `streamrag ask` will do it"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate with a progress bar on stderr."""
    if arguments.num_queries < 1:
        raise ConfigurationError(f"--num-queries {arguments.num_queries}: give 1 or more")
    for path in filter(None, (arguments.out, arguments.plot)):
        if not path.parent.is_dir():  # now rather than after minutes
            raise ConfigurationError(f"there is no folder {path.parent}; make it, or name another place")
    if arguments.plot:
        from streamrag.bench.report.canvas import require_matplotlib

        require_matplotlib()
    console = Output(stderr=True)
    calibration = asyncio.run(_calibrate(arguments, console))
    calibration.write(arguments.out)
    _print(calibration, Output())
    console.print_line(f"calibration: {arguments.out}")
    if arguments.plot:
        from streamrag.bench.report.calibration_picture import draw_calibration

        draw_calibration(arguments.plot, calibration)
        console.print_line(f"drawn: {arguments.plot}")
    return 0


async def _calibrate(arguments: argparse.Namespace, console: Output) -> Calibration:
    from streamrag.sources.emission.calibrate import calibrate
    from streamrag.sources.emission.calibration_queries import HeldOut, read_queries, sentences

    if arguments.queries:
        queries = await asyncio.to_thread(read_queries, arguments.queries, arguments.num_queries)
        source = make_source(arguments)
    else:
        places = await asyncio.to_thread(sentences, arguments.index, arguments.num_queries, arguments.seed)
        twice = arguments.sentences and 2 * arguments.sentences  # those of the passage that is left out may be the best
        whole = make_source(arguments, k=arguments.k + 1, sentences=twice)
        queries, source = [*places], HeldOut(whole, places, arguments.sentences or arguments.k)
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
    console.print_line(f"{calibration.num_queries:,} queries; probabilities, smoothed")
