"""A retriever of your own: support tickets as a source, on the test backend, so that it runs anywhere at once.

python examples/own_source.py
"""

import asyncio
from collections.abc import AsyncIterator

from streamrag import Append, Chunk, Pipeline, SourceEvent
from streamrag.telemetry import ContextChanged
from streamrag.testing import ScriptedBackend

TICKETS = {
    "T-101": "The printer on floor 2 jams when the paper is thick.",
    "T-102": "Travel requests need the approval of the team lead.",
    "T-103": "The printer driver was updated on Monday.",
}


class TicketSource:
    """Yields each ticket that shares a word with the query, as a slow database would: one at a time."""

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        words = {word for word in query.lower().strip("?").split() if len(word) > 5}
        for number, text in TICKETS.items():
            await asyncio.sleep(0.05)
            if words & set(text.lower().split()):
                yield Append(Chunk(text, source=number))


async def main() -> None:
    backend = ScriptedBackend(answer="It jams on thick paper [1], and its driver is new [2].")
    async with Pipeline(TicketSource(), backend) as pipeline:
        async with pipeline.events("What is wrong with the printer?") as events:
            async for event in events:
                if isinstance(event, ContextChanged):
                    print(f"{event.at_s:.2f} s: {event.num_tokens} tokens, {event.num_shared} of them known already")
    print(events.result.text)
    for citation in events.result.sources:
        print(f"[{citation.number}] {citation.source}: {citation.text}")


if __name__ == "__main__":
    asyncio.run(main())
