"""Two agents in a LangGraph: the second one's prompt is computed while the first still writes what stands in it.

pip install . langgraph
python examples/agent_hand_over.py
"""

import asyncio
from typing import TypedDict

from langgraph.graph import START, StateGraph

from streamrag import AnswerStream, Pipeline, RetrieverSource, from_tokens
from streamrag.testing import ScriptedBackend

BACKEND = ScriptedBackend("The printer jams on thick paper. Its driver is new.")  # or one VllmBackend for both
RESEARCHER = Pipeline(RetrieverSource(lambda query: ["T-101: it jams.", "T-103: a new driver."]), BACKEND)


class State(TypedDict, total=False):
    question: str
    notes: AnswerStream  # still being written
    report: str


async def write(state: State) -> State:
    source = from_tokens(state["notes"], name="notes", min_chars=16)
    async with Pipeline(source, BACKEND, owns_backend=False) as writer:
        return {"report": "".join([chunk.text async for chunk in writer.stream(state["question"])])}


async def main() -> None:
    graph = StateGraph(State).add_node("write", write).add_edge("research", "write").add_edge(START, "research")
    graph.add_node("research", lambda state: {"notes": RESEARCHER.stream(f"What is known? {state['question']}")})
    async with RESEARCHER:
        print((await graph.compile().ainvoke({"question": "Why does it jam?"}))["report"])
    print("its prompts:", *(f"{p.num_shared} of {len(p.token_ids)} tokens known" for p in BACKEND.prompts[0]), sep="\n")


asyncio.run(main())
