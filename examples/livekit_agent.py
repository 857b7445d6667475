"""A LiveKit agent whose LLM is a pipeline. The caller's words are scripted; with stt, tts and a room they are spoken.

python examples/livekit_agent.py
"""

import asyncio

from livekit.agents import Agent, AgentSession, UserInputTranscribedEvent

from streamrag import Chunk, Pipeline, RetrieverSource
from streamrag.adapters.livekit import StreamragLLM
from streamrag.testing import ScriptedBackend

LINES = ["A task group is left when all of its tasks have ended.", "Cancelling a scope cancels every task in it."]


async def retrieve(query: str) -> list[Chunk]:
    """The lines that share a word with the question, after a second."""
    print(f"retrieving for {query!r}")
    await asyncio.sleep(1)
    return [Chunk(line, f"line {number}") for number, line in enumerate(LINES) if {*query.split()} & {*line.split()}]


async def main() -> None:
    async with Pipeline(RetrieverSource(retrieve), ScriptedBackend("Cancel its scope.")) as pipeline:
        model = StreamragLLM(pipeline)
        session = AgentSession(llm=model)
        model.follow(session)
        await session.start(agent=Agent(instructions="Answer callers in one short sentence."), record=False)
        for words in ("how do", "how do I cancel", "how do I cancel every task"):  # in the place of a recognizer
            session.emit("user_input_transcribed", UserInputTranscribedEvent(transcript=words, is_final=False))
            await asyncio.sleep(0.5)
        print("the turn ends")
        result = await session.run(user_input=words)
        print(result.expect.next_event().is_message(role="assistant").event().item.text_content)
        await session.aclose()


asyncio.run(main())
