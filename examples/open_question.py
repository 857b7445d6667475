"""A question that is typed slowly: retrieval begins before it is committed, and the answer follows at once.

python examples/open_question.py
"""

import asyncio
import time

from streamrag import Chunk, Pipeline, RetrieverSource
from streamrag.testing import ScriptedBackend

LINES = ["A task group is left when all of its tasks have ended.", "Cancelling a scope cancels every task in it."]
TYPED = ["how do", "how do I", "how do I cancel", "how do I cancel a", "how do I cancel a task?"]


async def retrieve(query: str) -> list[Chunk]:
    """The lines that share a word with the question, after a second."""
    print(f"retrieving for {query!r}")
    await asyncio.sleep(1)
    return [Chunk(line, f"line {number}") for number, line in enumerate(LINES) if {*query.split()} & {*line.split()}]


async def main() -> None:
    backend = ScriptedBackend("Cancel its scope [1].")
    async with Pipeline(RetrieverSource(retrieve), backend) as pipeline, pipeline.listen() as question:
        for text in TYPED:
            await question.partial(text)
            await asyncio.sleep(0.4)
        await asyncio.sleep(1.5)  # the user reads the question once more
        committed_s = time.monotonic()
        async for chunk in question.commit(TYPED[-1]):
            print(chunk.text, end="")
        print(f"\nanswered within {time.monotonic() - committed_s:.1f} s of the commit")


if __name__ == "__main__":
    asyncio.run(main())
