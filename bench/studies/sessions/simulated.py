"""What a session's questions take on GPUs, in virtual time: vLLM's own scheduler and KV cache manager, no model.

    python -m studies.sessions.simulated [--tables NAMES] [--devices NAMES] [--policy NAME] [--json FILE]
        [--plot FILE]

The sessions are those of streamrag, on a simulated engine: two H200 (`h200-llama8b-tp2`), and one L40S (`l40s-llama8b`,
derived from its data sheet and measured nowhere). Tables:

growing    the evaluation of arXiv 2605.13784: 100 samples, then cycles of 55 more and a question, or all six, a second
           after the data or with them; a session of ours, vLLM's own (see session_arms.py), plain requests with vLLM's
           prefix cache and without
ingestion  questions one after the other while data stream in, up to more than the engine can take in
window     share of the window that goes at a time: what it costs, what it keeps, what questions take
flash      watched questions: how many are answered before they are asked
many       a hundred sessions on one engine

What `--tables` and `--devices` leave out stays in the file as it was.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from streamrag_bench.report.canvas import make_panels, plain_log_ticks
from streamrag_bench.summary import percentile
from studies.sessions.arms import ARMS, BESIDE, INSIDE, SESSION, UNCACHED, Asked, StockSession, Text, ask, ask_plain
from studies.sessions.loads import NUM_OUTPUT_TOKENS, PARAMS, Row, flash, ingestion, many, most_flash, opened, window
from studies.sessions.prices import NUM_FIRST, NUM_MORE, QUESTIONS, samples
from studies.sessions.simulation import Device, simulated

DEVICES = {"2 x H200": "h200-llama8b-tp2", "L40S": "l40s-llama8b"}
NUM_CYCLES = 15
SETTINGS = ((1, 1.0), (6, 1.0), (1, 0.0))
"""Questions in each cycle, and seconds from the data to the first of them. The first pair is as published."""
RATES = (0, 1, 10, 100, 1_000, 10_000)
SHARES = (0.1, 0.25, 0.5, 0.75)
WINDOW_RATES = {"2 x H200": (10, 100, 1_000), "L40S": (10, 100)}
INTERVALS_S = (1.0, 0.25, 0.1)
PUBLISHED_MS = {"its session": 43.0, "its vLLM": 139.1}
"""Mean latency to the end of the answer on an L40S: arXiv 2605.13784, section 5.1."""
COLOURS = ("#d55e00", "#e69f00", "#009e73", "#0072b2", "#000000")
STYLES = ("-", (0, (5, 3)), (0, (1, 2)), "-", "-")
WIDTHS = (3.5, 2.0, 2.0, 1.5, 1.5)
"""Where curves lie upon each other, all can be seen."""
Results: TypeAlias = dict[str, dict[str, list[Row]]]
"""Rows by device and table."""
Work: TypeAlias = Callable[[Device], Coroutine[Any, Any, Row]]

console = Console(highlight=False, width=None if Console().is_terminal else 140)


# ------------------------------------------------------------------------------------------------------------ growing


async def growing(device: Device, arm: str, num_questions: int, gap_s: float, num_cycles: int = NUM_CYCLES) -> Row:
    """Questions come `gap_s` after the data that they are about, and one after the other."""
    asked: list[Asked] = []
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            simulated(device, is_stock=arm != SESSION, has_prefix_cache=arm != UNCACHED)
        )
        text, lines = Text(site.backend.model), samples(NUM_FIRST + num_cycles * NUM_MORE)
        session = stock = None
        if arm == SESSION:
            session = await stack.enter_async_context(opened(site, window_tokens=30_000))
        elif arm in (INSIDE, BESIDE):
            stock = await stack.enter_async_context(StockSession(site.client))
        for cycle in range(num_cycles):
            start = NUM_FIRST + cycle * NUM_MORE if cycle else 0
            batch = lines[start : NUM_FIRST + (cycle + 1) * NUM_MORE]
            new, version = text.add(batch), 0
            if session:
                for line in batch:
                    version = await session.append(line)
            elif stock:
                stock.put(new)
            await asyncio.sleep(gap_s)
            for number in range(num_questions):
                question = QUESTIONS[(cycle + number) % len(QUESTIONS)]
                if session:
                    asked.append(await ask(session, question, PARAMS, at_least=version))
                elif stock and arm == INSIDE:
                    asked.append(await stock.ask(text.tail(question), NUM_OUTPUT_TOKENS))
                else:
                    name = f"question {len(asked)}"
                    asked.append(await ask_plain(site.client, name, text.complete(question), NUM_OUTPUT_TOKENS))
            await asyncio.sleep(1.0)  # what was taken in late is out of the way of the next cycle
    third = max(len(asked) // 3, 1)
    lasts = [a.last_s for a in asked]
    return {
        "arm": arm,
        "num_questions": num_questions,
        "gap_s": gap_s,
        "mean_last_s": mean(lasts),
        "longest_over_shortest": median(lasts[-third:]) / median(lasts[:third]),
        "last_over_first": lasts[-1] / lasts[0],
        **{f"p{r}_{n}": percentile(v, r / 100) for r in (50, 95) for n, v in of_tokens(asked).items()},
        "num_computed_p50": median(a.num_tokens - (a.num_cached or 0) for a in asked),
        "asked": [{k: v for k, v in asdict(a).items() if k != "token_ids"} for a in asked],
    }


def of_tokens(asked: Sequence[Asked]) -> dict[str, list[float]]:
    return {"first_s": [a.first_s for a in asked], "last_s": [a.last_s for a in asked]}


# -------------------------------------------------------------------------------------------------------- all tables

Column: TypeAlias = tuple[str, Callable[[Row], str]]


def works(device: str) -> Iterator[tuple[str, Work]]:
    """What there is to simulate, by table."""
    for num_questions, gap_s in SETTINGS:
        for arm in ARMS:
            yield "growing", partial(growing, arm=arm, num_questions=num_questions, gap_s=gap_s)
    for rate in RATES:
        yield "ingestion", partial(ingestion, rate=rate, for_s=15.0)
    for rate in WINDOW_RATES[device]:
        for share in SHARES:
            yield "window", partial(window, rate=rate, share=share, num_windows=1.5, num_asked=300)
    for interval_s in INTERVALS_S:
        yield "flash", partial(flash, interval_s=interval_s, num_cycles=60)
        yield "most_flash", partial(most_flash, interval_s=interval_s)
    yield "many", partial(many, num_sessions=100)


def ms(key: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row[key]:,.1f}"


def number(key: str, form: str = ",.0f") -> Callable[[Row], str]:
    return lambda row: format(row[key], form)


COLUMNS: dict[str, tuple[Column, ...]] = {
    "growing": (
        ("asked", number("num_questions")),
        ("s later", number("gap_s", "g")),
        ("", lambda row: str(row["arm"])),
        ("first P50, ms", ms("p50_first_s")),
        ("P95", ms("p95_first_s")),
        ("last P50", ms("p50_last_s")),
        ("P95", ms("p95_last_s")),
        ("mean", ms("mean_last_s")),
        ("long/short", number("longest_over_shortest", ".2f")),
        ("computed, P50", number("num_computed_p50")),
    ),
    "ingestion": (
        ("samples/s", number("rate", ",g")),
        ("questions", number("num_asked")),
        ("first P50, ms", ms("p50_first_s")),
        ("P95", ms("p95_first_s")),
        ("P99", ms("p99_first_s")),
        ("behind P50", number("p50_behind")),
        ("P99", number("p99_behind")),
        ("P50, ms", ms("p50_behind_s")),
        ("P99, ms", ms("p99_behind_s")),
        ("dropped", number("num_dropped")),
        ("of", number("num_appended")),
        ("slid", number("num_slid")),
    ),
    "window": (
        ("samples/s", number("rate", ",g")),
        ("slide_share", number("slide_share", "g")),
        ("computed/token", number("computed_per_token", ".2f")),
        ("busy", number("busy_share", ".0%")),
        ("most KV/window", number("most_kv_of_window", ".2f")),
        ("kept/window", number("mean_kept_of_window", ".2f")),
        ("first P50, ms", ms("p50_first_s")),
        ("P99", ms("p99_first_s")),
        ("behind P50, ms", ms("p50_behind_s")),
        ("P99", ms("p99_behind_s")),
        ("most", ms("most_behind_s")),
        ("dropped", number("num_dropped")),
    ),
    "flash": (
        ("data every, s", number("interval_s", "g")),
        ("answered before", number("num_hits")),
        ("not", number("num_misses")),
        ("computed ahead", number("num_ahead")),
        ("hit P50, ms", ms("p50_hit_s")),
        ("miss P50, ms", ms("p50_miss_s")),
    ),
    "most_flash": (
        ("data every, s", number("interval_s", "g")),
        ("watched", number("num_watched")),
        ("answered in between, P50", number("num_answered_p50")),
    ),
    "many": (
        ("sessions", number("num_sessions")),
        ("tokens each", number("num_tokens")),
        ("all stood after, ms", ms("ready_s")),
        ("first P50, ms", ms("p50_first_s")),
        ("P99", ms("p99_first_s")),
        ("busy", number("busy_share", ".0%")),
        ("KV each, tokens", number("kv_tokens_each")),
    ),
}


def show(device: str, name: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"{device}: {name}", title_justify="left")
    for title, _ in COLUMNS[name]:
        table.add_column(title, justify="right" if title else "left", no_wrap=not title)
    for row in rows:
        table.add_row(*(write(row) for _, write in COLUMNS[name]))
    console.print(table)
    if (device, name) == ("L40S", "growing"):
        told = ", ".join(f"{whose} {value:g}" for whose, value in PUBLISHED_MS.items())
        console.print(f"published means to the last token, one question in each cycle, on an L40S: {told} ms")


def draw(path: Path, by_device: dict[str, list[Row]]) -> None:
    """Write a PNG: latency to the last token over the context's length, as published. Needs matplotlib."""
    figure, panels = make_panels(len(by_device), height=3.6)
    for panel, (device, rows) in zip(panels, by_device.items(), strict=True):
        as_published = [row for row in rows if (row["num_questions"], row["gap_s"]) == SETTINGS[0]]
        for row, colour, style, width in zip(as_published, COLOURS, STYLES, WIDTHS, strict=True):
            sizes = [asked["num_tokens"] for asked in row["asked"]]
            lasts = [1e3 * asked["last_s"] for asked in row["asked"]]
            panel.plot(sizes, lasts, color=colour, linestyle=style, linewidth=width, label=row["arm"])
        if device == "L40S":
            for whose, value in PUBLISHED_MS.items():
                panel.axhline(value, color="#8a8a8a", linewidth=1.0, linestyle=(0, (4, 2)))
                panel.annotate(f"published: {whose}, {value:g}", (4_600, 1.06 * value), fontsize=7, color="#5a5a5a")
        panel.set_yscale("log")
        plain_log_ticks(panel.yaxis)
        panel.grid(color="#e4e4e4", linewidth=0.6)
        panel.set_title(f"{device}, simulated", loc="left", fontsize=10)
        panel.set_xlabel("tokens of context")
    panels[0].set_ylabel("question to last token (ms)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    write_atomic(path, drawn.getvalue())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join(COLUMNS)
    parser.add_argument("--tables", default=every, metavar="NAMES", help="which; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growing context there, a PNG")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=DEVICES, help="which; default: all")
    parser.add_argument("--policy", metavar="NAME", help="of our scheduler; its figures stand beside the default's")
    arguments = parser.parse_args(argv)
    chosen = arguments.tables.split(",")
    if unknown := set(chosen) - set(COLUMNS):
        parser.error(f"--tables: there is no {', '.join(sorted(unknown))}; choose from {every}")
    scheduler = {"policy": arguments.policy} if arguments.policy else {}
    todo = [(device, name, work) for device in arguments.devices for name, work in works(device) if name in chosen]
    measured: Results = {}
    with Progress(console=Console(stderr=True)) as progress:
        for device, name, work in progress.track(todo, description="simulating"):
            rows = measured.setdefault(", ".join([device, *scheduler.values()]), {}).setdefault(name, [])
            rows.append(run_virtual(work(Device(load_profile(DEVICES[device]), scheduler))))
    for device, tables in measured.items():
        for name, rows in tables.items():
            show(device, name, rows)
    before: Results = {}
    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text())["results"]
    found = before | {device: before.get(device, {}) | tables for device, tables in measured.items()}
    if arguments.json:
        made = {
            "command": "make -C bench sessions",
            "profiles": DEVICES,
            "num_output_tokens": NUM_OUTPUT_TOKENS,
            "published_ms": PUBLISHED_MS,
            "versions": versions(),
            "results": found,
        }
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")
    if arguments.plot:
        draw(arguments.plot, {device: tables["growing"] for device, tables in found.items() if "growing" in tables})


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
