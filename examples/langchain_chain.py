"""A LangChain retriever in a LangChain chain, with streamrag between: the answer streams, and has citations.

    pip install '.[langchain]'
    python examples/langchain_chain.py

Put your retriever in place of `RunnableLambda(find)`, and for a model's answers an `OpenAIBackend` for the other.
"""

import asyncio

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from streamrag.adapters.langchain import StreamragChatModel
from streamrag.testing import ScriptedBackend

TICKETS = [
    Document("The printer jams on thick paper.", metadata={"source": "T-101"}),
    Document("Travel needs approval.", metadata={"source": "T-102"}),
]


def find(query: str) -> list[Document]:
    return [ticket for ticket in TICKETS if any(word in ticket.page_content for word in query.split())]


async def main() -> None:
    backend = ScriptedBackend("It jams on thick paper [1].")
    async with StreamragChatModel.from_retriever(RunnableLambda(find), backend) as model:
        async for text in (model | StrOutputParser()).astream("Why does the printer jam?"):
            print(text, end="", flush=True)
        message = await model.ainvoke("Why does the printer jam?")
    for citation in message.response_metadata["citations"]:
        print(f"\n[{citation['number']}] {citation['uri']}: {citation['text']}", end="")


if __name__ == "__main__":
    asyncio.run(main())
