"""Two generators of your own, asked at once: tickets as they are found, and a ranking that gets better.

python examples/merged_sources.py
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

from streamrag import MergedSource, Pipeline, from_passages, from_rankings
from streamrag.telemetry import Answered, ChunkArrived
from streamrag.testing import ScriptedBackend


def tickets(query: str) -> Iterator[dict[str, str]]:
    """Not async: it runs in a thread."""
    yield {"text": "The printer on floor 2 jams.", "uri": "T-101", "title": "Printer"}
    yield {"text": "The driver was updated on Monday.", "uri": "T-103", "title": "Driver"}


async def handbook(query: str) -> AsyncIterator[list[tuple[str, str]]]:
    await asyncio.sleep(0.1)
    yield [("Thick paper goes into tray 3.", "handbook#12"), ("Printers are cleaned in May.", "handbook#40")]
    await asyncio.sleep(0.1)
    yield [("Jams are reported to the help desk.", "handbook#7"), ("The printer on floor 2 jams.", "T-101")]


async def main() -> None:
    source = MergedSource(from_passages(tickets), from_rankings(handbook), weights=[1, 2])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        async for event in pipeline.events("Why does the printer jam?"):
            if isinstance(event, ChunkArrived):
                print(f"{event.at_s:.1f} s  {event.chunk.uri}: {event.chunk.text}")
            if isinstance(event, Answered):
                print(*(f"[{each.number}] {each.uri}" for each in event.answer.citations))


if __name__ == "__main__":
    asyncio.run(main())
