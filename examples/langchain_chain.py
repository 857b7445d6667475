"""A LangChain vector store in a LangChain chain, with streamrag between: the answer streams, and has citations.

    pip install '.[langchain]'
    python examples/langchain_chain.py

Embeddings and backend are those for tests. With `OpenAIBackend` or `VllmBackend` in its place, a model answers.
"""

import asyncio

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.vectorstores import InMemoryVectorStore

from streamrag import Pipeline
from streamrag.adapters.langchain import StreamragChatModel, from_langchain
from streamrag.testing import ScriptedBackend

TICKETS = [
    Document("The printer jams on thick paper.", metadata={"source": "T-101"}),
    Document("Travel needs approval.", metadata={"source": "T-102"}),
]


async def main() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    await store.aadd_documents(TICKETS)
    pipeline = Pipeline(from_langchain(store), ScriptedBackend("It jams on thick paper [1]."))
    async with StreamragChatModel(pipeline=pipeline) as model:
        async for text in (model | StrOutputParser()).astream("Why does the printer jam?"):
            print(text, end="", flush=True)
        message = await model.ainvoke("Why does the printer jam?")
    for citation in message.response_metadata["citations"]:
        print(f"\n[{citation['number']}] {citation['uri']}: {citation['text']}", end="")


if __name__ == "__main__":
    asyncio.run(main())
