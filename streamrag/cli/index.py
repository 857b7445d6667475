"""`streamrag index`: a folder of documents becomes an index to search, and documents come to it and go."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from streamrag.cli.output import Output
from streamrag.cli.steps import StepLines, bar

if TYPE_CHECKING:
    from streamrag.sources.index import IndexSummary

DESCRIPTION = """\
Splits every text, Markdown and HTML file below FOLDER into passages, embeds
them, and writes an index with the passages beside it. A build that is stopped
is gone on with by the same command.
"""
ADD = """\
Puts files, and the files below folders, into an index; those that it has are
replaced. Only new passages are embedded. A document is known by its path within
FOLDER; without that, by its name, or by its path within the folder named here.
"""
REMOVE = """\
Takes documents out of an index, by the names that citations give them, or all
those of a folder.
"""
EPILOG = """\
examples:
  streamrag index build ./handbook --out ./handbook-index
  streamrag index add ./handbook-index ./handbook/travel.md --root ./handbook
  streamrag index remove ./handbook-index travel.md archive
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
    build.add_argument(
        "--kind", choices=("diskann", "ivf"), help="DiskANN or faiss's IVF (the first of them that is installed)"
    )
    build.add_argument("--force", action="store_true", help="replace the index that is there")
    build.set_defaults(run=run)
    add = verbs.add_parser(
        "add",
        help="put documents into an index, or replace them",
        usage="%(prog)s INDEX PATH [PATH ...] [options]",
        description=ADD,
        epilog=EPILOG,
    )
    add.add_argument("index", type=Path, metavar="INDEX", help="made by `streamrag index build`")
    add.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="files, or folders of any depth")
    add.add_argument("--root", type=Path, metavar="FOLDER", help="what the index was built from")
    remove = verbs.add_parser(
        "remove",
        help="take documents out of an index",
        usage="%(prog)s INDEX NAME [NAME ...] [options]",
        description=REMOVE,
        epilog=EPILOG,
    )
    remove.add_argument("index", type=Path, metavar="INDEX", help="made by `streamrag index build`")
    remove.add_argument("names", nargs="+", metavar="NAME", help="a document's or a folder's, as in citations")
    for verb, does in ((add, run_add), (remove, run_remove)):
        verb.add_argument("--embedder", metavar="NAME", help="what the index was made with, if not the default")
        verb.set_defaults(run=does)


def run(arguments: argparse.Namespace) -> int:
    """Build the index with a progress bar on stderr."""
    from streamrag.sources.index import build_index

    with _shown(arguments.out) as (show, tell):
        tell(
            build_index(
                arguments.folder,
                arguments.out,
                embedder=arguments.embedder,
                kind=arguments.kind,
                force=arguments.force,
                on_progress=show,
            )
        )
    return 0


def run_add(arguments: argparse.Namespace) -> int:
    """Put documents into the index."""
    from streamrag.sources.index_changes import add_documents

    with _shown(arguments.index) as (show, tell):
        tell(
            add_documents(
                arguments.index,
                arguments.paths,
                folder=arguments.root,
                embedder=arguments.embedder,
                on_progress=show,
            )
        )
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Take documents out of the index."""
    from streamrag.sources.index_changes import remove_documents

    with _shown(arguments.index) as (show, tell):
        tell(remove_documents(arguments.index, arguments.names, embedder=arguments.embedder, on_progress=show))
    return 0


@contextmanager
def _shown(index: Path) -> "Iterator[tuple[Callable[[int, int, str], None], Callable[[IndexSummary], None]]]":
    """What shows progress, on stderr, and what tells the summary."""
    console = Output(stderr=True)
    summaries: list[IndexSummary] = []
    lines = StepLines(console)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar(console, *columns) as progress:
        tasks: dict[str, TaskID] = {}

        def show(num_done: int, num_total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=num_total)
            progress.update(tasks[what], completed=num_done, total=num_total)
            lines.show(what, f"{num_done:,} of {num_total:,}")

        yield show, summaries.append
    for summary in summaries:
        _print(console, index, summary)


def _print(console: Output, index: Path, summary: "IndexSummary") -> None:
    console.print_line(
        f"{index}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.dimension} dimensions, {summary.size_bytes / 2**20:.1f} MiB, in {summary.duration_s:.1f} s",
    )
    library = {"diskann": "DiskANN", "ivf": "faiss IVF"}[summary.kind]
    console.print_line(f"  {library}; {summary.num_embedded} passages were embedded")
    by_reason: dict[str, list[str]] = {}
    for path, reason in summary.skipped:
        by_reason.setdefault(reason, []).append(str(path))
    for reason, paths in sorted(by_reason.items()):
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        console.print_line(f"  skipped, {reason}: {', '.join(paths[:MAX_PATHS])}{more}")
