"""Records what a retriever does, looks at the trace, and replays it three times as slowly.

    python examples/record_and_replay.py [trace.jsonl.gz]

Without a file, the trace is not kept. Nothing is needed but streamrag: the backend is the one for tests, and the
retriever a list of notes.
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from streamrag import Append, Chunk, Pipeline, ReplaySource, SourceEvent, TraceRecorder
from streamrag.testing import ScriptedBackend
from streamrag.trace import read_trace

QUESTION = "Why does the printer jam?"
NOTES = ("The printer on floor two jams when the paper is thick.", "It was serviced on Monday.")


class SlowNotes:
    """A retriever that takes its time."""

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        for number, text in enumerate(NOTES):
            await asyncio.sleep(0.1)
            yield Append(Chunk(text, uri=f"note-{number}"))


async def main(path: Path) -> None:
    async with Pipeline(SlowNotes(), ScriptedBackend(), recorder=TraceRecorder(path)) as pipeline:
        async with pipeline.stream(QUESTION) as stream:
            async for _ in stream:
                pass

    queries = read_trace(path).queries
    print(f"recorded: {len(queries)} query, {len(queries[-1].events)} chunks")

    async with Pipeline(ReplaySource(path, delay=3), ScriptedBackend()) as pipeline:
        async with pipeline.stream(QUESTION) as stream:
            async for _ in stream:
                pass
    answer = stream.result
    print(f"replayed: {[citation.uri for citation in answer.citations]}")
    slower = answer.timings.retrieval_s / queries[-1].end_s
    print(f"retrieval took {slower:.1f} times as long")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Records what a retriever does, and replays it three times as slowly.")
    parser.add_argument("trace", nargs="?", type=Path, help="file to record to, .jsonl, .jsonl.gz or .jsonl.zst")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(parser.parse_args().trace or Path(folder) / "trace.jsonl.gz"))
