"""Two agents in a LangGraph: the second one's prompt is computed while the first still writes what stands in it.

pip install . langgraph
python examples/agent_hand_over.py
"""

import asyncio
from typing import Any

from langgraph.graph import START, StateGraph

from streamrag import Pipeline, RetrieverSource, from_tokens
from streamrag.telemetry import ContextChanged
from streamrag.testing import ScriptedBackend

BACKEND = ScriptedBackend("The printer jams on thick paper. Its driver is new.")  # or one VllmBackend for both
RESEARCHER = Pipeline(RetrieverSource(lambda query: ["T-101: it jams.", "T-103: a new driver."]), BACKEND)


def research(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"notes": RESEARCHER.stream(f"What is known? {state['question']}")}  # an iterator: nobody waits


async def write(state: dict[str, Any]) -> dict[str, Any]:
    source = from_tokens(state["notes"], name="notes", min_chars=16)
    async with Pipeline(source, BACKEND, owns_backend=False) as writer, writer.events(state["question"]) as events:
        async for event in events:
            if isinstance(event, ContextChanged):
                print(f"{event.num_tokens} tokens of prompt, {event.num_shared} of them known already")
    return state | {"report": events.result.text}


async def main() -> None:
    graph: Any = StateGraph(dict).add_sequence([research, write]).add_edge(START, "research").compile()
    async with RESEARCHER:
        print((await graph.ainvoke({"question": "Why does it jam?"}))["report"])


asyncio.run(main())
