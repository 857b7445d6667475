"""The commands of the `streamrag` program, and how it explains an error."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from streamrag.cli import ask, bench, index, profile, record, trace
from streamrag.cli.output import Output, markup
from streamrag.errors import StreamRagError
from streamrag.versions import __version__

__all__ = ["run"]


class _Parser(argparse.ArgumentParser):
    """Says what it has to say as everything else is said; parsers of commands are of the class of the program's."""

    def _print_message(self, message: str, file: Any = None) -> None:
        Output(stderr=file is not sys.stdout).print_plain(message)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; the exit status is 0, or 1 after an error that was explained."""
    parser: argparse.ArgumentParser = _Parser(
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
    try:
        arguments = parser.parse_args(argv)
        status: int = arguments.run(arguments)
    except StreamRagError as error:
        return _explain(type(error).__name__, str(error))
    except OSError as error:  # of a path that nobody can use, such as one with a name that is too long
        reason = error.strerror or str(error)
        return _explain(type(error).__name__, reason if error.filename is None else f"{error.filename}: {reason}")
    return status


def _explain(kind: str, problem: str) -> int:
    line = markup(f"[red]streamrag: {kind}:[/] {{}}", problem)
    Output(stderr=True).print(line, soft_wrap=True)  # a wrapped path cannot be copied
    return 1
