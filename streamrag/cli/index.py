"""`streamrag index`: a folder of documents becomes an index to search, or a table of PostgreSQL; what else is done
with an index."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from streamrag.cli import index_calibrate as calibrate
from streamrag.cli.output import Output
from streamrag.cli.source import DSN_HELP, dsn_of
from streamrag.cli.steps import StepLines, bar

DESCRIPTION = """\
Splits every text, Markdown and HTML file below FOLDER into passages, embeds
them, and writes a DiskANN index with the passages beside it; or fills a table
of PostgreSQL with pgvector, and brings it up to date when it is run again.
"""
EPILOG = """\
examples:
  streamrag index build ./handbook --out ./handbook-index
  streamrag ask "Who approves travel?" --index ./handbook-index --model ./Llama-3.1-8B-Instruct
  streamrag index build ./handbook --to postgresql://me@localhost/docs --table handbook
"""
Made: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""What was made, in a line, and what was skipped, with reasons."""

MAX_PATHS = 5
"""Files that are named, at most, for each reason to skip files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command is told, and what runs it."""
    parser.description, parser.epilog = "Makes vector indexes, which `ask` and `record` search with --index.", EPILOG
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    build = verbs.add_parser(
        "build",
        help="make an index from a folder of text, Markdown and HTML",
        usage="%(prog)s FOLDER (--out INDEX | --to DSN) [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    build.add_argument("folder", type=Path, metavar="FOLDER", help="with the documents, in folders of any depth")
    out = build.add_mutually_exclusive_group(required=True)
    out.add_argument("--out", type=Path, metavar="INDEX", help="folder to make")
    out.add_argument("--to", metavar="DSN", help=f"database to fill a table of: {DSN_HELP}")
    build.add_argument(
        "--embedder",
        default="all-MiniLM-L6-v2",
        metavar="NAME",
        help="sentence-transformers model; another than %(default)s must be named again wherever the index is used",
    )
    build.add_argument("--force", action="store_true", help="replace the index that is there, at --out")
    build.add_argument("--table", default="passages", metavar="NAME", help="table of --to (%(default)s)")
    build.add_argument("--words", default="english", metavar="NAME", help="text search configuration of --to (english)")
    build.add_argument("--prune", action="store_true", help="remove documents from --to that are not in FOLDER")
    build.set_defaults(run=run)
    calibrate.add_parser(verbs)


def run(arguments: argparse.Namespace) -> int:
    """Build the index, or fill the table, with a progress bar on stderr."""
    console = Output(stderr=True)
    lines = StepLines(console)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar(console, *columns) as progress:
        tasks: dict[str, TaskID] = {}

        def show(num_done: int, num_total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=num_total)
            progress.update(tasks[what], completed=num_done, total=num_total)
            lines.show(what, f"{num_done:,} of {num_total:,}")

        made, skipped = _fill_table(arguments, show) if arguments.to else _build_index(arguments, show)
    console.print_line(made)
    by_reason: dict[str, list[str]] = {}
    for path, reason in skipped:
        by_reason.setdefault(reason, []).append(str(path))
    for reason, paths in sorted(by_reason.items()):
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        console.print_line(f"  skipped, {reason}: {', '.join(paths[:MAX_PATHS])}{more}")
    return 0


def _build_index(arguments: argparse.Namespace, show: Callable[[int, int, str], None]) -> Made:
    from streamrag.sources.index import build_index

    summary = build_index(
        arguments.folder, arguments.out, embedder=arguments.embedder, force=arguments.force, on_progress=show
    )
    return (
        f"{arguments.out}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.dimension} dimensions, {summary.size_bytes / 2**20:.1f} MiB, in {summary.duration_s:.1f} s"
    ), summary.skipped


def _fill_table(arguments: argparse.Namespace, show: Callable[[int, int, str], None]) -> Made:
    from streamrag.sources.postgres.build import build_table

    summary = build_table(
        arguments.folder,
        dsn_of(arguments.to),
        table=arguments.table,
        embedder=arguments.embedder,
        words=arguments.words,
        prune=arguments.prune,
        on_progress=show,
    )
    return (
        f"{arguments.table}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.num_embedded} new or changed, {summary.num_removed} removed, {summary.dimension} dimensions, "
        f"in {summary.duration_s:.1f} s"
    ), summary.skipped
