"""A LangGraph agent whose retrieval tool tells what it finds while it looks. Its model says what is written down here.

pip install '.[langchain]' langgraph
python examples/langgraph_agent.py
"""

import asyncio

from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.tools import create_retriever_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from streamrag import Append, Chunk
from streamrag.adapters.langchain import StreamragRetriever
from streamrag.testing import ScriptedSource

TICKETS = [Chunk("The printer jams on thick paper.", "T-101"), Chunk("Its driver is new.", "T-103")]
RETRIEVER = StreamragRetriever(source=ScriptedSource(map(Append, TICKETS)))
CALL = ToolCall(name="search", args={"query": "printer"}, id="1")
MODEL = FakeMessagesListChatModel(responses=[AIMessage("", tool_calls=[CALL]), AIMessage("It jams on thick paper.")])


async def main() -> None:
    graph = StateGraph(MessagesState).add_edge(START, "model").add_edge("tools", "model")
    graph.add_node("tools", ToolNode([create_retriever_tool(RETRIEVER, "search", "Search the tickets.")]))
    graph.add_node("model", lambda state: {"messages": MODEL.invoke(state["messages"])})
    agent = graph.add_conditional_edges("model", tools_condition).compile()
    question = MessagesState(messages=[HumanMessage("Why does the printer jam?")])
    async for event in agent.astream_events(question, version="v2"):
        match event:
            case {"event": "on_custom_event", "data": {"document": document}}:
                print("found", document.metadata["source"])
            case {"event": "on_chat_model_end" | "on_tool_end", "data": {"output": message}}:
                print(f"{message.type}: {message.text!r}")


asyncio.run(main())
