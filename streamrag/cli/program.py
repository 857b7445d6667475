"""The commands of the `streamrag` program, and how it explains an error."""

import argparse
from collections.abc import Sequence

from streamrag import __version__
from streamrag.cli import ask, bench, index, profile, record, trace
from streamrag.cli.output import Output, markup
from streamrag.errors import StreamRagError

__all__ = ["run"]


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; the exit status is 0, or 1 after an error that was explained."""
    parser = argparse.ArgumentParser(
        prog="streamrag",
        description="Streams retrieved context into a language model while it is still arriving.",
        epilog="`streamrag COMMAND --help` tells more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"streamrag {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    ask.add_parser(commands)
    index.add_parser(commands)
    bench.add_parser(commands)
    profile.add_parser(commands)
    record.add_parser(commands)
    trace.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except StreamRagError as error:
        line = markup(f"[red]streamrag: {type(error).__name__}:[/] {{}}", error)
        Output(stderr=True).print(line, soft_wrap=True)  # a wrapped path cannot be copied
        return 1
    return status
