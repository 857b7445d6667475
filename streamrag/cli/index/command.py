"""`streamrag index`: build, update and verify indexes of documents, or fill a PostgreSQL table."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from streamrag.cli.output import Output
from streamrag.cli.progress import step_bars
from streamrag.cli.source_options import DSN_HELP
from streamrag.serve.config.source_factory import resolve_dsn
from streamrag.sources.index.build import build_index
from streamrag.sources.index.changes import add_documents, remove_documents
from streamrag.sources.index.generation import IndexSummary
from streamrag.sources.index.index_folder import check_index

DESCRIPTION = """\
Splits every text, Markdown, HTML and PDF file below FOLDER into passages, embeds
them, and writes an index; or fills a PostgreSQL table with pgvector, or updates
one that was filled before. The same command resumes an interrupted build.
"""
ADD = """\
Adds files, and the files below folders, to an index; existing documents are
replaced. Only new passages are embedded. A document's name is its path within
FOLDER; without FOLDER it is the file's name, or its path within the folder given.
Once a tenth has changed, DiskANN's graph is built again: a minute for each 10,000
passages of the index.
"""
REMOVE = """\
Removes documents from an index, by their names in citations, or all documents
of a folder.
"""
VERIFY = """\
Compares every file of an index with its checksum. Opening an index does so only
for files of up to 64 MiB, and checks the size of larger ones. The exit status is
1 if the index is damaged.
"""
EPILOG = """\
examples:
  streamrag index build ./handbook --out ./handbook-index
  streamrag index add ./handbook-index ./handbook/travel.md --root ./handbook
  streamrag index remove ./handbook-index travel.md archive
  streamrag index verify ./handbook-index
  streamrag ask "Who approves travel?" --index ./handbook-index --model ./Llama-3.1-8B-Instruct
  streamrag index build ./handbook --to postgresql://me@localhost/docs --table handbook
