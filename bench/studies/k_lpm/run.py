"""k-LPM: time to the first token against the rate of arrivals, on prompts that form a tree, in virtual time.

    python -m studies.k_lpm.run [--seeds N] [--prompts N] [--json FILE] [--plot FILE]

The counterpart of figure 2 of arXiv 2502.04677 on our scheduler: four prompts share each user's prefix, in a random
order, with Poisson arrivals; each comes in one piece; the prefix cache is on. The bound of its theorem 2 is drawn in.
One engine remembers the KV of a few prompts, as the theorem has it, and the others shares of what all prompts hold.
Loads are paired: every k gets the same prompts at the same times. Finished cells stay in a folder, and the same command
goes on there.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamrag.engine.costs.profile_files import load_profile, save_profile
from streamrag.engine.costs.step_profiles import AnalyticProfile
from streamrag.engine.policies import POLICIES
from streamrag.support.files import write_atomic
from streamrag.trace.read import read_trace
from streamrag.trace.write import write_trace
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.report.canvas import make_panels, plain_log_ticks
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import percentile
from studies.folders import KEPT
from studies.k_lpm.missing_cells import run_missing
from studies.k_lpm.prefix_tree import Shape, Theorem, TieBlindPolicy, tree

PROFILE = "h200-llama8b-tp2"
BLOCK_SIZE = 64
"""A quarter of the work of simulating 16, and as good here: prefixes are whole blocks of either."""
BUDGET = 8_192
"""Tokens in a step: a whole prompt, as the paper's engine has it."""
NUM_REPEATS = 4
NUM_USER_TOKENS, NUM_DOC_TOKENS = 6_656, 1_536
"""8,192 together, as published. How they are shared out is not; here a document is a fifth or so."""
RATES = (6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 18.0, 22.0)
"""FCFS saturates at 7.2 prompts a second where nothing is remembered, and whole users at 18.8."""
NUM_REMEMBERED = 8
SHARES = (None, 0.25, 0.5)
"""KV memory, as shares of what all prompts together need; None is room for `NUM_REMEMBERED` prompts."""
CURVES = {
    "k = 1 (FCFS)": "k_lpm(1)",
    "k = 2": "k_lpm(2)",
    "k = 3": "k_lpm(3)",
    "k = 4": "k_lpm(4)",
    "k = ∞ (LPM)": "k_lpm(inf)",
    "LPM, ties at random": "lpm_tie_blind",
}
"""Four repeats are the k for which the theorem holds."""
FCFS, BEST, BOUNDED, LPM, TIE_BLIND = (list(CURVES)[i] for i in (0, 1, 3, 4, 5))
COLOURS = ("#000000", "#d55e00", "#e69f00", "#009e73", "#0072b2", "#56b4e9")
WIDTHS = (1.5, 4.5, 3.5, 2.4, 1.2, 1.5)
"""Where curves lie upon each other, all can be seen."""
TOLERANCE = 0.02

# Here and not in `main`: the processes of cells import this file, but do not run it.
POLICIES["lpm_tie_blind"] = TieBlindPolicy

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Point(NamedTuple):
    """What is the same for all that is compared with each other."""

    share: float | None
    rate: float


Cells = Mapping[tuple[Point, str], tuple[CellSettings, ...]]
"""One for each seed, by point and curve."""


def shape(num_prompts: int) -> Shape:
    return Shape(num_prompts, NUM_REPEATS, NUM_USER_TOKENS, NUM_DOC_TOKENS)


def kv_tokens(share: float | None, of: Shape) -> int:
    return NUM_REMEMBERED * of.num_prompt_tokens if share is None else int(share * of.num_distinct_tokens)


def theorem(of: Shape, rate: float, starts_at_s: float) -> Theorem:
    return Theorem.of(of, load_profile(PROFILE), BUDGET, rate, starts_at_s)


def bounds(of: Shape, rate: float) -> dict[str, float]:
    """Of the longest TTFT: as stated, where all prompts wait for the last arrival, and without that (not proved)."""
    stated, at_once = theorem(of, rate, of.num_prompts / rate), theorem(of, rate, 0.0)
    return {
        "k_lpm": stated.k_lpm(NUM_REPEATS),
        "k_lpm_at_once": at_once.k_lpm(NUM_REPEATS),
        "fcfs_at_once": at_once.fcfs(),
        "lpm_at_once": at_once.lpm(NUM_REPEATS),
    }


