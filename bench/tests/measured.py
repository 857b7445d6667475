"""A simulated engine whose steps take what a profile says, to be measured as if it were a real one."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag_bench.measured_engine import MeasuredStep

TRUE = TableProfile(
    name="true",
    device="none",
    points=((1, 0.010), (64, 0.020), (512, 0.100)),
    pair_s=2e-7,
    request_s=0.001,
    kv_tokens=32_000,
    delivery_s=0.003,
    own_pair_s=1e-7,
)
SHAPE = EngineShape(1_000, 32, max_model_len=2_048, max_num_batched_tokens=512, max_num_seqs=16)


class Measured:
    """A simulated engine, seen as the client of a real one."""

    kv_tokens, is_async = 32_000, False

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client
        self.block_size = client.block_size

    def generate(self, query_id: str, token_ids: Sequence[int], num: int) -> AsyncGenerator[tuple[int, ...], None]:
        return self._client.generate(query_id, token_ids, num)

    @property
    def steps(self) -> list[MeasuredStep]:
        return [
            MeasuredStep(s.end_s, s.end_s - s.start_s, sum(s.num_tokens_of.values()), len(s.num_tokens_of))
            for s in self._client.steps
        ]


@asynccontextmanager
async def measured_engine(shape: EngineShape = SHAPE, *, is_stock: bool = True) -> AsyncIterator[Measured]:
    engine = simulated_engine(shape, by_parts(TRUE.step_s), is_stock=is_stock)
    async with SimulatedClient(engine, delivery_s=TRUE.delivery_s, keep_steps=True) as client:
        yield Measured(client)
