"""The retriever that you have: any function from a query to passages, here BM25 over a few lines, on a real vLLM.

    python examples/wrap_a_function.py [MODEL]

Without a model it makes a tiny one with random weights, which writes noise.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from rank_bm25 import BM25Okapi

from streamrag import Pipeline, RetrieverSource, SamplingParams, VllmBackend
from streamrag.testing import make_tiny_llama

LINES = [
    "A task group is left when all of its tasks have ended.",
    "Cancelling a scope cancels every task that runs in it.",
    "A semaphore limits how many tasks hold it at once.",
    "An event wakes every task that waits for it.",
]
RANKING = BM25Okapi([line.lower().split() for line in LINES])


def retrieve(query: str) -> list[str]:
    """The two best lines."""
    return list(RANKING.get_top_n(query.lower().split(), LINES, n=2))


async def main(model: Path) -> None:
    async with Pipeline(RetrieverSource(retrieve), VllmBackend(model), on_progress=print) as pipeline:
        stream = pipeline.stream("What cancels every task that runs?", params=SamplingParams(max_tokens=16))
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()
    for citation in stream.result.citations:
        print(f"[{citation.number}] {citation.text}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny_llama(Path(folder, "model"))))
