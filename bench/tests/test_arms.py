import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from small_loads import APPENDS, UPDATES, settings, updating

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.errors import ConfigurationError
from streamrag.trace.values import TracedUpdate
from streamrag_bench.arms import PromptStream, run_query
from streamrag_bench.workload import Arriving, Tokens, make_load


class Notes:
    """An engine that takes down what it is sent, and answers after a second."""

    block_size = 16

    def __init__(self) -> None:
        self.sent: list[tuple[float, list[int], int]] = []

    async def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        self.sent.append((round(asyncio.get_running_loop().time(), 6), list(token_ids), num_output_tokens))
        await asyncio.sleep(1)
        yield (1,)

    def stream(self, *args: Any, **kwargs: Any) -> AbstractAsyncContextManager[PromptStream]:
        raise NotImplementedError

    def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[tuple[int, ...], None]:
        raise NotImplementedError


def test_only_stock_sessions_cannot_update() -> None:
    for arm in ("no-streaming", "warming", "streaming"):
        make_load(settings(arm=arm), UPDATES)
    make_load(settings(arm="stock-sessions"), APPENDS)
    with pytest.raises(ConfigurationError, match="'u0' has an update"):
        make_load(settings(arm="stock-sessions"), UPDATES)
    with pytest.raises(ConfigurationError, match=r"arm='swimming' must be 'no-streaming'"):
        settings(arm="swimming")


def test_without_streaming_the_last_prompt_is_sent_when_all_is_there() -> None:
    query, tokens, engine = updating("u", 0.5, ("a", "b"), ("b", "c"), size=40), Tokens(), Notes()

    async def main() -> Any:
        return await run_query("no-streaming", engine, Arriving(query, tokens, 0.0), 7)

    timing = run_virtual(main())
    last = query.events[-1]
    assert isinstance(last, TracedUpdate)
    prompt = [token for chunk in last.chunks for token in tokens.of_chunk(chunk)] + tokens.of_tail(query)
    assert engine.sent == [(1.3, prompt, 7)]
    assert (timing.retrieval_end_s, timing.first_token_s) == pytest.approx((1.3, 2.3))


def test_warming_sends_whole_blocks_and_then_the_complete_prompt() -> None:
    query, engine = updating("u", 0.0, ("a", "b"), ("b", "c"), size=40), Notes()

    async def main() -> None:
        await run_query("warming", engine, Arriving(query, Tokens(), 0.0), 7)

    run_virtual(main())
    assert [(at_s, len(token_ids), num) for at_s, token_ids, num in engine.sent] == [
        (0.3, 80, 1),
        (0.6, 80, 1),
        (0.8, 80 + 32, 7),
    ]
