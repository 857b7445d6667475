"""A simulated engine as the backend of sessions: what runs on a real engine runs in virtual time, unchanged."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.backends.simulated.stream import SimulatedStream
from streamrag.core import BackendEvent, ModelInfo, Prompt, SamplingParams
from streamrag.engine.costs.step_profiles import StepProfile
from streamrag.support.tasks import cancel_and_wait


@asynccontextmanager
async def simulated_on(
    profile: StepProfile, max_model_len: int, *, is_stock: bool = False, has_prefix_cache: bool = True
) -> AsyncIterator[tuple[SimulatedEngine, SimulatedClient]]:
    """Run an engine on the profile's device, with our scheduler unless `is_stock`, and a client of it."""
    shape = EngineShape(
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_model_len=max_model_len,
        max_num_seqs=256,
        is_async=profile.is_async,
        has_prefix_cache=has_prefix_cache,
    )
    engine = simulated_engine(shape, by_parts(profile.step_s), is_stock=is_stock)
    async with SimulatedClient(engine, delivery_s=profile.delivery_s) as client:
        yield engine, client


class SimulatedBackend:
    """Answers have no text, and as many tokens as they may have at most. The client's engine has our scheduler."""

    def __init__(self, client: SimulatedClient, model: ModelInfo) -> None:
        self.model = model
        self._client = client

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt as it comes; sample the answer to the complete one, which is the last."""
        first = await anext(prompts)
        async with self._client.stream(
            "prompt",
            first.token_ids,
            params.max_tokens,
            is_complete=first.is_complete,
            request_class=first.request_class,
            draft=first.draft,
        ) as stream:
            pushing = asyncio.create_task(self._push(prompts, stream), name="push prompts")
            try:
                async with aclosing(stream.events()) as events:
                    async for event in events:
                        yield event
            finally:
                await cancel_and_wait([pushing])

    @staticmethod
    async def _push(prompts: AsyncIterator[Prompt], stream: SimulatedStream) -> None:
        async for prompt in prompts:
            await stream.update(prompt.token_ids, is_complete=prompt.is_complete, hint=prompt.hint, draft=prompt.draft)
