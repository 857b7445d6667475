"""The tokens that you have: a prompt pushed into a running engine piece by piece, by a program with its own retrieval.

    python examples/push_tokens.py [MODEL]

Without a model it makes a tiny one with random weights, which writes noise.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from streamrag import AnswerChunk, Prompt, SamplingParams, VllmBackend
from streamrag.testing import make_tiny_llama

DRAFT = "Notes: a task group waits for its tasks. A page that is still being read says:"
PAGES = [" A cancelled scope cancels every task in it.", " An event wakes all who wait for it."]
QUESTION = "\nQuestion: What cancels a task? Answer:"


async def main(model: Path) -> None:
    backend = VllmBackend(model)
    await backend.start(print)
    try:
        encode = backend.model.tokenizer.encode
        first = Prompt(tuple(encode(DRAFT)))
        async with backend.streams.open(first, SamplingParams(max_tokens=16, ignore_eos=True)) as stream:
            for page in PAGES:  # as they come; what is there is computed meanwhile
                await stream.append(encode(page))
            better = DRAFT.partition(". ")[0] + "." + PAGES[0]
            await stream.update(Prompt(tuple(encode(better))))  # keeps the KV of what both begin with
            await stream.finish(encode(QUESTION))
            async for event in stream:
                if isinstance(event, AnswerChunk):
                    print(event.text, end="", flush=True)
        print()
        if stream.record is not None:
            record = stream.record
            print(f"{len(record.chunks)} chunks made a prompt of {record.num_prompt_tokens} tokens")
            print("tokens shared with the prompt before:", [chunk.num_shared for chunk in record.chunks])
    finally:
        await backend.aclose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_tiny_llama(Path(folder, "model"))))
