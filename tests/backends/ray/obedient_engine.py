"""An engine for replicas: their processes import it from here."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio

from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams
from streamrag.errors import EngineDeadError
from streamrag.testing import ScriptedBackend

DIED = Path(os.environ.get("STREAMRAG_TEST_FOLDER", ".")) / "died"
PAUSES_S = {"slow": 0.05, "slower": 60.0}


class Engine(ScriptedBackend):
    """Does what the question says: "hold" is never prefilled, "endless" never ends, "die once" kills one engine."""

    def __init__(self) -> None:
        super().__init__("An answer.")
        self.model = replace(self.model, name=f"engine {os.getpid()}", verifies_drafts=True)
        self.is_dead = False

    def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("it was told to die")

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        is_question = False
        self.num_requests += 1
        try:
            text = ""
            async for prompt in prompts:
                text = "".join(map(chr, prompt.token_ids))
                if text == "how many":
                    is_question = True
                    self.num_requests -= 1
                if text.startswith("hold"):
                    await anyio.sleep_forever()
                yield Prefilled(len(prompt.token_ids))
            if text == "die once" and not DIED.exists():
                DIED.touch()
                self.is_dead = True
                raise EngineDeadError("it was told to die")
            if is_question:
                yield AnswerChunk(f"{self.num_requests} {os.getpid()}", (1,), "stop")
                return
            for character in "An answer":
                yield AnswerChunk(character, (ord(character),))
                if text in PAUSES_S:
                    await anyio.sleep(PAUSES_S[text])
            if text.startswith("endless"):
                await anyio.sleep_forever()
            yield AnswerChunk(".", (1,), "stop")
        finally:
            self.num_requests -= not is_question
