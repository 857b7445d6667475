"""A LangGraph agent on an embedded engine: its model reads retrieved tickets, calls a tool, and answers.

    pip install '.[langchain,vllm]' langgraph
    python examples/langgraph_tools.py ./Qwen2.5-7B-Instruct

A grammar forces the first step to call the tool, so that every model does. Without `tool_choice`, the model decides.
"""

import asyncio
import sys
from typing import Any, Literal

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from streamrag import Append, Chunk, Pipeline, VllmBackend
from streamrag.adapters.langchain import StreamragChatModel
from streamrag.testing import ScriptedSource


def ticket_state(number: Literal["T-101"]) -> str:
    """Return the state of a ticket."""
    return f"{number} is open."


async def main(path: str) -> None:
    source = ScriptedSource([Append(Chunk("The printer jams on thick paper.", "T-101"))])
    pipeline = Pipeline(source, VllmBackend(path, max_model_len=2048))
    async with StreamragChatModel(pipeline=pipeline, tool_parser="hermes", max_tokens=200) as model:
        first = model.bind_tools([ticket_state], tool_choice="ticket_state", strict=True)
        later = model.bind_tools([ticket_state])

        async def step(state: MessagesState) -> dict[str, Any]:
            messages = state["messages"]
            return {"messages": [await (first if messages[-1].type == "human" else later).ainvoke(messages)]}

        graph = StateGraph(MessagesState).add_node("model", step).add_node("tools", ToolNode([ticket_state]))
        graph.add_edge(START, "model").add_edge("tools", "model").add_conditional_edges("model", tools_condition)
        question: Any = {"messages": [("human", "Is the ticket of the printer still open?")]}
        for message in (await graph.compile().ainvoke(question))["messages"]:
            print(f"{message.type}: {getattr(message, 'tool_calls', None) or message.text!r}")


if __name__ == "__main__":  # vLLM's processes import this file
    asyncio.run(main(sys.argv[1]))
