"""Sessions on a simulated engine, in virtual time."""

import asyncio

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import ModelInfo, SamplingParams
from streamrag.sessions import Session
from streamrag.telemetry import Answer
from studies.sessions.simulated_backend import SimulatedBackend

SHAPE = EngineShape(num_blocks=400, max_model_len=6_400, max_num_batched_tokens=256)


def test_a_version_stands_when_it_is_computed_however_long_that_takes() -> None:
    step_s = by_parts(lambda parts: sum(num_new for num_new, _ in parts) / 1_000)  # five seconds for the data
    engine = simulated_engine(SHAPE, step_s, is_stock=False)

    async def main() -> tuple[Answer, float]:
        loop = asyncio.get_running_loop()
        async with SimulatedClient(engine) as client:
            backend = SimulatedBackend(client, ModelInfo("simulated", CodePointTokenizer(), SHAPE.max_model_len))
            async with Session(backend, window_tokens=5_000, clock=loop.time) as session:
                await session.append("x" * 5_000)
                await anext(session.versions())
                began_s = loop.time()
                async with session.ask("Is it?", params=SamplingParams(max_tokens=3)) as stream:
                    async for _ in stream:
                        pass
                return stream.result, loop.time() - began_s

    answer, took_s = run_virtual(main())
    assert answer.version == 1
    assert len(answer.token_ids) == 3
    assert answer.record is not None
    num_computed = answer.num_prompt_tokens - answer.record.num_from_cache
    assert num_computed < 2 * SHAPE.block_size + len("\nQuestion: Is it?\n\nAssistant:")
    assert took_s == answer.timings.total_s
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == SHAPE.num_blocks
    assert not engine.scheduler.requests
