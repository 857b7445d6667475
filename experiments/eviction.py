"""Recompute, swap, or what costs less: what becomes of KV that is taken away, under memory pressure, in virtual time.

    python experiments/eviction.py [--seeds N] [--queries CRAWLER,ANNS] [--json FILE]

Two loads whose idle streams hold more KV than there is, on an engine with all, half and a quarter of its memory, and
with a host link that is slow, usual and fast; beside them the same loads without streaming. The loads are paired by
seed: every way gets the same queries at the same times. Percentiles are of all requests of all seeds; the spread is
that of 1,000 bootstrap samples of whole seeds. Finished cells stay in a folder, and the same command goes on there.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from missing_cells import run_missing
from rich.console import Console
from rich.table import Table
from seed_ratios import Ratio, percentile_ratios

from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.engine.recompute_or_swap import EVICTIONS
from streamrag.support.files import write_atomic
from streamrag_bench.cell import CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.store import CellStore, read_cell
from streamrag_bench.summary import Digest, digest, percentile

PROFILES = ("h200-llama8b-tp2", "h200-llama8b-tp2-slow-host", "h200-llama8b-tp2-fast-host")
SHARES = (1.0, 0.5, 0.25)
HOST_KV_BYTES = 128 << 30
"""Bytes for each GPU's worker: half of the host memory that a usual node has for each of its GPUs."""
TOLERANCE = 0.02
BETTER_AT = (50, 95, 99)
STREAMING_AT = (50, 90, 95, 99)

console = Console(highlight=False, width=None if Console().is_terminal else 140)


class Load(NamedTuple):
    """A workload with gaps so long that idle streams hold more than the whole memory."""

    workload: str
    qps: float
    delay: float
    num_queries: int


LOADS = {"crawler": Load("crawler", 4.0, 14.0, 2_000), "anns": Load("anns-last", 2.0, 30.0, 500)}


class Point(NamedTuple):
    """What is the same for all that is compared with each other."""

    load: str
    share: float

    @property
    def name(self) -> str:
        load = LOADS[self.load]
        return f"{self.load}, {load.qps:g} QPS, gaps {load.delay:g}x, {self.share:g} of the KV memory"


class Way(NamedTuple):
    """How a load is served. Profiles differ in their copies only, so that one will do where nothing is copied."""

    eviction: str
    """Or "no-streaming"."""
    profile: str | None


@dataclass(frozen=True)
class Plan:
    """The cells, by what they are."""

    cells: Mapping[tuple[Point, Way], tuple[CellSettings, ...]]
    """One for each seed."""

    def all_cells(self) -> list[CellSettings]:
        """One seed after the other, so that a comparison is complete early."""
        return [cell for of_seed in zip(*self.cells.values(), strict=True) for cell in of_seed]


def make_plan(arguments: argparse.Namespace) -> Plan:
    profiles = [load_profile(name) for name in arguments.profiles]
    check_profiles(profiles)
    ways = [Way("no-streaming", None), Way("recompute", None)]
    ways += [Way(eviction, name) for name in arguments.profiles for eviction in EVICTIONS if eviction != "recompute"]
    cells = {}
    for point in (Point(load, share) for load in arguments.loads for share in arguments.shares):
        for way in ways:
            first = settings(point, way, arguments, kv_tokens=int(point.share * profiles[0].kv_tokens))
            cells[point, way] = tuple(replace(first, seed=1 + i) for i in range(arguments.seeds))
    return Plan(cells)


def settings(point: Point, way: Way, arguments: argparse.Namespace, kv_tokens: int) -> CellSettings:
    load = LOADS[point.load]
    num_queries = dict(zip(LOADS, arguments.queries, strict=True))[point.load]
    cell = CellSettings(
        "virtual",
        load.workload,
        "no-streaming",
        qps=load.qps,
        delay=load.delay,
        kv_tokens=kv_tokens,
        num_queries=num_queries,
        profile=way.profile or arguments.profiles[0],
    )
    if way.eviction == "no-streaming":
        return cell
    cell = replace(cell, arm="streaming", policy=arguments.policy, eviction=way.eviction)  # type: ignore[arg-type]
    return cell if way.eviction == "recompute" else replace(cell, host_kv_bytes=HOST_KV_BYTES)


def check_profiles(profiles: Sequence[StepProfile]) -> None:
    """They must differ in their copies only."""
    steps = [[(2_048, 0)], [(2_048, 30_000)], [(1, 5_000)] * 40]
    if len({(p.kv_tokens, p.block_size, *map(p.step_s, steps)) for p in profiles}) > 1:
        raise SystemExit(f"{', '.join(p.name for p in profiles)} differ in more than their copies")


