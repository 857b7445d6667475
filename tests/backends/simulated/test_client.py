from contextlib import aclosing

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import quick_block_hasher
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.errors import BackendError

SHAPE = EngineShape(num_blocks=100, max_model_len=1_600, max_num_batched_tokens=256)


def test_quick_hashes_are_equal_where_those_of_vllm_are() -> None:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    prompts = [[*range(40)], [*range(40), 7], [*range(16), *range(99, 140)], [5, *range(1, 40)], [*range(33)]]
    by_hasher = []
    for hasher in (quick_block_hasher(16), get_request_block_hasher(16, function)):
        requests = [Request("r", p, SamplingParams(), None, block_hasher=hasher) for p in prompts]
        for request in requests:  # an answer that completes a block, too
            request.append_output_token_ids(list(range(50)))
        hashes = [request.block_hashes for request in requests]
        by_hasher.append([[[a == b for a in one for b in other] for one in hashes] for other in hashes])
    assert by_hasher[0] == by_hasher[1]
    assert any(same for row in by_hasher[0] for pair in row for same in pair)


@pytest.mark.parametrize("is_stock", [True, False])
def test_closing_an_answer_frees_its_memory(is_stock: bool) -> None:
    engine = simulated_engine(SHAPE, by_parts(lambda parts: 1.0), is_stock=is_stock)

    async def main() -> list[tuple[int, ...]]:
        async with SimulatedClient(engine) as client:
            async with aclosing(client.generate("q", range(600), 50)) as answer:
                first = await anext(answer)
            async with client.stream("s", range(300), 5) if not is_stock else client:
                pass
            rest = [tokens async for tokens in client.generate("other", range(100), 3)]
            return [first, *rest]

    assert run_virtual(main()) == [(1,)] * 4
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 100
    assert not engine.scheduler.requests


def test_requests_take_the_time_of_their_steps_and_of_the_delivery() -> None:
    import asyncio

    engine = simulated_engine(SHAPE, by_parts(lambda parts: 0.25 * len(parts)), is_stock=True)

    async def main() -> list[float]:
        async with SimulatedClient(engine, delivery_s=0.01) as client:
            return [asyncio.get_running_loop().time() async for _ in client.generate("q", range(600), 3)]

    assert run_virtual(main()) == pytest.approx([0.76, 1.01, 1.26])  # three steps of prefill, then one a token
    assert engine.now_s == pytest.approx(1.26)


def test_an_engine_that_fails_tells_its_clients() -> None:
    def step_s(parts: object) -> float:
        raise ZeroDivisionError("no such step")

    engine = simulated_engine(SHAPE, by_parts(step_s), is_stock=True)

    async def main() -> None:
        async with SimulatedClient(engine) as client:
            for _ in range(2):  # while it fails, and after
                with pytest.raises(BackendError, match="no such step"):
                    await anext(client.generate("q", range(100), 1))

    run_virtual(main())
