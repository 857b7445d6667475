"""What a session's questions take while its context grows, and beside plain requests and sessions of vLLM's own.

    python -m studies.sessions.real [--cycles N] [--json FILE] [--model FOLDER]

After the evaluation of arXiv 2605.13784, on a real engine (`sessions_simulated.py` has the same on GPUs):

growing    100 samples of prices, then cycles of 55 more and one of six questions. The same questions of the same text,
           token for token, asked of a session; as a plain request, on an engine with vLLM's prefix caching; and as one
           that finds nothing cached. The data come before the question does; how long taking them in took is told
           below.
stock      the same on vLLM's own scheduler: a plain request, and vLLM's own streaming sessions (see session_arms.py)

Random weights unless a model is given: the answers mean nothing, the work is real.
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from streamrag import Pipeline, SamplingParams, VllmBackend, from_passages
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import ModelInfo
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.measured_engine import running_engine
from studies.sessions.growing import Row, growing, growing_stock

NUM_OUTPUT_TOKENS = 8
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
BLOCK_SIZE, KV_BYTES = 32, 2 << 30
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 32_768,
}


async def measure(model: Path, num_cycles: int) -> dict[str, Row]:
    settings: dict[str, Any] = {"max_model_len": MODEL["max_model_len"], "dtype": "float32"}
    backend = VllmBackend(model, kv_cache_bytes=KV_BYTES, engine_args={**settings, "block_size": BLOCK_SIZE})
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=6 * num_cycles)

        def done() -> None:
            progress.advance(task)

        async with Pipeline(from_passages(lambda query: []), backend) as pipeline:
            ours = await growing(pipeline, backend, num_cycles, PARAMS, done)
        info = ModelInfo(str(model), HuggingFaceTokenizer(model), MODEL["max_model_len"])
        args = {**settings, "block_size": BLOCK_SIZE, "kv_cache_memory_bytes": KV_BYTES}
        async with running_engine(str(model), args, policy=None) as client:
            stock = await growing_stock(client, info, num_cycles, NUM_OUTPUT_TOKENS, done)
    return {"growing": ours, "stock": stock}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of one with random weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_tiny_llama(Path(folder) / "model", **MODEL)
        results: dict[str, Any] = {**asyncio.run(measure(model, arguments.cycles)), "load_average": os.getloadavg()[1]}
    if arguments.json:
        write_atomic(arguments.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
