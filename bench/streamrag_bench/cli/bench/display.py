"""Display of a benchmark in a terminal: progress and results."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from streamrag.cli.output import Output, markup
from streamrag.cli.progress import StepLines, bar
from streamrag.display_text import one_line
from streamrag_bench.cell import CellSettings
from streamrag_bench.grid import describe_cell, describe_load, describe_qps, variant_name
from streamrag_bench.report.comparison import Figure, LoadComparison, Pool
from streamrag_bench.report.html import figure_text
from streamrag_bench.report.verdict import NO_VERDICT, Verdict
from streamrag_bench.runner import CellEvent, CellFailed, CellFinished, CellProgressed, CellStarted
from streamrag_bench.summary import PERCENTILES

LEGEND = (
    "s: ttft_after_retrieval_s of all requests of all seeds; below it, the range over single seeds. "
    "up: speed-up over no-streaming. /floor: ratio to the request alone on the engine, computed from step times. "
    "preempted: preemptions in all seeds, and the share whose KV was swapped. tax: share of the computed tokens that "
    "were recomputed because of preemption. GB: copied to the host and back, in all seeds."
)


class CellsView:
    """A display with a bar for all cells and one for each running cell; without a terminal, lines of progress.

    The bar for all cells, and the time that it leaves, weigh each cell by `work`: equally by default.
    """

    def __init__(
        self, cells: Sequence[CellSettings], console: Output, work: Callable[[CellSettings], float] = lambda cell: 1.0
    ) -> None:
        self._console = console
        columns = (BarColumn(bar_width=14), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
        self._progress = bar(console, TextColumn("{task.description}"), *columns, TimeRemainingColumn(compact=True))
        self._work = work
        self._num_cells = len(cells)
        self._num_ended = 0
        self._ended_work = 0.0
        total = sum(map(work, cells))
        self._all = self._progress.add_task("[bold]all cells", total=total, count=f"0/{len(cells)} cells")
        self._running: dict[CellSettings, TaskID] = {}
        self._shares: dict[CellSettings, float] = {}
        self._lines: dict[CellSettings, StepLines] = {}
        self._errors: set[str] = set()

    def __enter__(self) -> "CellsView":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running.values():
            self._progress.remove_task(task)
        self._progress.stop()

    def show(self, event: CellEvent) -> None:
        """Update the bars, or print lines of start, progress and end without a terminal.

        A failure is always printed with the path of its log, and an error that an earlier cell had as "the same".
        """
        settings = event.settings
        match event:
            case CellStarted():
                name = f"{variant_name(settings)}, {describe_qps(settings.qps)}, seed {settings.seed}"
                self._running[settings] = self._progress.add_task(
                    f"  {escape(one_line(name))}", total=None, count="starting"
                )
                self._lines[settings] = StepLines(self._console)
                self._lines[settings].show(describe_cell(settings), "starting")
            case CellProgressed(_, num_done, num_total):
                self._shares[settings] = num_done / num_total
                count = f"{num_done:,}/{num_total:,} queries"
                self._progress.update(self._running[settings], completed=num_done, total=num_total, count=count)
                self._lines[settings].show(describe_cell(settings), count)
            case CellFinished():
                self._remove(settings)
                if not self._console.is_terminal:
                    self._console.print_line(f"{self._num_ended}/{self._num_cells} {describe_cell(settings)}")
            case CellFailed():
                self._remove(settings)
                error = "the same" if event.error in self._errors else event.error
                self._errors.add(event.error)
                self._console.print_line(f"failed: {describe_cell(settings)}: {error}", style="red")
                self._console.print_line(f"  its log: {event.log}", style="dim")
        done = self._ended_work + sum(share * self._work(cell) for cell, share in self._shares.items())
        self._progress.update(self._all, completed=done, count=f"{self._num_ended}/{self._num_cells} cells")

    def _remove(self, settings: CellSettings) -> None:
        """Count a cell as ended, finished or failed, and remove its bar."""
        self._num_ended += 1
        self._ended_work += self._work(settings)
        self._shares.pop(settings, None)
        self._lines.pop(settings)
        self._progress.remove_task(self._running.pop(settings))


def print_comparison(comparison: LoadComparison, console: Output) -> None:
    """Print a load's name, a table with a row for each rate of arrivals and variant that has results, and a legend."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm")
    for name in PERCENTILES:
        for heading in (f"{name.upper()}\ns", "\nup", "\n/floor"):
            table.add_column(heading)
    for heading in ("pre-\nempted", "\ntax", "GB\nout/in"):
        table.add_column(heading)
    with_spread = console.width >= 110
    for qps in comparison.qps:
        table.add_row(markup("[bold]{}", describe_qps(qps)))
        for variant in comparison.variants:
            if pool := comparison.pools.get((variant, qps)):
                table.add_row(f"  {variant}", *_figures(comparison, pool, variant, with_spread))
    console.print()
    console.print_line(markup("[bold]{}", describe_load(comparison.load)))
    console.print_table(table)
    console.print(LEGEND, style="dim")


def print_verdicts(verdicts: Sequence[Verdict], console: Output) -> None:
    """Print each verdict's headline, its load, and its sentences on times and costs; or `NO_VERDICT` without any."""
    for verdict in verdicts:
        console.print()
        console.print(markup("[bold]Verdict: {}", verdict.headline))
        console.print(verdict.load, style="dim")
        for sentence in verdict.sentences:
            console.print_line(fill(sentence, console.width, initial_indent="  ", subsequent_indent="  "))
    if not verdicts:
        console.print()
        console.print(NO_VERDICT)


def _figures(comparison: LoadComparison, pool: Pool, variant: str, with_spread: bool) -> Iterable[str | Text]:
    """Yield a row's cells: time, speed-up and ratio for each percentile, then preemptions, tax and copies.

    Unknown figures are dashes. `with_spread` adds the range over seeds to the times.
    """
    for name in PERCENTILES:
        yield _text(pool.figure(lambda d: d.ttft_after_retrieval_s, name), with_spread)
        up = comparison.speed_up(variant, pool.settings.qps, name)
        yield "–" if up is None else f"{figure_text(up.value)}x"
        ratio = pool.ratio_to_floor(name)
        yield f"{figure_text(ratio)}x" if math.isfinite(ratio) else "–"
    yield from _preempted(pool)


def _preempted(pool: Pool) -> tuple[str, str, str]:
    """Return the cells for preemptions, recompute tax, and gigabytes copied; "unknown" and dashes without records."""
    if any(digest.num_preemptions is None for digest in pool.digests):
        return "unknown", "–", "–"
    num = Counter[str]()
    for digest in pool.digests:
        num.update(digest.num_preemptions)
    share = f"\n{num['swap'] / num.total():.0%} swap" if num["swap"] else ""
    num_computed = sum(digest.num_computed for digest in pool.digests)
    tax = sum(digest.num_taxed for digest in pool.digests) / num_computed if num_computed else math.nan
    copies = [digest.copy_totals for digest in pool.digests if digest.copy_totals]
    num_bytes = [sum(c.num_bytes_out for c in copies), sum(c.num_bytes_in for c in copies)]
    gigabytes = "/".join(figure_text(num / 1e9) for num in num_bytes) if copies else "–"
    return f"{num.total():,}{share}", f"{tax:.1%}" if math.isfinite(tax) else "–", gigabytes


def _text(figure: Figure, with_spread: bool) -> Text:
    low, high = figure_text(figure.low), figure_text(figure.high)
    spread = f"\n{low}–{high}" if with_spread and low != high else ""
    return Text.assemble(figure_text(figure.value), (spread, "dim"))
