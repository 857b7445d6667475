"""How much longer do whole answers of our server take than those of vLLM's own?

    python -m studies.harnesses.turns [--answers N] [--rounds N] [--turns N] [--same] [--json FILE]

A harness asks one server for a minute, and the machine changes meanwhile: its rounds differ by several percent. Here
the servers take turns of a few seconds. In each, one of them answers `--answers` prompts at once. The server that
starts later is faster until it ends, by 2 to 15 %, even after one of vLLM that nobody asks. So a round starts both in
one order and then in the other, and the standard errors are those of rounds. `--same` compares two servers of vLLM,
whose ratio should be 1.
"""

import argparse
import asyncio
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import httpx
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag.testing import make_demo_model
from studies.harnesses.run import NAME, NUM_OUTPUT, SERVERS, UNASKED, server_command
from studies.results_file import write_results
from studies.servers import start_server

NUM_NUMBERS = 90  # 270 tokens
WARM_UP = 2
FIELDS = {
    "all answers": "all_answers_s",
    "server's CPU": "server_cpu_s",
    "engine's CPU": "engine_cpu_s",
    "workers' CPU": "worker_cpu_s",
}
"""Fields of a `Turn`, by the name in the table."""

console = Console(highlight=False)


@dataclass(frozen=True)
class Turn:
    """One load on one server, with CPU seconds of its processes."""

    start: int
    """Which start of both servers, two in a round; in those with an odd number, the second one started first."""
    turn: int
    server: str
    all_answers_s: float
    server_cpu_s: float
    engine_cpu_s: float
    worker_cpu_s: float


def cpu_by_process(server: psutil.Process) -> list[float]:
    """Return the CPU seconds so far of the process that listens, of the engine's, and of all others below them."""
    seconds = [0.0, 0.0, 0.0]
    for process in [server, *server.children(recursive=True)]:
        times = process.cpu_times()
        part = 0 if process == server else 1 if "EngineC" in process.name() else 2
        seconds[part] += times.user + times.system
    return seconds


async def ask(client: httpx.AsyncClient, url: str, prompt: str) -> None:
    """Read a whole streamed answer of `NUM_OUTPUT` tokens."""
    body = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "max_tokens": NUM_OUTPUT}
    more = {"temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body | more) as response:
        response.raise_for_status()
        parts = [part async for part in response.aiter_raw()]
    assert b"[DONE]" in parts[-1]


async def take_turns(
    urls: dict[str, str], processes: dict[str, psutil.Process], num_answers: int, num_turns: int, start: int
) -> list[Turn]:
    """Ask both servers in turns, for the same number of new prompts. The first turns are not measured."""
    rng, measured = random.Random(num_turns), list[Turn]()
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for number in range(-WARM_UP, num_turns):
            for server in list(urls)[:: 1 if number % 2 else -1]:
                prompts = [
                    " ".join(str(rng.randrange(10, 100)) for _ in range(NUM_NUMBERS)) for _ in range(num_answers)
                ]
                cpu_s, began_s = cpu_by_process(processes[server]), time.monotonic()
                await asyncio.gather(*(ask(client, urls[server], prompt) for prompt in prompts))
                took_s = time.monotonic() - began_s
                await asyncio.sleep(0.1)
                used = [now - before for now, before in zip(cpu_by_process(processes[server]), cpu_s, strict=True)]
                measured.append(Turn(start, number, server, took_s, *used))
    return [turn for turn in measured if turn.turn >= 0]


def measure(model: Path, pair: Sequence[str], num_answers: int, num_rounds: int, num_turns: int) -> list[Turn]:
    """Start both servers in both orders, `num_rounds` times, and have them take turns."""
    turns = []
    for start in track(range(2 * num_rounds), "starts", console=console):
        with ExitStack() as stack, TemporaryDirectory() as logs:
            urls, processes = {}, {}
            for name in (UNASKED, *(pair[::-1] if start % 2 else pair)):
                before = set(psutil.Process().children())
                command = partial(server_command, name.removeprefix("second "), model)
                urls[name] = stack.enter_context(start_server(command, Path(logs, name)))
                (processes[name],) = set(psutil.Process().children()) - before
            del urls[UNASKED]
            turns += asyncio.run(take_turns(urls, processes, num_answers, num_turns, start))
    return turns


def show(turns: Sequence[Turn], pair: Sequence[str]) -> None:
    """Print means of both servers, and the ratios of the first to the second with their standard errors."""
    table = Table("ms", *pair, "ratio", "standard error", box=None, pad_edge=False)
    for label, field in FIELDS.items():
        of_rounds = []
        for number in sorted({turn.start // 2 for turn in turns}):
            ours, theirs = ([getattr(t, field) for t in turns if (t.start // 2, t.server) == (number, n)] for n in pair)
            of_rounds.append((mean(ours), mean(theirs)))
        logs = [math.log(a / b) for a, b in of_rounds]
        error = f"± {stdev(logs) / math.sqrt(len(logs)):.3f}" if len(logs) > 1 else "–"
        means = (f"{mean(column) * 1e3:.1f}" for column in zip(*of_rounds, strict=True))
        table.add_row(label, *means, f"{math.exp(mean(logs)):.3f}", error)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1, help="prompts at once")
    parser.add_argument("--rounds", type=int, default=4, help="starts of both servers in both orders")
    parser.add_argument("--turns", type=int, default=6, help="turns of each server after each start")
    parser.add_argument("--same", action="store_true", help="compare vLLM's server with another one of vLLM's")
    parser.add_argument("--model", type=Path, help="a folder; by default the demo's model is made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped too
    pair = ("second vllm", "vllm") if arguments.same else SERVERS
    with TemporaryDirectory() as folder:
        model = (arguments.model or make_demo_model(Path(folder, "model"))).absolute()
        turns = measure(model, pair, arguments.answers, arguments.rounds, arguments.turns)
    show(turns, pair)
    if arguments.json:
        write_results(arguments.json, turns, num_answers=arguments.answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
