"""What the programs share that ask the demo's model: their options, what they need made, and the machine's load."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from streamrag.demo.demo_folder import prepare_demo
from studies.folders import DEMO


def demo_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--folder` and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO, help="that of `make demo` (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    return parser


def parse_and_prepare(parser: argparse.ArgumentParser, console: Console) -> argparse.Namespace:
    """Return the program's arguments, once the model and the index are in the folder."""
    arguments = parser.parse_args()
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder)
    return arguments


def print_load(load: float, console: Console) -> None:
    """Print the load during a measurement, by which a reader judges its times."""
    console.print(f"the machine's load over the last minute: {load:.0f}, on {os.cpu_count()} cores, our own included")
