"""An answer in whose middle it turns out what else must be retrieved: python examples/refresh_an_answer.py"""

import asyncio
from collections.abc import AsyncIterator

from streamrag import AnswerChunk, Chunk, ModelInfo, Pipeline, Prompt, RetrieverSource, SamplingParams
from streamrag.refresh import Refresh
from streamrag.telemetry import ContextRefreshed, TokensGenerated
from streamrag.testing import CodePointTokenizer

PAGES = {"bridge": "Tessa Quill designed the Marlow bridge.", "Quill": "Tessa Quill was born in Dunmere."}
ANSWER = "Tessa Quill designed it [1], and she was born in Dunmere [2]."


class Writer:  # a model that goes on where its prompt ends, letter by letter; use VllmBackend("/models/my-model")
    model = ModelInfo("writer", CodePointTokenizer(), max_model_len=8192)

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[AnswerChunk]:
        prompt = [prompt async for prompt in prompts][-1]
        so_far = self.model.tokenizer.decode(prompt.token_ids).rpartition("Assistant:")[2]
        for end, letter in enumerate(ANSWER[len(so_far) :], len(so_far) + 1):
            await asyncio.sleep(0.01)
            yield AnswerChunk(letter, (ord(letter),), "stop" if end == len(ANSWER) else None)


async def retrieve(query: str) -> list[Chunk]:
    return [Chunk(text, name) for name, text in PAGES.items() if name in query]


async def main() -> None:
    async with Pipeline(RetrieverSource(retrieve), Writer()) as pipeline:
        async for event in pipeline.events("Where was the bridge's designer born?", refresh=Refresh(every_tokens=16)):
            if isinstance(event, ContextRefreshed):
                print(f"\nnew, for {event.query!r}: {event.chunks[0].text}")
            elif isinstance(event, TokensGenerated):
                print(event.text, end="\n" if event.finish_reason else "", flush=True)


asyncio.run(main())
