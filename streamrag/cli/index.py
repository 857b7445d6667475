"""`streamrag index build`: a folder of documents becomes an index to search."""

import argparse
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from streamrag.cli.output import Output
from streamrag.cli.steps import StepLines

__all__ = ["add_parser"]

MAX_PATHS = 5
"""Of the files that were skipped for one reason, these are named."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command to the program's parser."""
    index = commands.add_parser("index", help="make an index of documents", description="Works on vector indexes.")
    verbs = index.add_subparsers(metavar="VERB", required=True)
    build = verbs.add_parser(
        "build",
        help="make an index from a folder of text, Markdown and HTML",
        description=(
            "Splits every text, Markdown and HTML file below FOLDER into passages, embeds them, and writes a DiskANN "
            "index with the passages beside it."
        ),
    )
    build.add_argument("folder", type=Path, metavar="FOLDER")
    build.add_argument("--out", type=Path, required=True, metavar="INDEX", help="folder to make")
    build.add_argument(
        "--embedder",
        default="all-MiniLM-L6-v2",
        metavar="NAME",
        help="sentence-transformers model; another than %(default)s must be named again wherever the index is used",
    )
    build.add_argument("--force", action="store_true", help="replace the index that is there")
    build.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the index with a progress bar on stderr."""
    from streamrag.sources.index import build_index

    console = Output(stderr=True)
    lines = StepLines(console)
    with Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(num_done: int, num_total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=num_total)
            progress.update(tasks[what], completed=num_done, total=num_total)
            lines.show(what, f"{num_done:,} of {num_total:,}")

        summary = build_index(
            arguments.folder, arguments.out, embedder=arguments.embedder, force=arguments.force, on_progress=show
        )
    console.print(
        f"{arguments.out}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.dimension} dimensions, {summary.size_bytes / 2**20:.1f} MiB, in {summary.duration_s:.1f} s",
        soft_wrap=True,
    )
    by_reason: dict[str, list[str]] = {}
    for path, reason in summary.skipped:
        by_reason.setdefault(reason, []).append(str(path))
    for reason, paths in sorted(by_reason.items()):
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        console.print(f"  skipped, {reason}: {', '.join(paths[:MAX_PATHS])}{more}", soft_wrap=True)
    return 0
