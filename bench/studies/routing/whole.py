"""Replicas with vLLM's own KV cache manager and our scheduler on it, to hold the lean model to. Imports vLLM."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.backends.simulated.client import SimulatedClient, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.stream import SimulatedStream
from streamrag.backends.vllm.scheduler.host_memory.costs import parts_of
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.routing import Report

from .lean import MOST_OPEN
from .loads import BLOCK

LEAST_TIMED = 8
"""Steps with fewer blocks of prompts say nothing of the speed of computing prompts."""


class WholeStream:
    """A query on such a replica. A number of a prompt stands for a block."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self.num_spent = 0

    async def update(self, token_ids: Sequence[int], *, is_complete: bool) -> None:
        await self._stream.update(_tokens(token_ids), is_complete=is_complete)

    async def __aiter__(self) -> AsyncGenerator[object, None]:
        async for new in self._stream:
            yield new


class WholeEngine:
    """One replica. To be made on a loop whose time is virtual."""

    def __init__(self, profile: StepProfile, kv_tokens: int, *, budget: int = 8_192) -> None:
        shape = EngineShape(
            kv_tokens // BLOCK,
            BLOCK,
            max_model_len=1 << 17,
            max_num_batched_tokens=budget,
            max_num_seqs=MOST_OPEN,
        )
        self.slowdown = 1.0
        self._profile = profile
        self._engine = simulated_engine(shape, self._step_s, is_stock=False)
        self._client = SimulatedClient(self._engine)
        self._is_open = False
        self._num_queries = 0
        self._num_kv_blocks = kv_tokens // BLOCK
        self._found_and_asked = [0, 0]
        self._tokens_and_seconds = [0.0, 0.0]

    @property
    def busy_s(self) -> float:
        return self._client.busy_s

    @asynccontextmanager
    async def stream(
        self, token_ids: Sequence[int], num_output: int, *, is_complete: bool
    ) -> AsyncIterator[WholeStream]:
        if not self._is_open:  # it is open for as long as its loop runs
            self._is_open = True
            await self._client.__aenter__()
        self._num_queries += 1
        query_id = f"q{self._num_queries}"
        async with self._client.stream(query_id, _tokens(token_ids), num_output, is_complete=is_complete) as stream:
            made = WholeStream(stream)
            yield made
        record = self._client.records[query_id][-1]
        made.num_spent = record.num_computed // BLOCK
        self._found_and_asked[0] += record.num_from_cache
        self._found_and_asked[1] += record.num_prompt_tokens

    def report(self) -> Report:
        scheduler = self._engine.scheduler
        num_left = sum(max(r.num_prompt_tokens - r.num_computed_tokens, 0) for r in scheduler.requests.values())
        found, asked = self._found_and_asked
        tokens, seconds = self._tokens_and_seconds
        return Report(
            max_open=MOST_OPEN,
            kv_usage=scheduler.kv_cache_manager.usage,
            cache_hit_rate=found / asked if asked else 0.0,
            queued_tokens=num_left // BLOCK,
            num_kv_tokens=self._num_kv_blocks,
            tokens_per_s=tokens / BLOCK / seconds if seconds else 0.0,
        )

    def _step_s(self, step: SchedulerOutput, start_s: float) -> float:
        parts = [part for _, part in parts_of(step)]
        if not parts:
            return 0.0
        step_s = self._profile.step_s(parts) * self.slowdown
        num_prefilled = sum(num for num, _ in parts if num > 1)
        if num_prefilled >= LEAST_TIMED * BLOCK:
            tokens, seconds = self._tokens_and_seconds
            self._tokens_and_seconds = [0.9 * tokens + num_prefilled, 0.9 * seconds + step_s]
        return step_s


def _tokens(block_ids: Sequence[int]) -> list[int]:
    return [number for number in block_ids for _ in range(BLOCK)]
