"""A LangChain vector store in a LangChain chain, with streamrag between: the answer streams, and has citations.

    pip install 'streamrag[langchain]'
    python examples/langchain_chain.py

The backend is the one for tests. With `OpenAIBackend` or `VllmBackend` in its place, a model answers.
"""

import asyncio

from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.vectorstores import InMemoryVectorStore

from streamrag import Pipeline
from streamrag.adapters.langchain import StreamragChatModel, from_langchain
from streamrag.testing import ScriptedBackend

QUESTION = "Why does the printer jam?"
TEXTS = {"T-101": "The printer jams on thick paper.", "T-102": "Travel needs approval."}


class WordCounts(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[text.lower().count(word) + 0.01 for word in ("printer", "travel")] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


async def main() -> None:
    store = InMemoryVectorStore(WordCounts())
    await store.aadd_texts(list(TEXTS.values()), [{"source": number} for number in TEXTS])
    pipeline = Pipeline(from_langchain(store), ScriptedBackend(answer="It jams on thick paper [1]."))
    async with StreamragChatModel(pipeline=pipeline) as model:
        async for text in (model | StrOutputParser()).astream(QUESTION):
            print(text, end="", flush=True)
        message = await model.ainvoke(QUESTION)
    for citation in message.response_metadata["citations"]:
        print(f"\n[{citation['number']}] {citation['uri']}: {citation['text']}", end="")


if __name__ == "__main__":
    asyncio.run(main())
