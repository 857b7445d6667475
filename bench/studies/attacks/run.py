"""What one malicious client costs all others: latency of well-behaved clients and memory of the service, per attack.

    python -m studies.attacks.run [--only NAME ...] [--seconds 10] [--no-keys] [--json FILE]

Each attack meets a service of its own, with the default limits and a simulated engine. Well-behaved clients ask six
questions a second with their own key, each on a new connection, first alone and then beside the attack. The service is
pinned to the first core and everything else to the other ones, and the attacker runs at a low priority, so that it
takes no time from the clients that measure. On a busy machine, start it with `chrt -r 2` in front, so that other
processes take no time from the attacker either. An attack is held if the 50th and 95th percentiles of the latency of
whole answers grow by no more than a third, if no question fails, and if the service's memory (RSS, at its peak) grows
by no more than 200 MB. The exit status is 1 if an attack is not held.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrag.support.files import write_atomic
from streamrag_bench.summary import percentile

from .connections import connected, head
from .service import ATTACKER, VICTIM

MOST_RATIO = 4 / 3
MOST_GROWTH_MB = 200.0
QUESTIONS_PER_S = 6.0
WARM_UP_S = 3.0
START_S = 60.0
SAMPLE_S = 0.02

MODULES = ("connections", "sessions")

console = Console(highlight=False)


def attacks() -> dict[str, Callable[[int, str | None, float], Coroutine[Any, Any, str]]]:
    """Return all attacks by name."""
    found: dict[str, Callable[[int, str | None, float], Coroutine[Any, Any, str]]] = {}
    for name in MODULES:
        if importlib.util.find_spec(f"{__package__}.{name}"):
            module = importlib.import_module(f"{__package__}.{name}")
            assert not found.keys() & module.ATTACKS.keys()
            found |= module.ATTACKS
    return found


# ---------------------------------------------------------------------------------------------------------- processes


@asynccontextmanager
async def service(options: list[str]) -> AsyncIterator[tuple[int, int]]:
    """A service in a process of its own: its port and its process id."""
    command = [sys.executable, "-m", f"{__package__}.service", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        assert line, "the service did not start"
        yield int(line), process.pid
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # an attacked service may take its time, which nobody asks here
        await process.wait()


async def attacked(name: str, port: int, key: str | None, seconds: float) -> str:
    """Run an attack in a process of its own, and return the line that says what it sent."""
    command = [sys.executable, "-m", f"{__package__}.run", "--attack", name, str(port), key or "", str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds + START_S):
            return (await process.stdout.read()).decode().strip() or "the attack failed"
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def watch_memory(pid: int, samples: list[float]) -> None:
    """Append the resident memory of a process in MB, every 20 ms, until cancelled or until the process has ended."""
    with suppress(OSError, IndexError):
        while True:
            samples.append(resident_mb(pid))
            await asyncio.sleep(SAMPLE_S)


# -------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Latency:
    """Latency of whole answers, of well-behaved clients."""

    p50_s: float
    p95_s: float
    max_s: float
    num_answered: int
    failures: list[str]


async def ask(port: int, key: str | None, timeout_s: float) -> float:
    """Ask one question on a new connection, and return the seconds until the answer was whole."""
    fields = {"question": "What is the capital of France?", "max_tokens": 16}
    body = json.dumps(fields).encode()
    began_s = time.perf_counter()
    async with asyncio.timeout(timeout_s), connected(port) as (reader, writer):
        writer.write(head("POST", "/v1/ask", key, f"content-length: {len(body)}", "connection: close") + body)
        answer = await reader.read()
    if not answer.startswith(b"HTTP/1.1 200") or b"event: answered" not in answer:
        raise RuntimeError(answer[-200:].decode(errors="replace"))
    return time.perf_counter() - began_s


async def measure(port: int, key: str | None, seconds: float) -> Latency:
    """Ask at random times (Poisson) for so many seconds, whether earlier questions were answered or not."""
    rng = random.Random(0)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    at_s = loop.time()
    tasks = []
    while (at_s := at_s + rng.expovariate(QUESTIONS_PER_S)) < end_s:
        await asyncio.sleep(at_s - loop.time())
        tasks.append(asyncio.create_task(ask(port, key, timeout_s=seconds + 30)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    times_s = [each for each in results if isinstance(each, float)]
    failures = [f"{type(each).__name__}: {each}" for each in results if isinstance(each, BaseException)]
    return Latency(
        percentile(times_s, 0.5), percentile(times_s, 0.95), max(times_s, default=float("nan")), len(times_s), failures
    )


@dataclass(frozen=True)
class Row:
    """What one attack did."""

    attack: str
    sent: str
    alone: Latency
    beside: Latency
    growth_mb: float

    @property
    def ratios(self) -> tuple[float, float]:
        """Latency beside the attack over latency without: the 50th and the 95th percentile."""
        return self.beside.p50_s / self.alone.p50_s, self.beside.p95_s / self.alone.p95_s

    @property
    def is_held(self) -> bool:
        """Whether the attack stays within the limits."""
        return (
            not self.beside.failures
            and all(ratio <= MOST_RATIO for ratio in self.ratios)
            and self.growth_mb <= MOST_GROWTH_MB
        )


async def run(name: str, seconds: float, has_keys: bool, options: list[str]) -> Row:
    """Measure one attack on a service of its own."""
    victim, attacker = (VICTIM, ATTACKER) if has_keys else (None, None)
    async with service([*options, "--keys"] if has_keys else options) as (port, pid):
        await measure(port, victim, WARM_UP_S)
        alone = await measure(port, victim, seconds)
        samples: list[float] = [resident_mb(pid)]
        watching = asyncio.create_task(watch_memory(pid, samples))
        attacking = asyncio.create_task(attacked(name, port, attacker, seconds))
        await asyncio.sleep(1.0)  # a process starts in that time
        beside = await measure(port, victim, seconds)
        sent = await attacking
        watching.cancel()
    return Row(name, sent, alone, beside, max(samples) - samples[0])


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table("attack", "sent", "P50 alone, beside, ms", "P95 alone, beside, ms", "ratios", "max, s", "MB", "held")
    for row in rows:
        p50, p95 = row.ratios
        table.add_row(
            row.attack,
            row.sent,
            f"{row.alone.p50_s * 1e3:.0f}, {row.beside.p50_s * 1e3:.0f}",
            f"{row.alone.p95_s * 1e3:.0f}, {row.beside.p95_s * 1e3:.0f}",
            f"{p50:.2f}, {p95:.2f}",
            f"{row.beside.max_s:.2f}",
            f"{row.growth_mb:.0f}",
            "yes" if row.is_held else f"NO {row.beside.failures[:1] or ''}",
        )
    console.print(table)


def yield_to_clients() -> None:
    """Give this process, an attacker, a lower priority than the clients that measure."""
    priority = os.sched_getparam(0).sched_priority
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.nice(19)
    elif priority > 1:  # still before all that is not part of the measurement
        os.sched_setparam(0, os.sched_param(priority - 1))
    else:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def pin() -> list[str]:
    """Keep this process and its children off the first core, and return the options that pin the service to it."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        console.print("there is one core only: the attacker takes time from the service")
        return []
    os.sched_setaffinity(0, others)
    return ["--core", str(first)]


async def main(names: list[str], seconds: float, has_keys: bool) -> list[Row]:
    """Measure these attacks, one after the other."""
    options = pin()
    rows = []
    for name in names:
        rows.append(await run(name, seconds, has_keys, options))
        show(rows[-1:])
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        name, port, key, seconds = sys.argv[2:]
        yield_to_clients()
        print(asyncio.run(attacks()[name](int(port), key or None, float(seconds))), flush=True)
        sys.exit()
    parser = argparse.ArgumentParser(
        prog="python -m studies.attacks.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(attacks()), default=list(attacks()), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-keys", action="store_true", help="nobody has a key; all come from loopback")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(main(args.only, args.seconds, not args.no_keys))
    if len(rows) > 1:
        show(rows)
    if args.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        rows_of = [asdict(row) | {"ratios": row.ratios, "is_held": row.is_held} for row in rows]
        write_atomic(args.json, (json.dumps({"rows": rows_of, "machine": machine}, indent=2) + "\n").encode())
    sys.exit(not all(row.is_held for row in rows))
