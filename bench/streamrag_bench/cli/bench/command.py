"""`streamrag bench`: run benchmarks on a simulated or a real engine, and report their results."""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamrag.cli.output import Output
from streamrag.display_text import json_text
from streamrag.errors import ConfigurationError
from streamrag.support.files import write_atomic
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.cli.bench import public
from streamrag_bench.cli.bench.display import CellsView, print_comparison, print_verdicts
from streamrag_bench.cli.bench.options import DEFAULT_PROFILE, DESCRIPTION, EPILOG, VERBS, grid_of
from streamrag_bench.grid import describe_cell, workload_name
from streamrag_bench.report.comparison import compare
from streamrag_bench.report.page import make_report
from streamrag_bench.report.timeline import make_timeline
from streamrag_bench.report.verdict import Verdict, verdicts
from streamrag_bench.runner import CellFailed, CellProgressed, CellStarted, run_cell, run_cells
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import Digest, Slos, digest, parse_slos, summarise

TABLE_WIDTH = 120  # width of the table of figures without a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, dest="verb")
    runs = {"report": _report, "timeline": _timeline}
    for name, (what, add_options) in VERBS.items():
        verb = verbs.add_parser(name, help=what)
        add_options(verb)
        verb.set_defaults(run=runs.get(name, _run_grid))
    public.add_verbs(verbs)


def _run_grid(arguments: argparse.Namespace) -> int:
    """Run the cells without a result, or with --force all, print figures, and write the report. Return 1 if one failed.

    Ctrl-C raises KeyboardInterrupt, whose message has the number of finished cells and their folder.
    """
    console = Output(stderr=True)
    grid, slos = grid_of(arguments), parse_slos(arguments.slo)
    store = CellStore(arguments.output or Path("bench-results") / f"{arguments.verb}-{workload_name(grid.workload)}")
    store.check_clock(grid.clock)
    cells = grid.cells()
    todo = [c for c in cells if arguments.force or store.find(c, with_steps=arguments.keep_steps) is None]
    if len(todo) < len(cells):
        console.print_line(f"{len(cells) - len(todo)} of {len(cells)} cells are finished already, in {store.folder}")
    num_processes = arguments.processes or (len(os.sched_getaffinity(0)) if grid.clock == "virtual" else 1)
    start_s = time.monotonic()
    try:
        failed = _run_cells(todo, store, console, num_processes=num_processes, keep_steps=arguments.keep_steps)
    except KeyboardInterrupt:
        num_done = sum(store.find(c, with_steps=arguments.keep_steps) is not None for c in cells)
        raise KeyboardInterrupt(
            f"{num_done} of {len(cells)} cells are finished, in {store.folder}; the same command resumes there"
        ) from None
    console.print_line(f"{len(todo) - len(failed)} cells in {time.monotonic() - start_s:.1f} s")
    _publish(store, slos, arguments.json, console, cells=cells, failed=failed)
    return 1 if failed else 0


def _run_cells(
    cells: Sequence[CellSettings], store: CellStore, console: Output, *, num_processes: int, keep_steps: bool
) -> dict[CellSettings, str]:
    """Run the cells, display their events, and return the failed ones' errors; if interrupted, end all processes."""
    failed = {}
    events = run_cells(cells, store, num_processes=num_processes, keep_steps=keep_steps)
    try:
        with CellsView(cells, console) as view:
            for event in events:
                view.show(event)
                if isinstance(event, CellFailed):
                    failed[event.settings] = event.error
    finally:
        events.close()
    return failed