def make_cells(arguments: argparse.Namespace) -> Cells:
    """Write what the cells read, too."""
    of, profile = shape(arguments.prompts), load_profile(PROFILE)
    assert isinstance(profile, AnalyticProfile)
    profile_path = arguments.output / f"{PROFILE}-blocks-of-{BLOCK_SIZE}.json"
    profile_path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(replace(profile, block_size=BLOCK_SIZE), profile_path)
    traces = []
    for seed in range(1, arguments.seeds + 1):
        path = arguments.output / f"tree-{of.num_prompts}-seed{seed}.jsonl"
        made = tree(of, seed)
        if not path.exists() or read_trace(path).queries != made.queries:
            write_trace(made, path, overwrite=True)  # with its date, so that finished cells would be of another file
        traces.append(str(path))
    first = CellSettings("virtual", "", "streaming", profile=str(profile_path), max_num_batched_tokens=BUDGET)
    return {
        (Point(share, rate), curve): tuple(
            replace(first, workload=t, policy=policy, qps=rate, kv_tokens=kv_tokens(share, of), seed=1 + i)
            for i, t in enumerate(traces)
        )
        for share in SHARES
        for rate in RATES
        for curve, policy in CURVES.items()
    }


def rows(cells: Cells, store: CellStore, of: Shape) -> Iterator[dict[str, Any]]:
    """Percentiles are of all prompts of all seeds."""
    for (point, curve), settings in cells.items():
        paths = [store.find(cell) for cell in settings]
        results = [read_cell(path) for path in paths if path]
        ttft_s = [request.ttft_s for result in results for request in result.requests]
        yield {
            **point._asdict(),
            "curve": curve,
            **{f"p{rank}": percentile(ttft_s, rank / 100) for rank in (50, 95, 99)},
            "max": max(ttft_s),
            "share_from_cache": num_from_cache(results) / (len(ttft_s) * of.num_prompt_tokens),
            "busy_s": sum(result.busy_s for result in results) / len(results),
        }


def num_from_cache(results: Sequence[CellResult]) -> int:
    return sum(request.record.num_from_cache for result in results for request in result.requests if request.record)


Rows = Sequence[dict[str, Any]]


def by_rate(found: Rows, share: float | None, curve: str, name: str = "p99") -> list[float]:
    return [row[name] for row in found if row["share"] == share and row["curve"] == curve]


