"""Runs the public benchmark on all of its engines, and writes their results beside this file.

    python -m studies.public_benchmark.run [--only NAME,...]

measured   streamrag, vLLM, vLLM's sessions and vLLM's server with the demo's model, one after the other, in float32
simulated  the first three on two H200s, with the load of the specification

A result that is there is kept: remove it to measure again. 25 minutes on two cores, which nothing else should use.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from streamrag.testing import make_demo_model
from studies.servers import start_server

from .tables import RESULTS
from .tables import main as write_tables

MODEL_NAME = "SmolLM2-135M"
ENGINES = ("server", "vllm", "vllm-sessions", "streamrag")
SIMULATED = ENGINES[1:]
LIMITS = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "256"]
SMALL = ["--lengths", "azure", "--max-context-tokens", "2500", "--output-tokens", "16"]
SMALL += ["--qps", "0.16", "--queries", "24", "--warm-up", "2"]
"""A load that two cores can bear, and short enough for four engines."""
LARGE = ["--qps", "8", "--seeds", "1,2,3"]


def server_command(model: Path, port: int) -> Sequence[str]:
    """Return the command of vLLM's own server, with the options of the engines in this program."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enable-prefix-caching"),
        *(*LIMITS, "--block-size", "32", "--enforce-eager", "--kv-cache-memory-bytes", str(4 << 30)),
    ]


def run(name: str, options: Sequence[str], folder: str) -> None:
    """Run the benchmark on one engine, in the folder that has the model, so that the result has its name alone."""
    command = [sys.executable, "-m", "streamrag", "bench", "public", *options]
    subprocess.run([*command, "--output", str(RESULTS), "--name", name], check=True, cwd=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ENGINES, *(f"{engine}-simulated" for engine in SIMULATED)]
    parser.add_argument("--only", default=",".join(names), metavar="NAME,...", help="default: all")
    chosen = parser.parse_args().only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    RESULTS.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        model = make_demo_model(Path(folder, MODEL_NAME))
        for name in chosen:
            if (RESULTS / f"{name}.json").exists():
                continue
            with ExitStack() as stack:
                if name.endswith("-simulated"):
                    engine = ["--engine", name.removesuffix("-simulated"), "--simulate", "h200-llama8b-tp2", *LARGE]
                elif name == "server":
                    log = Path(folder, "server.log")
                    url = stack.enter_context(start_server(lambda port: server_command(model, port), log))
                    engine = ["--url", url, "--model", MODEL_NAME, "--hardware", "2 cores", *SMALL]
                else:
                    engine = ["--engine", name, "--model", MODEL_NAME, "--hardware", "2 cores", *SMALL]
                run(name, engine, folder)
    write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
