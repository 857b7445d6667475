"""The cost of planning: microseconds that our `schedule` takes over vLLM's own, with 50 and 500 requests.

    python -m studies.step_cost.run [--policies NAMES] [--json FILE]

vLLM's real scheduler and KV cache manager, no model, one process. Both schedulers take turns, step by step; what is
measured is the thread's CPU time. Where other programs share caches and cores, that doubles at times; so the target is
for the quietest round, the one in which vLLM's own took least. Beside it, what the policy's sort takes alone. What
vLLM's own cannot have, partial and idle prompts, waits there as complete ones.

The load of sessions, whose requests have classes, is measured with the default policy alone, and with what the
scheduler can do for them.
"""

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.hooks import StreamingScheduler
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.core import RequestClass
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile
from studies.step_cost.schedulers import NUM_BLOCKS, decode, loaded, no_collections, prefill, prompt, timed

MOST_MORE_US = {50: 100.0, 500: 500.0}
"""Microseconds that a step may take more, by the number of requests."""
NUM_STEPS = 30
POLICIES = (EngineOptions().policy, "fcfs", "mcps", "k_lpm(4)")
SESSIONS = "sessions"
NUM_BLOCKS_AT_HIGH_WATER = 4
"""For each request: more than idle data hold, and less than they and answers do."""
WAYS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "": lambda num: {},
    "no classes": lambda num: {"class_ageing_s": None},
    "high water .95": lambda num: {"data_high_water": 0.95},
    "above high water": lambda num: {"data_high_water": num * NUM_BLOCKS_AT_HIGH_WATER / NUM_BLOCKS},
}
"""Options by the number of requests; the last three for sessions alone."""

console = Console(highlight=False, width=None if Console().is_terminal else 140)


def all_states(made: SimulatedEngine, num: int) -> None:
    """A quarter each decode, are idle, wait with a complete prompt, and wait with a partial one."""
    in_all_states(made, num, ["pool"] * 4)


def sessions(made: SimulatedEngine, num: int) -> None:
    """The same: what users asked, data that stand, what is answered ahead and what others ask, and data that came."""
    in_all_states(made, num, ["session", "stream", "session", "stream"])