def is_below(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The rates at which the one is better by more than the tolerance."""
    return [rate for rate, a, b in zip(RATES, one, other, strict=True) if a * (1 + TOLERANCE) < b]


def verdicts(found: Rows, of: Shape) -> Iterator[str]:
    """What the paper claims, whether it is so here, and if not, why."""
    for share in SHARES:
        p99 = {curve: by_rate(found, share, curve) for curve in CURVES}
        best, fcfs, lpm, blind = (p99[curve] for curve in (BEST, FCFS, LPM, TIE_BLIND))
        yield f"[bold]{name_of(share)}"
        yield told("k = 2 is better than FCFS", is_below(best, fcfs), is_below(fcfs, best))
        yield told("k = 2 is better than LPM, ties to the oldest (ours)", is_below(best, lpm), is_below(lpm, best))
        yield told(
            "k = 2 is better than LPM, ties at random (the paper's)", is_below(best, blind), is_below(blind, best)
        )
        yield told("FCFS is better than LPM, ties at random", is_below(fcfs, blind), is_below(blind, fcfs))
        yield why(is_below(best, lpm), is_below(lpm, best), is_below(best, blind))
        if worse := is_below(fcfs, best):
            yield why_not_better_than_fcfs(found, share, worse)
        longest = by_rate(found, share, BOUNDED, "max")
        for name, what in (("k_lpm", "as stated"), ("k_lpm_at_once", "with T = 0, which it does not cover")):
            above = [rate for rate, s in zip(RATES, longest, strict=True) if s > bounds(of, rate)[name]]
            kept = f"broken {listed(above)}" if above else "kept at every rate"
            yield f"  the theorem's bound {what}: {kept} by the longest TTFT of {BOUNDED}"


def told(claim: str, so: Sequence[float], not_so: Sequence[float]) -> str:
    return f"  {claim}: {listed(so)}; the other way round: {listed(not_so)}; else within {TOLERANCE:.0%}"


def why(best_beats_lpm: Sequence[float], lpm_beats_best: Sequence[float], best_beats_blind: Sequence[float]) -> str:
    """The paper has k = 2 below LPM at all rates."""
    if best_beats_lpm and not lpm_beats_best:
        return "  [green]the paper's order"
    if len(best_beats_blind) > len(best_beats_lpm):
        return (
            "  [yellow]not the paper's order: our LPM gives ties to the oldest, so that it serves one user after the "
            f"other in order of arrival, as k = {NUM_REPEATS} does; with ties at random nobody's turn is sure"
        )
    return "  [yellow]not the paper's order, and it is not for how ties are broken: see what came from the cache"


def why_not_better_than_fcfs(found: Rows, share: float | None, at: Sequence[float]) -> str:
    """The paper has k = 2 below FCFS at all rates."""
    cached = {
        curve: dict(zip(RATES, by_rate(found, share, curve, "share_from_cache"), strict=True)) for curve in CURVES
    }
    most = max(cached[BEST][rate] - cached[FCFS][rate] for rate in at)
    what = "finds as much in the cache" if most < TOLERANCE else f"finds up to {most:.0%} less in the cache"
    return f"  [yellow]not the paper's order: {listed(at)} FCFS {what}, and overtakes nobody"


def listed(rates: Sequence[float]) -> str:
    return f"at {', '.join(f'{rate:g}' for rate in rates)} a second" if rates else "nowhere"


def name_of(share: float | None) -> str:
    return f"KV of {NUM_REMEMBERED} prompts" if share is None else f"KV of {share:.0%} of all prompts"


def show(found: Rows, of: Shape) -> None:
    for share in SHARES:
        title = f"P99 TTFT in seconds, and share of the prompts' tokens from the cache; {name_of(share)}"
        table = Table(title=title, title_justify="left")
        table.add_column("per second")
        for rate in RATES:
            table.add_column(f"{rate:g}", justify="right")
        for curve in CURVES:
            cached = by_rate(found, share, curve, "share_from_cache")
            p99 = by_rate(found, share, curve)
            table.add_row(curve, *(f"{s:.2f} [dim]{c:.0%}[/]" for s, c in zip(p99, cached, strict=True)))
        table.add_section()
        for name, label in (("k_lpm", "bound, k = 4"), ("k_lpm_at_once", "  with T = 0")):
            table.add_row(label, *(f"{bounds(of, rate)[name]:.2f}" for rate in RATES))
        console.print(table)


def draw(path: Path, found: Rows, of: Shape) -> None:
    """Write a PNG: a panel for each memory. Needs matplotlib."""
    figure, panels = make_panels(len(SHARES), height=3.6)
    smooth = [RATES[0] + (RATES[-1] - RATES[0]) * i / 100 for i in range(101)]
    grey = {"color": "#8a8a8a", "linewidth": 1.1}
    for panel, share in zip(panels, SHARES, strict=True):
        for curve, colour, width in zip(CURVES, COLOURS, WIDTHS, strict=True):
            dashes = (0, (4, 2)) if curve == TIE_BLIND else "-"
            values = by_rate(found, share, curve)
            panel.plot(
                RATES, values, color=colour, linestyle=dashes, linewidth=width, marker="o", markersize=3, label=curve
            )
        stated = [bounds(of, rate)["k_lpm"] for rate in smooth]
        panel.plot(smooth, stated, **grey, label="theorem 2, k = 4: longest TTFT")
        at_once = [(rate, bounds(of, rate)["k_lpm_at_once"]) for rate in smooth]
        kept = [(rate, s) for rate, s in at_once if s > 0]
        panel.plot(*zip(*kept, strict=True), **grey, linestyle=(0, (1, 1.5)), label="the same with T = 0 (not proved)")
        panel.set_yscale("log")
        panel.set_ylim(min(row["p99"] for row in found) / 1.5, 1.5 * max(stated))
        plain_log_ticks(panel.yaxis)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_title(name_of(share), loc="left", fontsize=10)
        panel.set_xlabel("prompts per second")
    panels[0].set_ylabel("P99 TTFT (seconds)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    write_atomic(path, drawn.getvalue())


def made(arguments: argparse.Namespace, of: Shape, found: Rows) -> dict[str, Any]:
    plugged_in = {name: value for name, value in asdict(theorem(of, 1.0, 0.0)).items() if name in ("n", "u", "d")}
    return {
        "command": "make -C bench k-lpm",
        "num_seeds": arguments.seeds,
        "shape": asdict(of),
        "profile": PROFILE,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": BUDGET,
        "kv_tokens": [{"share": share, "kv_tokens": kv_tokens(share, of)} for share in SHARES],
        "curves": CURVES,
        "theorem": {**plugged_in, "k": NUM_REPEATS, "s": "1 / rate", "T": "s n; at_once: 0"},
        "bounds": [{"rate": rate, **bounds(of, rate)} for rate in RATES],
        "versions": versions(),
        "results": found,
        "verdicts": [Text.from_markup(line).plain for line in verdicts(found, of)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, default=2, help="how many, from 1 on (default: 2)")
    add("--prompts", type=int, default=600, help="in each cell (default: 600)")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=KEPT / "k-lpm", metavar="FOLDER", help="default: %(default)s")
    add("--force", action="store_true", help="run finished cells again")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG there")
    arguments = parser.parse_args()
    of, cells, store = shape(arguments.prompts), make_cells(arguments), CellStore(arguments.output)
    flat = [cell for of_seed in zip(*cells.values(), strict=True) for cell in of_seed]
    run_missing(flat, store, arguments.processes, console, is_forced=arguments.force)
    found = list(rows(cells, store, of))
    show(found, of)
    used = theorem(of, 1.0, math.nan)
    console.print(f"the theorem with n = {used.n}, u = {used.u:.4f} s, d = {used.d:.4f} s, k = {NUM_REPEATS}, T = sn")
    for line in verdicts(found, of):
        console.print(line)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(made(arguments, of, found), indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, found, of)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
