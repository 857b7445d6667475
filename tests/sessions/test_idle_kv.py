"""Whose KV goes when sessions need more than there is, on vLLM's own KV cache manager in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import ModelInfo, SamplingParams
from streamrag.engine.costs.profile_files import load_profile
from streamrag.sessions import Session
from streamrag.testing import CodePointTokenizer
from studies.sessions.simulated_backend import SimulatedBackend

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
MAX_MODEL_LEN = 6_000


class Site:
    """Sessions on one engine with memory for 6,080 tokens of KV, and host memory for 32,000."""

    def __init__(self, engine: Any, backend: SimulatedBackend, stack: AsyncExitStack) -> None:
        self.engine, self._backend, self._stack = engine, backend, stack

    async def session(self, name: str, num_lines: int) -> Session:
        """With so many lines of 100 tokens, which stand."""
        clock = asyncio.get_running_loop().time
        session = await self._stack.enter_async_context(
            Session(self._backend, clock=clock, name=name, window_tokens=4_000)
        )
        for i in range(num_lines):
            await append(session, name, i)
        await ask(session, "All there?")
        return session

    def held(self) -> list[int]:
        """KV blocks of each stream, in the order of their sessions."""
        scheduler = self.engine.scheduler
        return [scheduler.plugin.kv_memory.num_blocks(request) for request in scheduler.requests.values()]


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    profile = load_profile("l40s-llama8b")
    options = {"eviction": "swap", "num_host_blocks": 2_000}
    shape = EngineShape(num_blocks=380, max_model_len=MAX_MODEL_LEN, is_async=profile.is_async, streamrag=options)
    engine = simulated_engine(shape, by_parts(profile.step_s), is_stock=False)
    model = ModelInfo("simulated", CodePointTokenizer(), MAX_MODEL_LEN)
    async with SimulatedClient(engine, delivery_s=profile.delivery_s) as client, AsyncExitStack() as stack:
        yield Site(engine, SimulatedBackend(client, model), stack)


async def append(session: Session, name: str, number: int) -> None:
    await session.append(f"{name} {number} ".ljust(99, "."))


async def ask(session: Session, question: str) -> None:
    async with session.ask(question, params=PARAMS, at_least=session.state.num_appended) as stream:
        async for _ in stream:
            pass


def test_an_idle_session_gives_its_kv_up_before_an_active_one_and_has_it_back_from_the_host() -> None:
    async def main() -> None:
        async with site() as here:
            idle, active = await here.session("idle", 20), await here.session("active", 15)
            for i in range(5):
                await asyncio.sleep(1.0)
                await append(active, "active", 15 + i)
                await ask(active, f"Question {i}?")
            both = here.held()
            host = here.engine.scheduler.plugin.host_memory
            assert host.num_saved == 0
            await here.session("new", 20)
            assert here.held()[:2] == [0, both[1]], "the idle one has gone, the active one stays"
            assert host.num_saved > 0, "what the new one needed"
            num_loaded = host.num_loaded
            await ask(idle, "And you?")
            assert host.num_loaded > num_loaded

    run_virtual(main())