def in_all_states(made: SimulatedEngine, num: int, classes: Sequence[RequestClass]) -> None:
    """`classes` of those that decode, are idle, wait with a complete prompt (half of them), and with a partial one."""
    can_stream = isinstance(made.scheduler, StreamingScheduler)

    def chunk(request_class: RequestClass, *, is_complete: bool) -> PromptMessage | None:
        is_plain = not can_stream or (is_complete and request_class == "pool")
        return None if is_plain else PromptMessage(0, 0, is_complete, request_class=request_class)

    rng, size, params = random.Random(0), 1_000 if num > 100 else 7_000, SamplingParams(max_tokens=500)
    if can_stream:
        for i in range(num // 4):
            made.add(f"i{i}", prompt(rng, 200), params, chunk(classes[1], is_complete=False))
        while len(made.scheduler.plugin.queues.idle) < num // 4:
            made.step()
    decode(made, num // 4, chunk(classes[0], is_complete=True))
    for i in range(num // 4 if can_stream else num // 2):
        made.add(f"w{i}", prompt(rng, size), params, chunk(classes[2] if i % 2 else "pool", is_complete=True))
    for i in range(num - len(made.scheduler.requests)):
        made.add(f"s{i}", prompt(rng, size), params, chunk(classes[3], is_complete=False))


Key: TypeAlias = tuple[int, str, str, str]
"""Number of requests, load, policy and way."""
LOADS: Mapping[str, Callable[[SimulatedEngine, int], None]] = {
    "all states": all_states,
    "all wait, complete": prefill,
    SESSIONS: sessions,
}


@dataclass
class Times:
    """Of each step, in seconds."""

    stock: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    order: list[float] = field(default_factory=list)
    """Of the policy's sorts, of which a step has one or two."""


def take_turns(load: str, num: int, policy: str, way: str) -> Times:
    """One round."""
    times = Times()
    stock = loaded(LOADS[load], num, Scheduler)
    ours = loaded(LOADS[load], num, StreamingScheduler, policy, **WAYS[way](num))
    clock = time.thread_time
    with ExitStack() as measuring:
        measuring.enter_context(no_collections())
        measuring.enter_context(timed(stock.scheduler, "schedule", times.stock, clock))
        measuring.enter_context(timed(ours.scheduler, "schedule", times.ours, clock))
        measuring.enter_context(timed(ours.scheduler.plugin.policy, "order", times.order, clock))
        for _ in range(NUM_STEPS):
            stock.step()
            ours.step()
    return times


def rows(measured: Mapping[Key, Sequence[Times]]) -> Iterator[dict[str, Any]]:
    for (num, load, policy, way), rounds in measured.items():
        us = {
            f"{name}_p{rank}_us": 1e6 * percentile([s for times in rounds for s in getattr(times, name)], rank / 100)
            for name in ("stock", "ours", "order")
            for rank in (50, 99)
        }
        quietest = min(rounds, key=lambda times: median(times.stock))
        more = 1e6 * (median(quietest.ours) - median(quietest.stock))
        yield {
            "num_requests": num,
            "load": load,
            "policy": policy,
            "way": way,
            **us,
            "ratio_p50": us["ours_p50_us"] / us["stock_p50_us"],
            "quietest_stock_us": 1e6 * median(quietest.stock),
            "quietest_ours_us": 1e6 * median(quietest.ours),
            "more_us": more,
            "most_more_us": MOST_MORE_US[num],
            "is_met": more <= MOST_MORE_US[num],
        }


def named(row: Mapping[str, Any]) -> str:
    return f"{row['policy']}, {row['way']}" if row["way"] else str(row["policy"])


def show(found: Sequence[dict[str, Any]]) -> None:
    table = Table(title="microseconds of CPU time per step: P50 / P99", title_justify="left")
    for name in ("requests", "load", "policy"):
        table.add_column(name)
    for name in ("stock", "ours", "ratio", "quietest", "more", "target", "sort alone"):
        table.add_column(name, justify="right")
    for i, row in enumerate(found):
        pairs = {
            name: f"{row[f'{name}_p50_us']:,.0f} / {row[f'{name}_p99_us']:,.0f}" for name in ("stock", "ours", "order")
        }
        colour = "green" if row["is_met"] else "red"
        table.add_row(
            *(
                str(row["num_requests"]),
                row["load"],
                ", ".join(filter(None, (row["policy"], row["way"]))),
                pairs["stock"],
                pairs["ours"],
            ),
            *(f"{row['ratio_p50']:.2f}", f"{row['quietest_stock_us']:,.0f}, {row['quietest_ours_us']:,.0f}"),
            *(f"[{colour}]{row['more_us']:,.0f}[/]", f"{row['most_more_us']:,.0f}", pairs["order"]),
            end_section=i + 1 == len(found) or found[i + 1]["load"] != row["load"],
        )
    console.print(table)


def machine() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": names[0] if names else platform.processor(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--policies", default=";".join(POLICIES), help="with semicolons between them (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help=f"of {NUM_STEPS} steps (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    policies = dict.fromkeys(arguments.policies.split(";"))
    measured: dict[Key, list[Times]] = {
        (num, load, policy, way): []
        for num in MOST_MORE_US
        for load in LOADS
        for policy in policies
        for way in (WAYS if load == SESSIONS else [""])
        if load != SESSIONS or policy == POLICIES[0]
    }
    runs = [key for _ in range(arguments.rounds) for key in measured]
    for num, load, policy, way in track(runs, "stepping", console=console, transient=True):
        measured[num, load, policy, way].append(take_turns(load, num, policy, way))
    found = list(rows(measured))
    show(found)
    ours = [row for row in found if row["policy"] == POLICIES[0]]
    missed = [
        f"{row['num_requests']} requests, {row['load']} {row['way']}".strip() for row in ours if not row["is_met"]
    ]
    console.print(
        f"the default policy, {POLICIES[0]}: " + (f"MISSED with {'; '.join(missed)}" if missed else "all met")
    )
    if arguments.json:
        made = {
            "command": "make -C bench step-cost",
            "date": date.today().isoformat(),
            "num_rounds": arguments.rounds,
            "machine": machine(),
            "versions": versions(),
            "results": found,
        }
        write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
