"""The command-line parser of the `streamrag` program, and its error messages."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from streamrag.cli.output import Output, markup
from streamrag.errors import MissingDependencyError, StreamRagError, install_line
from streamrag.support.versions import __version__

COMMANDS = {
    "ask": "answer questions from the web or from an index",
    "serve": "answer any OpenAI client over HTTP",
    "index": "make an index of a folder of documents",
    "record": "record retrieval to a trace, to replay it later",
    "demo-model": "make a small English model for experiments",
    "top": "watch a running service",
    "doctor": "check whether this machine can serve, or whether a server reuses prefixes",
}
"""Help of each command. The module with the command's name defines its arguments and its `run`."""

MEASURING_COMMANDS = {
    "compare": "measure what streaming gains with your questions, your source and your model",
    "trace": "show or generate traces",
    "bench": "compare ways of serving a load, simulated or on the real engine",
    "advise": "say what streaming would save, from a log of retrieval",
    "profile": "measure the time to recompute and copy KV on this machine",
}
"""Help of the commands that the distribution streamrag-bench adds, by entry points of the group `ENTRY_POINTS`."""

ENTRY_POINTS = "streamrag.commands"
"""Group of entry points. Each has a command's name, and is a function that defines arguments and `run` in a parser."""

EPILOG = """\
examples:
  streamrag ask "How do I cancel a task group?" --url https://anyio.readthedocs.io --model ./Llama-3.1-8B-Instruct
  streamrag serve --demo
  streamrag index build ./handbook --out ./handbook-index
  streamrag compare questions.txt --index ./handbook-index --model ./Llama-3.1-8B-Instruct
  streamrag record "Who approves travel?" --index ./handbook-index --output search.jsonl.gz
  streamrag bench simulate --workload search.jsonl.gz --qps 1,2,4
  streamrag doctor --server http://127.0.0.1:8000

`streamrag COMMAND --help` has more, with examples.
"""


class Parser(ArgumentParser):
    """A parser whose messages go through `Output`. Its subparsers have the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=34), **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        Output(stderr=file is not sys.stdout).print_plain(message)


def make_parser(argv: Sequence[str]) -> ArgumentParser:
    """Return the program's parser, with arguments only of the command in `argv`, whose module alone is imported.

    :raises MissingDependencyError: it is a command of streamrag-bench, which is not installed.
    """
    parser = Parser(
        prog="streamrag",
        description="Streams retrieved context into a language model while it is still arriving.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"streamrag {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((word for word in argv if not word.startswith("-")), None)
    for name, what in {**COMMANDS, **MEASURING_COMMANDS}.items():
        command = commands.add_parser(name, help=what)
        if name == named:
            _add_arguments(name, command)
    return parser


def _add_arguments(name: str, parser: ArgumentParser) -> None:
    """Import a command, and let it define its arguments.

    :raises MissingDependencyError: it is a command of streamrag-bench, which is not installed.
    """
    if name in COMMANDS:
        import_module(f"streamrag.cli.{name.replace('-', '_')}").add_arguments(parser)
    elif found := entry_points(group=ENTRY_POINTS, name=name):
        found[name].load()(parser)
    else:
        raise MissingDependencyError("streamrag-bench", install_line("bench"))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, and return its exit status, or 1 after printing a StreamRagError or an OSError."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = make_parser(words).parse_args(words)
        status: int = arguments.run(arguments)
    except StreamRagError as error:
        return _print_error(type(error).__name__, str(error))
    except OSError as error:  # such as a path that is too long
        reason = error.strerror or str(error)
        return _print_error(type(error).__name__, reason if error.filename is None else f"{error.filename}: {reason}")
    return status


def _print_error(kind: str, problem: str) -> int:
    """Print an error on stderr, and return the exit status 1."""
    Output(stderr=True).print_line(markup(f"[red]streamrag: {kind}:[/] {{}}", problem))
    return 1
