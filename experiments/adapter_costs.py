"""What each adapter adds to a chunk and to a token: microseconds, with nothing retrieved and no engine.

A source is compared with a call of the framework's own part inside it, a retriever with the source inside it, and what
answers with the pipeline inside it. The two take turns; a figure is the median of the differences.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import haystack
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from mcp import Client
from mcp.server import MCPServer

from streamrag import Append, Chunk, Pipeline, SamplingParams, Source
from streamrag.adapters.haystack import HaystackSource, StreamragGenerator
from streamrag.adapters.langchain import StreamragChatModel, StreamragRetriever, from_langchain
from streamrag.adapters.llamaindex import LlamaIndexSource, StreamragNodeRetriever, StreamragQueryEngine
from streamrag.adapters.mcp import McpToolSource
from streamrag.testing import ScriptedBackend, ScriptedSource

NUM_CHUNKS, NUM_TOKENS, NUM_TURNS = 500, 1_000, 9
TEXTS = [f"Passage {number} of a document says what one paragraph can say. " * 8 for number in range(NUM_CHUNKS)]
PARAMS = SamplingParams(max_tokens=NUM_TOKENS)
QUERY = "query"

Work: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Cost:
    framework: str
    what: str
    median_us: float
    least_us: float
    most_us: float


async def measure_costs() -> list[Cost]:
    costs = []
    async with AsyncExitStack() as stack:
        for number, things in ((NUM_CHUNKS, chunks), (NUM_TOKENS, tokens)):
            for framework, what, work, inside in await stack.enter_async_context(things()):
                us = [(await seconds(work) - await seconds(inside)) / number * 1e6 for _ in range(NUM_TURNS + 1)][1:]
                costs.append(Cost(framework, what, median(us), min(us), max(us)))
    return sorted(costs, key=lambda cost: cost.framework, reverse=True)


async def seconds(work: Work) -> float:
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


# ---------------------------------------------------------------------------------------------------- what each finds


class Loader(BaseLoader):
    async def alazy_load(self) -> AsyncGenerator[Document, None]:
        for text in TEXTS:
            yield Document(text, metadata={"source": "a document"})


class Nodes(BaseRetriever):
    nodes = [NodeWithScore(node=TextNode(text=text, metadata={"uri": "a document"}), score=1.0) for text in TEXTS]  # noqa: RUF012

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes


@haystack.component
class Documents:
    documents = [haystack.Document(content=text, meta={"uri": "a document"}) for text in TEXTS]  # noqa: RUF012

    @haystack.component.output_types(documents=list[haystack.Document])
    def run(self, query: str) -> dict[str, list[haystack.Document]]:
        return {"documents": self.documents}

    @haystack.component.output_types(documents=list[haystack.Document])
    async def run_async(self, query: str) -> dict[str, list[haystack.Document]]:
        return {"documents": self.documents}


def mcp_server() -> MCPServer:
    server = MCPServer("documents", log_level="ERROR")

    @server.tool()
    def search(query: str) -> list[dict[str, Any]]:
        return [{"text": text, "uri": "a document"} for text in TEXTS]

    return server


Things: TypeAlias = list[tuple[str, str, Work, Work]]


@asynccontextmanager
async def chunks() -> AsyncIterator[Things]:
    """What reads or makes chunks, and what is inside it."""
    loader, nodes, documents = Loader(), Nodes(), Documents()
    scripted = ScriptedSource([Append(Chunk(text, "a document", passage=i)) for i, text in enumerate(TEXTS)])
    tool = McpToolSource(mcp_server(), "search")
    retriever, node_retriever = StreamragRetriever(source=scripted), StreamragNodeRetriever(scripted)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(mcp_server()))
        await tool.start(lambda line: None)
        stack.push_async_callback(tool.aclose)
        await stack.enter_async_context(retriever)
        stack.callback(node_retriever.close)
        yield [
            (
                "LangChain",
                "a document of a loader, as a source",
                of(from_langchain(loader)),
                loader.aload,
            ),
            ("LangChain", "a chunk, as a retriever", lambda: retriever.ainvoke(QUERY), of(scripted)),
            ("LlamaIndex", "a node, as a source", of(LlamaIndexSource(nodes)), lambda: nodes.aretrieve(QUERY)),
            ("LlamaIndex", "a chunk, as a retriever", lambda: node_retriever.aretrieve(QUERY), of(scripted)),
            ("Haystack", "a document, as a source", of(HaystackSource(documents)), lambda: documents.run_async(QUERY)),
            ("MCP", "a passage of a tool, as a source", of(tool), lambda: client.call_tool("search", {"query": QUERY})),
        ]


def of(source: Source) -> Work:
    async def read() -> None:
        async for _ in source.stream(QUERY):
            pass

    return read


# --------------------------------------------------------------------------------------------------------- what answers


@asynccontextmanager
async def tokens() -> AsyncIterator[Things]:
    """What answers, and the pipeline inside it."""
    source = ScriptedSource([Append(Chunk("The printer jams.", "a document"))])
    async with Pipeline(source, ScriptedBackend("x" * NUM_TOKENS), overlap=True) as pipeline:
        model = StreamragChatModel(pipeline=pipeline)
        engine = StreamragQueryEngine(pipeline, streaming=True, params=PARAMS)
        generator = StreamragGenerator(pipeline, params=PARAMS)

        async def bare() -> None:
            async with pipeline.stream(QUERY, params=PARAMS) as stream:
                async for _ in stream:
                    pass

        async def chat() -> None:
            async for _ in model.astream(QUERY, params=PARAMS):
                pass

        def chat_elsewhere() -> None:
            for _ in model.stream(QUERY, params=PARAMS):
                pass

        async def respond() -> None:
            response: Any = await engine.aquery(QUERY)
            async for _ in response.async_response_gen():
                pass

        def respond_elsewhere() -> None:
            response: Any = engine.query(QUERY)
            for _ in response.response_gen:
                pass

        def generate_elsewhere() -> None:
            generator.run(QUERY, streaming_callback=lambda chunk: None)

        yield [
            ("LangChain", "a token", chat, bare),
            ("LangChain", "a token, from another thread", lambda: asyncio.to_thread(chat_elsewhere), bare),
            ("LlamaIndex", "a token", respond, bare),
            ("LlamaIndex", "a token, from another thread", lambda: asyncio.to_thread(respond_elsewhere), bare),
            ("Haystack", "a token", lambda: generator.run_async(QUERY, streaming_callback=ignore), bare),
            ("Haystack", "a token, from another thread", lambda: asyncio.to_thread(generate_elsewhere), bare),
        ]


async def ignore(chunk: object) -> None:
    """A callback."""


if __name__ == "__main__":
    for cost in asyncio.run(measure_costs()):
        print(f"{cost.framework:12} {cost.what:40} {cost.median_us:8.1f} ({cost.least_us:.1f} .. {cost.most_us:.1f})")