Digests = Mapping[tuple[Point, Way], Sequence[Digest]]


def read(plan: Plan, store: CellStore) -> Digests:
    """One file after the other: they are large."""
    found = {}
    for key, cells in plan.cells.items():
        paths = [store.find(cell) for cell in cells]
        found[key] = [digest(read_cell(path)) for path in paths if path]
    return found


def after_retrieval(digests: Sequence[Digest]) -> list[Sequence[float]]:
    """The values of each seed."""
    return [d.ttft_after_retrieval_s for d in digests]


def pooled(seeds: Sequence[Sequence[float]], rank: float) -> float:
    return percentile([value for values in seeds for value in values], rank / 100)


def better_rows(digests: Digests, profiles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Cost, and the better one of the two others."""
    for point in dict.fromkeys(point for point, _ in digests):
        for profile in profiles:
            ways = {e: Way(e, None if e == "recompute" else profile) for e in EVICTIONS}
            after = {eviction: after_retrieval(digests[point, way]) for eviction, way in ways.items()}
            found = percentile_ratios(after["cost"], [after["recompute"], after["swap"]], BETTER_AT)
            for rank, one in zip(BETTER_AT, found, strict=True):
                seconds: dict[str, Any] = {e: pooled(values, rank) for e, values in after.items()}
                yield {**point._asdict(), "profile": profile, "percentile": rank, **seconds, **told(one)}


def streaming_rows(digests: Digests) -> Iterator[dict[str, Any]]:
    """Each way of streaming, and not streaming."""
    for point, way in digests:
        if way.eviction == "no-streaming":
            continue
        of, to = after_retrieval(digests[point, way]), after_retrieval(digests[point, Way("no-streaming", None)])
        for rank, one in zip(STREAMING_AT, percentile_ratios(of, [to], STREAMING_AT), strict=True):
            seconds = {"seconds": pooled(of, rank), "no_streaming": pooled(to, rank)}
            yield {**point._asdict(), **way._asdict(), "percentile": rank, **seconds, **told(one)}


def told(found: Ratio) -> dict[str, Any]:
    """As a row has it."""
    is_worse = found.value > 1 + TOLERANCE
    return {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high, "is_worse": is_worse}


def pressure_rows(digests: Digests) -> Iterator[dict[str, Any]]:
    """What memory pressure did; sums over seeds."""
    for (point, way), of_seeds in digests.items():
        totals = [d.copy_totals for d in of_seeds if d.copy_totals]
        num_computed = sum(d.num_computed for d in of_seeds)
        yield {
            **point._asdict(),
            **way._asdict(),
            "num_requests": sum(len(d.ttft_s) for d in of_seeds),
            "num_preemptions": {
                fate: sum((d.num_preemptions or {}).get(fate, 0) for d in of_seeds) for fate in ("recompute", "swap")
            },
            "recompute_tax": sum(d.num_taxed for d in of_seeds) / num_computed,
            "num_tokens_recomputed": sum(sum(d.num_recomputed) for d in of_seeds),
            "num_tokens_loaded": sum(d.num_loaded for d in of_seeds),
            "num_bytes_out": sum(t.num_bytes_out for t in totals),
            "num_bytes_in": sum(t.num_bytes_in for t in totals),
            "out_s": sum(t.out_s for t in totals),
            "in_s": sum(t.in_s for t in totals),
            "busy_share": sum(d.busy_s for d in of_seeds) / sum(d.completion_s for d in of_seeds),
        }


def show_better(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="cost against the better of recompute and swap: ttft_after_retrieval_s", title_justify="left")
    for name in ("load", "KV", "profile", ""):
        table.add_column(name)
    for name in (*EVICTIONS, "cost/better", "spread", ""):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["load"],
            f"{row['share']:g}",
            row["profile"],
            f"P{row['percentile']}",
            *(f"{row[eviction]:.3f}" for eviction in EVICTIONS),
            *ratio_cells(row),
            end_section=row["percentile"] == BETTER_AT[-1],
        )
    console.print(table)


def ratio_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    mark = f"[red]over {1 + TOLERANCE:g}[/]" if row["is_worse"] else ""
    return f"{row['ratio']:.3f}", f"{row['ratio_low']:.2f} .. {row['ratio_high']:.2f}", mark


def show_streaming(rows: Sequence[dict[str, Any]], policy: str) -> None:
    table = Table(title=f"streaming ({policy}) over not streaming: ratios of percentiles", title_justify="left")
    for name in ("load", "KV", "eviction", "profile"):
        table.add_column(name)
    for rank in STREAMING_AT:
        table.add_column(f"P{rank}", justify="right")
    num = len(STREAMING_AT)
    for first in range(0, len(rows), num):
        of_cell = rows[first : first + num]
        ratios = (f"{row['ratio']:.3f}{' !' if row['is_worse'] else ''}" for row in of_cell)
        row = of_cell[0]
        table.add_row(row["load"], f"{row['share']:g}", row["eviction"], row["profile"] or "", *ratios)
    console.print(table)


def show_pressure(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="what memory pressure did, all seeds", title_justify="left")
    for name in ("load", "KV", "eviction", "profile"):
        table.add_column(name)
    for name in ("requests", "recomputed", "swapped", "tax", "loaded Mtok", "GB out", "GB in", "out s", "in s", "busy"):
        table.add_column(name, justify="right")
    for row in rows:
        num = row["num_preemptions"]
        table.add_row(
            *(row["load"], f"{row['share']:g}", row["eviction"], row["profile"] or "", f"{row['num_requests']:,}"),
            *(f"{num['recompute']:,}", f"{num['swap']:,}", f"{row['recompute_tax']:.1%}"),
            *(f"{row[name] / scale:,.1f}" for name, scale in (("num_tokens_loaded", 1e6), ("num_bytes_out", 1e9))),
            *(f"{row['num_bytes_in'] / 1e9:,.1f}", f"{row['out_s']:.1f}", f"{row['in_s']:.1f}"),
            f"{row['busy_share']:.0%}",
        )
    console.print(table)
    streaming = [row for row in rows if row["eviction"] != "no-streaming"]
    idle = [row for row in streaming if not sum(row["num_preemptions"].values())]
    names = "; ".join(f"{row['load']} {row['share']:g} {row['eviction']}" for row in idle)
    console.print(f"{len(idle)} of {len(streaming)} streaming cells have no preemption{': ' + names if names else ''}")


def verdict(better: Sequence[dict[str, Any]], streaming: Sequence[dict[str, Any]]) -> str:
    parts = []
    for rows, what in ((better, "cost/better"), (streaming, "streaming/not streaming")):
        worst = max(rows, key=lambda row: row["ratio"])
        num = sum(row["is_worse"] for row in rows)
        parts.append(f"{what}: {num} of {len(rows)} over {1 + TOLERANCE:g}, the worst {worst['ratio']:.3f}")
    return "; ".join(parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    published = ",".join(str(load.num_queries) for load in LOADS.values())
    add("--seeds", type=int, default=10, help="how many, from 1 on (default: 10)")
    add("--queries", default=published, help=f"of each load: {','.join(LOADS)} (default: {published})")
    add("--loads", default=",".join(LOADS), help="default: %(default)s")
    add("--shares", default=",".join(map(str, SHARES)), help="of the KV memory (default: %(default)s)")
    add("--profiles", default=",".join(PROFILES), help="default: %(default)s")
    add("--policy", default=CellSettings("virtual", "", "streaming").policy, help="default: %(default)s")
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    add("--output", type=Path, default=Path("bench-results/eviction"), metavar="FOLDER", help="default: %(default)s")
    add("--force", action="store_true", help="run finished cells again")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    for name, convert in (("queries", int), ("loads", str), ("shares", float), ("profiles", str)):
        setattr(arguments, name, [convert(part) for part in getattr(arguments, name).split(",")])
    return arguments


def main() -> None:
    arguments = parse()
    plan, store = make_plan(arguments), CellStore(arguments.output)
    run_missing(plan.all_cells(), store, arguments.processes, console, is_forced=arguments.force)
    digests = read(plan, store)
    better = list(better_rows(digests, arguments.profiles))
    streaming, pressure = list(streaming_rows(digests)), list(pressure_rows(digests))
    show_pressure(pressure)
    show_better(better)
    show_streaming(streaming, arguments.policy)
    console.print(verdict(better, streaming))
    if arguments.json:
        loads = {name: {**LOADS[name]._asdict(), "num_queries": arguments.queries[i]} for i, name in enumerate(LOADS)}
        made = {
            "command": "make bench-eviction",
            "num_seeds": arguments.seeds,
            "policy": arguments.policy,
            "loads": loads,
            "host_kv_bytes": HOST_KV_BYTES,
            "versions": versions(),
            "profiles": {name: asdict(load_profile(name).copies) for name in arguments.profiles},  # type: ignore[arg-type]
            "better": better,
            "streaming": streaming,
            "pressure": pressure,
        }
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