"""
Tell: TypeAlias = Callable[[Sequence[str], Iterable[tuple[str, str]]], None]

MAX_PATHS = 5  # maximum number of files to name for each reason to skip files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = "Makes vector indexes, which `ask` and `record` search with --index.", EPILOG
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def add_verb(name: str, does: Callable[[argparse.Namespace], int], usage: str, what: str, description: str) -> Any:
        verb = verbs.add_parser(name, help=what, usage=f"%(prog)s {usage}", description=description, epilog=EPILOG)
        verb.set_defaults(run=does)
        if name != "build":
            verb.add_argument("index", type=Path, metavar="INDEX", help="made by `streamrag index build`")
        return verb

    what = "make an index from a folder of text, Markdown, HTML and PDF files"
    build = add_verb("build", run, "FOLDER (--out INDEX | --to DSN) [options]", what, DESCRIPTION)
    _add_build(build)
    what = "add documents to an index, or replace them"
    add = add_verb("add", run_add, "INDEX PATH [PATH ...] [options]", what, ADD)
    add.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="files, or folders of any depth")
    add.add_argument("--root", type=Path, metavar="FOLDER", help="the folder that the index was built from")
    what = "remove documents from an index"
    remove = add_verb("remove", run_remove, "INDEX NAME [NAME ...] [options]", what, REMOVE)
    remove.add_argument("names", nargs="+", metavar="NAME", help="a document's or a folder's, as in citations")
    for verb in (add, remove):
        verb.add_argument("--embedder", metavar="NAME", help="the index's embedding model, if not the default")
    add_verb("verify", run_verify, "INDEX", "compare an index with its checksums", VERIFY)


def _add_build(build: argparse.ArgumentParser) -> None:
    """Add the arguments of `build`: a folder, and either an index or a database to write, with options."""
    build.add_argument("folder", type=Path, metavar="FOLDER", help="with the documents, in folders of any depth")
    out = build.add_mutually_exclusive_group(required=True)
    out.add_argument("--out", type=Path, metavar="INDEX", help="folder for the index")
    out.add_argument("--to", metavar="DSN", help=f"database to fill a table of: {DSN_HELP}")
    about = "sentence-transformers model; name it again wherever the index is used, unless it is %(default)s"
    build.add_argument("--embedder", default="all-MiniLM-L6-v2", metavar="NAME", help=about)
    about = "DiskANN or faiss's IVF (DiskANN if it is installed)"
    build.add_argument("--kind", choices=("diskann", "ivf"), help=about)
    build.add_argument("--force", action="store_true", help="replace an existing index at --out")
    build.add_argument("--table", default="passages", metavar="NAME", help="table of --to (%(default)s)")
    build.add_argument("--words", default="english", metavar="NAME", help="text search configuration of --to (english)")
    build.add_argument("--prune", action="store_true", help="remove documents from --to that are not in FOLDER")


def run(arguments: argparse.Namespace) -> int:
    """Build the index, or fill the table, with a progress bar and a summary on stderr, and return 0."""
    if arguments.to is not None:
        return _fill_table(arguments)
    with _progress_and_summary(resumes=True) as (show, tell):
        summary = build_index(
            arguments.folder,
            arguments.out,
            embedder=arguments.embedder,
            kind=arguments.kind,
            force=arguments.force,
            on_progress=show,
        )
        _tell_index(tell, arguments.out, summary)
    return 0


def run_add(arguments: argparse.Namespace) -> int:
    """Add documents to the index, or replace them, with a progress bar and a summary on stderr, and return 0."""
    with _progress_and_summary() as (show, tell):
        summary = add_documents(
            arguments.index, arguments.paths, folder=arguments.root, embedder=arguments.embedder, on_progress=show
        )
        _tell_index(tell, arguments.index, summary)
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove documents from the index, with a progress bar and a summary on stderr, and return 0."""
    with _progress_and_summary() as (show, tell):
        summary = remove_documents(arguments.index, arguments.names, embedder=arguments.embedder, on_progress=show)
        _tell_index(tell, arguments.index, summary)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Read and hash every file, print their number and size, and return 0. IndexCorruptError for a damaged index."""
    progress, console = Output(stderr=True), Output()
    sizes: list[int] = []

    def show(name: str, size_bytes: int) -> None:
        progress.print_line(f"reading {name}, {size_bytes / 2**20:,.1f} MiB", style="dim")
        sizes.append(size_bytes)

    manifest, _ = check_index(arguments.index, on_file=show)
    console.print_line(
        f"{arguments.index}: {manifest.num_passages:,} passages of {manifest.num_documents:,} documents; "
        f"{len(sizes)} files, {sum(sizes) / 2**20:,.1f} MiB, match their checksums"
    )
    return 0


def _fill_table(arguments: argparse.Namespace) -> int:
    """Fill the PostgreSQL table from the folder, with a progress bar and a summary on stderr, and return 0."""
    from streamrag.sources.postgres.build import build_table  # optional: psycopg

    with _progress_and_summary() as (show, tell):
        summary = build_table(
            arguments.folder,
            resolve_dsn(arguments.to),
            table=arguments.table,
            embedder=arguments.embedder,
            words=arguments.words,
            prune=arguments.prune,
            on_progress=show,
        )
        lines = (
            f"{arguments.table}: {summary.num_passages} passages of {summary.num_documents} documents, "
            f"{summary.num_embedded} new or changed, {summary.num_removed} removed, {summary.dimension} dimensions, "
            f"in {summary.duration_s:.1f} s",
        )
        tell(lines, summary.skipped)
    return 0


def _tell_index(tell: Tell, index: Path, summary: IndexSummary) -> None:
    """Pass two lines on the index's size and its library to `tell`, with the skipped files."""
    library = {"diskann": "DiskANN", "ivf": "faiss IVF"}[summary.kind]
    lines = (
        f"{index}: {summary.num_passages} passages of {summary.num_documents} documents, "
        f"{summary.dimension} dimensions, {summary.size_bytes / 2**20:.1f} MiB, in {summary.duration_s:.1f} s",
        f"  {library}; {summary.num_embedded} passages were embedded",
    )
    tell(lines, summary.skipped)


@contextmanager
def _progress_and_summary(*, resumes: bool = False) -> Iterator[tuple[Callable[[int, int, str], None], Tell]]:
    """Yield a function that shows progress on stderr, and one that takes lines and skipped files.

    The lines and files are printed after the block, unless the block raises. Ctrl-C adds what the same command reuses;
    with `resumes`, the first report of embedded passages says that it is reused.
    """
    console = Output(stderr=True)
    summary: list[str] = []
    embedded = [""]  # after each report

    def show_and_note(num_done: int, num_total: int, step: str) -> None:
        if step == "embedding":
            embedded.append(f"{num_done:,} of {num_total:,} passages are embedded" if num_done else "")
            if resumes and num_done and len(embedded) == 2:
                console.print_line(f"continuing: {embedded[-1]}")
        show(num_done, num_total, step)

    try:
        with step_bars(console) as show:
            yield show_and_note, lambda lines, skipped: summary.extend([*lines, *_reasons(skipped)])
    except KeyboardInterrupt:
        raise KeyboardInterrupt(embedded[-1] and f"the same command continues: {embedded[-1]}") from None
    for line in summary:
        console.print_line(line)


def _reasons(skipped: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each reason to skip files, sorted, with at most `MAX_PATHS` files and the number of others."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in skipped:
        by_reason.setdefault(reason, []).append(str(path))
    for reason, paths in sorted(by_reason.items()):
        more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
        yield f"  skipped, {reason}: {', '.join(paths[:MAX_PATHS])}{more}"
