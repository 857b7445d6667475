"""A source of streamrag as a LangChain retriever, which tells what it finds as it comes.

pip install '.[langchain]'
python examples/langchain_retriever.py
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from streamrag import from_passages
from streamrag.adapters.langchain import StreamragRetriever

TICKETS = {
    "T-101": "The printer on floor 2 jams when the paper is thick.",
    "T-102": "Travel requests need the approval of the team lead.",
    "T-103": "The printer driver was updated on Monday.",
}


async def tickets(query: str) -> AsyncIterator[dict[str, str]]:
    for number, text in TICKETS.items():
        await asyncio.sleep(0.05)  # as a slow database would
        if "printer" in query and "printer" in text:
            yield {"text": text, "uri": number}


async def main() -> None:
    async with StreamragRetriever(source=from_passages(tickets)) as retriever:
        async for event in retriever.astream_events("What is wrong with the printer?", version="v2"):
            data: Any = event["data"]
            if event["event"] == "on_custom_event":
                print("found", data["document"].metadata["source"])
        for document in await retriever.ainvoke("Who repairs the printer?", k=1):
            print(document.metadata["source"], document.page_content)


if __name__ == "__main__":
    asyncio.run(main())
