"""A LangGraph agent whose retrieval tool tells what it finds while it looks.

    pip install 'streamrag[langchain]' langgraph
    python examples/langgraph_agent.py

What the model says is written down here, so that this runs anywhere: put a chat model with tools in its place.
"""

import asyncio
from typing import Any

from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from streamrag import Append, Chunk
from streamrag.adapters.langchain import StreamragRetriever
from streamrag.testing import ScriptedSource

TICKETS = [Chunk("The printer jams on thick paper.", "T-101"), Chunk("Its driver is new.", "T-103")]
RETRIEVER = StreamragRetriever(source=ScriptedSource(map(Append, TICKETS)))
CALL = ToolCall(name="search", args={"query": "printer"}, id="1")
MODEL = FakeMessagesListChatModel(responses=[AIMessage("", tool_calls=[CALL]), AIMessage("It jams on thick paper.")])


@tool
async def search(query: str) -> str:
    """Search the tickets."""
    async for event in RETRIEVER.astream_events(query, version="v2"):
        data: Any = event["data"]
        if event["event"] == "on_custom_event":
            get_stream_writer()(f"found {data['document'].metadata['source']}")
    return "\n".join(document.page_content for document in data["output"])


async def answer(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await MODEL.ainvoke(state["messages"])]}


async def main() -> None:
    graph = StateGraph(MessagesState).add_node("answer", answer).add_node("tools", ToolNode([search]))
    graph.add_edge(START, "answer").add_conditional_edges("answer", tools_condition).add_edge("tools", "answer")
    question = MessagesState(messages=[HumanMessage("Why does the printer jam?")])
    async for _, part in graph.compile().astream(question, stream_mode=["custom", "messages"]):
        print(part if isinstance(part, str) else f"{part[0].type}: {part[0].text!r}")


if __name__ == "__main__":
    asyncio.run(main())
