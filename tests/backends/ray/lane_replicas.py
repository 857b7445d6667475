"""Engines of lanes for replicas: their processes import them from here."""

import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio

from streamrag.backends.lanes.kv_transfer import PrefillEnd
from streamrag.backends.lanes.replica_engines import ENDED_AT, DecodeEngine
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.backends.vllm.client.lane_engine import LaneFacts
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Prompt, SamplingParams
from streamrag.records import RequestRecord

HELD = Path(os.environ.get("STREAMRAG_TEST_FOLDER", ".")) / "held"
RECORD = RequestRecord("1", "finished", True, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 10, 1, 10, 0, 0, 0)


class Prefill:
    """Computes prompts at once. The KV has the id of this process."""

    def __init__(self, dtype: str = "float32", *, max_num_seqs: int = 100) -> None:
        self.model = ModelInfo("prefill", CodePointTokenizer(), 100_000)
        self.lane_facts = LaneFacts({"dtype": dtype}, block_size=2, num_blocks=1, max_num_seqs=max_num_seqs)
        self.prompts: list[tuple[str, bool]] = []
        self.params: list[SamplingParams] = []

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        self.params.append(params)
        async for prompt in prompts:
            self.prompts.append(("".join(map(chr, prompt.token_ids)), prompt.is_complete))
            yield Prefilled(max(len(prompt.token_ids) - 1, 0))
        transfer = {"remote_block_ids": [[3, 4]], "remote_host": str(os.getpid()), ENDED_AT: time.time()}
        yield PrefillEnd("", (), "length", RECORD, kv_transfer=transfer)


class Decode:
    """Answers with the ids of the process whose KV it has, and of its own. "hold" waits for `goes_on`, "hold once" for
    ever in the first engine, and "endless" never ends."""

    def __init__(self, dtype: str = "float32", *, max_num_seqs: int = 100) -> None:
        self.model = ModelInfo("decode", CodePointTokenizer(), 100_000)
        self.lane_facts = LaneFacts({"dtype": dtype}, block_size=2, num_blocks=1, max_num_seqs=max_num_seqs)
        self.prompts: list[str] = []
        self.goes_on = anyio.Event()

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        (prompt,) = [prompt async for prompt in prompts]
        text = "".join(map(chr, prompt.token_ids))
        self.prompts.append(text)
        if text == "hold once" and not HELD.exists():
            HELD.touch()
            await anyio.sleep_forever()
        if text == "hold":
            await self.goes_on.wait()
        yield AnswerChunk(params.extra["extra_args"]["kv_transfer_params"]["remote_host"], (1,))
        if text.startswith("endless"):
            await anyio.sleep_forever()
        yield AnswerChunk(f" {os.getpid()}", (2,), "length")


class CountedDecodeEngine(DecodeEngine):
    """Has the id of its process, and the bytes of KV that it has read, as the name of its model."""

    @property
    def model(self) -> ModelInfo:
        assert self.stats is not None
        return replace(super().model, name=f"{os.getpid()} {self.stats.num_received_bytes}")