def _publish(
    store: CellStore,
    slos: Slos,
    json_path: Path | None,
    console: Output,
    *,
    cells: Sequence[CellSettings] = (),
    failed: Mapping[CellSettings, str] = MappingProxyType({}),
) -> None:
    """Print the figures of `cells`, or of all in the folder, on stdout, and notes on `console`.

    The figures and failures also go to `json_path`, and the folder's report is made of all its cells. Without any
    result, only the JSON is written.
    """
    has_results = not cells or len(failed) < len(cells)
    digests = {result.settings: digest(result) for result in store.read_all()} if has_results else {}
    requested = [digests[settings] for settings in cells or digests if settings in digests]
    comparisons = compare(requested)
    found = [verdict for comparison in comparisons for verdict in verdicts(comparison)]
    named = {describe_cell(settings): error for settings, error in failed.items()}
    if json_path is not None:
        _write_json(json_path, requested, found, slos, named)
    if not requested:
        return
    figures = Output()
    if not figures.is_terminal:
        figures = Output(width=TABLE_WIDTH)
    for comparison in comparisons:
        print_comparison(comparison, figures)
    for line in sorted({line for each in requested if (line := _cut(each))}):
        console.print_line(line, style="yellow")
    path = store.folder / "report.html"
    write_atomic(path, make_report(digests.values(), slos=slos, failed=named))
    console.print_line(f"report: {path}")
    print_verdicts(found, figures)
    if any(each.settings.profile == DEFAULT_PROFILE for each in requested):
        figures.print_line(f"That is {DEFAULT_PROFILE}. For your machine: streamrag profile, then --profile FILE.")


def _cut(digest: Digest) -> str:
    """Return a note on chunks that were left out of contexts, or an empty text."""
    num_cut, budget = (digest.provenance.get(name) for name in ("num_contexts_cut", "max_context_tokens"))
    if not (isinstance(num_cut, int) and isinstance(budget, int) and num_cut):
        return ""
    return (
        f"note: {num_cut:,} of {len(digest.num_chunks):,} contexts exceed {budget:,} tokens; chunks that do not fit "
        "were left out, as in a pipeline (--max-context-tokens)"
    )


def _write_json(
    path: Path, digests: Sequence[Digest], found: Sequence[Verdict], slos: Slos, failed: Mapping[str, str]
) -> None:
    """Write the objectives, verdicts, figures of each cell, and errors as JSON; create the folder if it is missing."""
    values: dict[str, Any] = {
        "slos": dict(slos),
        "verdicts": [verdict.as_json() for verdict in found],
        "cells": [summarise(each, slos) for each in digests],
        "failed": [{"cell": name, "error": error} for name, error in failed.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json_text(values) + "\n")


def _report(arguments: argparse.Namespace) -> int:
    _publish(CellStore(arguments.folder), parse_slos(arguments.slo), arguments.json, Output(stderr=True))
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    """Write the timeline of a stored cell, or of one that runs now, to --output, print the path, and return 0."""
    result = _kept_cell(arguments.source) if arguments.source else _fresh_cell(arguments)
    timeline = make_timeline(result)
    write_atomic(arguments.output, json.dumps(timeline, separators=(",", ":"), ensure_ascii=False))
    console = Output(stderr=True)
    console.print_line(f"{arguments.output}: {describe_cell(result.settings)}; open it at https://ui.perfetto.dev")
    return 0


def _kept_cell(source: Path) -> CellResult:
    """Read a result file, or the only one with steps in a folder; raise ConfigurationError for none or several."""
    if not source.is_dir():
        return read_cell(source)
    kept = sorted(source.glob("cells/[!.]*.steps.json.gz"))
    if not kept:
        raise ConfigurationError(f"{source} holds no cell with its steps; run the benchmark with --keep-steps")
    if len(kept) > 1:
        names = "".join(f"\n  {path}" for path in kept)
        raise ConfigurationError(f"{source} holds {len(kept)} cells with their steps; name one:{names}")
    return read_cell(kept[0])


def _fresh_cell(arguments: argparse.Namespace) -> CellResult:
    """Run the one cell that the options name, in this process, with its steps, and store nothing.

    :raises ConfigurationError: the options name several cells.
    """
    cells = grid_of(arguments).cells()
    if len(cells) != 1:
        raise ConfigurationError(f"a timeline shows one cell, but these options name {len(cells)}")
    console = Output(stderr=True)
    with CellsView(cells, console) as view:
        view.show(CellStarted(cells[0]))
        return run_cell(
            cells[0], keep_steps=True, progress=lambda *counts: view.show(CellProgressed(cells[0], *counts))
        )
