"""A retriever of your own: support tickets as a source, on the test backend, so that it runs anywhere at once.

python examples/own_source.py
"""

import asyncio
from collections.abc import AsyncIterator

from streamrag import Append, Chunk, Pipeline, SourceEvent
from streamrag.telemetry import ContextChanged
from streamrag.testing import ScriptedBackend

TICKETS = {"T-101": "The printer jams on thick paper.", "T-102": "Travel needs approval.", "T-103": "A new printer."}


class TicketSource:
    """Yields each ticket that shares a word with the query, as a slow database would: one at a time."""

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        for number, text in TICKETS.items():
            await asyncio.sleep(0.05)
            if {*query.strip("?").split()} & {*text.strip(".").split()}:
                yield Append(Chunk(text, uri=number))


async def main() -> None:
    async with Pipeline(TicketSource(), ScriptedBackend("It jams on thick paper [1].")) as pipeline:
        events = pipeline.events("Why does my printer jam?")
        async for event in events:
            if isinstance(event, ContextChanged):
                print(f"{event.at_s:.2f} s: {event.num_tokens} tokens, {event.num_shared} of them known already")
    print(events.result.text)
    for citation in events.result.citations:
        print(f"[{citation.number}] {citation.uri}: {citation.text}")


if __name__ == "__main__":
    asyncio.run(main())
