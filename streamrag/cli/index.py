"""`streamrag index build`: a folder of documents becomes an index to search. And what else is done with an index."""

import argparse
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from streamrag.cli import index_calibrate as calibrate
from streamrag.cli.output import Output
from streamrag.cli.steps import StepLines, bar

DESCRIPTION = """\
Splits every text, Markdown and HTML file below FOLDER into passages, embeds
them, and writes a DiskANN index with the passages beside it.
"""
EPILOG = """\
examples:
  streamrag index build ./handbook --out ./handbook-index
  streamrag ask "Who approves travel?" --index ./handbook-index --model ./Llama-3.1-8B-Instruct
"""
MAX_PATHS = 5
"""Files that are named, at most, for each reason to skip files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command is told, and what runs it."""
    parser.description, parser.epilog = "Makes vector indexes, which `ask` and `record` search with --index.", EPILOG
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    build = verbs.add_parser(
        "build",
        help="make an index from a folder of text, Markdown and HTML",
        usage="%(prog)s FOLDER --out INDEX [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    build.add_argument("folder", type=Path, metavar="FOLDER", help="with the documents, in folders of any depth")
    build.add_argument("--out", type=Path, required=True, metavar="INDEX", help="folder to make")
    build.add_argument(
        "--embedder",
        default="all-MiniLM-L6-v2",
        metavar="NAME",
        help="sentence-transformers model; another than %(default)s must be named again wherever the index is used",
    )
    build.add_argument("--force", action="store_true", help="replace the index that is there")
    build.set_defaults(run=run)
    calibrate.add_parser(verbs)


def run(arguments: argparse.Namespace) -> int:
    """Build the index with a progress bar on stderr."""
    from streamrag.sources.index import build_index

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

        summary = build_index(
            arguments.folder, arguments.out, embedder=arguments.embedder, force=arguments.force, on_progress=show
        )
    console.print_line(
        f"{arguments.out}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.dimension} dimensions, {summary.size_bytes / 2**20:.1f} MiB, in {summary.duration_s:.1f} s",
    )
    by_reason: dict[str, list[str]] = {}
    for path, reason in summary.skipped:
        by_reason.setdefault(reason, []).append(str(path))
    for reason, paths in sorted(by_reason.items()):
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        console.print_line(f"  skipped, {reason}: {', '.join(paths[:MAX_PATHS])}{more}")
    return 0
