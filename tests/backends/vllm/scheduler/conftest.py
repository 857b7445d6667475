"""Engines without a model, for the tests of this folder."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput

from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.hooks import StreamingHooks, streaming_scheduler
from streamrag.core import RequestClass
from streamrag.records import RequestRecord
from tests.engine.oracle import V1OracleRunner

MOST_STEPS = 10_000
"""Far more than any test needs."""


def is_last(output: EngineCoreOutput) -> bool:
    return output.finish_reason is not None and "chunk" not in output.kv_transfer_params["streamrag"]


class Bench:
    """An engine, and what it has put out."""

    def __init__(self, **limits: Any) -> None:
        shape = EngineShape(
            **{
                "num_blocks": 100,
                "block_size": 4,
                "max_model_len": 200,
                "max_num_batched_tokens": 16,
                "max_num_seqs": 4,
                **limits,
            }
        )
        windows = (None,) if shape.sliding_window is None else (None, shape.sliding_window)
        states = shape.has_prefix_cache if shape.has_mamba else None
        self.runner = V1OracleRunner(shape.num_blocks, shape.block_size, 1_000, shape.is_async, windows, states)
        self.engine = SimulatedEngine(shape, self.runner, always(1.0))
        assert isinstance(self.engine.scheduler, StreamingHooks)
        self.scheduler = self.engine.scheduler
        self.outputs: list[EngineCoreOutput] = []
        self._num_messages: dict[str, int] = {}

    def connect(self, runner: type[V1OracleRunner], **transfer: Any) -> None:
        """Start anew, with this kind of runner and another KV connector, of which `transfer` is the configuration."""

        def with_connector(vllm_config: VllmConfig, **arguments: Any) -> StreamingHooks:
            vllm_config.kv_transfer_config = KVTransferConfig(**transfer)
            return streaming_scheduler(vllm_config=vllm_config, **arguments)

        shape = self.engine.shape
        self.runner = runner(shape.num_blocks, shape.block_size, 1_000, shape.is_async)
        self.engine = SimulatedEngine(shape, self.runner, always(1.0), with_connector)
        assert isinstance(self.engine.scheduler, StreamingHooks)
        self.scheduler = self.engine.scheduler

    def plain(self, name: str, num_tokens: int, *, first: int = 0, max_tokens: int = 2) -> None:
        tokens = range(first, first + num_tokens)
        self.engine.add(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0))

    def chunk(
        self,
        name: str,
        tokens: list[int],
        *,
        kept: int = 0,
        is_complete: bool = False,
        max_tokens: int = 2,
        request_class: RequestClass = "pool",
        source_name: str = "",
        structured_outputs: StructuredOutputsParams | None = None,
        draft: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        index = self._num_messages[name] = self._num_messages.get(name, -1) + 1
        message = PromptMessage(
            index, kept, is_complete, self.engine.now_s, None, source_name, request_class, draft=list(draft)
        )
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            structured_outputs=structured_outputs,
            stop_token_ids=list(stop_token_ids),
        )
        self.engine.add(name, tokens, params, message)

    def step(self) -> list[EngineCoreOutput]:
        outputs = self.engine.step()
        self.outputs += outputs
        return outputs

    def run(self) -> None:
        """Until the engine sleeps. A faulty scheduler may never let it: then the test fails."""
        for _ in range(MOST_STEPS):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail(f"the engine has work after {MOST_STEPS:,} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for o in self.outputs if o.request_id == name for token in o.new_token_ids]

    def num_finishes(self, name: str) -> int:
        return sum(o.request_id == name and o.finish_reason is not None for o in self.outputs)

    def record(self, name: str) -> RequestRecord:
        """What the last output of a request says."""
        (ours,) = [o.kv_transfer_params["streamrag"] for o in self.outputs if o.request_id == name and is_last(o)]
        return RequestRecord.from_dict(ours["record"])

    def fresh_answer(self, tokens: list[int], max_tokens: int = 2) -> list[int]:
        """What another engine answers to the whole prompt."""
        other = Bench()
        other.engine.add("fresh", tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        other.run()
        return other.tokens("fresh")

    def check_empty(self) -> None:
        self.run()
        assert not self.scheduler.requests
        assert not self.scheduler.plugin.queues.idle
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.engine.shape.num_blocks


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**limits: Any) -> Bench:
        made.append(Bench(**limits))
        return made[-1]

    yield make
    for each in made:
        for name in list(each.scheduler.requests):
            each.engine.abort(name)
        each.check_empty()
        each.scheduler.shutdown()
