"""LoRA adapters: vLLM has room for `max_loras` of them in a step, and dies of a step with more."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from streamrag.backends.simulated.blind_runner import BlindRunner
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, always
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.hooks import AsyncStreamingScheduler, StreamingScheduler

NUM_OUTPUT_TOKENS = 20


def make_engine(max_loras: int, is_async: bool) -> SimulatedEngine:
    shape = EngineShape(400, 16, max_model_len=2_048, max_num_batched_tokens=64, max_num_seqs=16, is_async=is_async)
    scheduler = AsyncStreamingScheduler if is_async else StreamingScheduler
    lora_config = SimpleNamespace(max_loras=max_loras)

    class WithAdapters(scheduler):  # type: ignore[misc, valid-type]
        """Its rules are made when it is constructed, and depend on the configuration."""

        @property
        def lora_config(self) -> Any:
            return lora_config

        @lora_config.setter
        def lora_config(self, value: Any) -> None: ...

    return SimulatedEngine(shape, BlindRunner(), always(0.05), WithAdapters)


def send(
    engine: SimulatedEngine,
    name: str,
    adapter: int,
    tokens: list[int],
    message: PromptMessage | None = None,
    num_output_tokens: int = NUM_OUTPUT_TOKENS,
) -> None:
    params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    if message is not None:
        params.extra_args = message.extra_args()
    lora = LoRARequest(f"adapter-{adapter}", adapter, f"/{adapter}") if adapter else None
    request = Request(
        name,
        tokens,
        params,
        pooling_params=None,
        arrival_time=engine.now_s,
        lora_request=lora,
        block_hasher=engine._hasher,
        resumable=message is not None,
    )
    engine.scheduler.add_request(request)


def watch_steps(engine: SimulatedEngine) -> list[set[int]]:
    """Return a list that grows by the adapters of each step."""
    steps: list[set[int]] = []
    schedule = engine.scheduler.schedule

    def watched(*arguments: Any) -> Any:
        output = schedule(*arguments)
        loras = [engine.scheduler.requests[name].lora_request for name in output.num_scheduled_tokens]
        steps.append({lora.lora_int_id for lora in loras if lora})
        return output

    engine.scheduler.schedule = watched
    return steps


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_step_has_no_more_adapters_than_the_engine_has_room_for(max_loras: int, is_async: bool, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(max_loras, is_async)
    steps = watch_steps(engine)
    partial: list[tuple[str, int, int]] = []
    for number in range(12):
        name, adapter, tokens = f"q{number}", number % 4, rng.choices(range(3, 900), k=rng.randrange(20, 300))
        is_stream = rng.random() < 0.6
        send(engine, name, adapter, tokens, PromptMessage(0, 0, False) if is_stream else None)
        if is_stream:
            partial.append((name, adapter, len(tokens)))
        for _ in range(rng.randrange(6)):
            engine.step()
        if partial and rng.random() < 0.7:
            name, adapter, num_kept = partial.pop(rng.randrange(len(partial)))
            send(engine, name, adapter, rng.choices(range(3, 900), k=40), PromptMessage(1, num_kept, True))
    for name, adapter, num_kept in partial:
        send(engine, name, adapter, [7], PromptMessage(1, num_kept, True))
    for _ in range(3_000):
        engine.step() if engine.has_work else None
    assert not engine.scheduler.requests, "each is answered"
    assert max(map(len, steps)) == max_loras


def test_a_request_whose_last_token_is_being_sampled_still_has_its_adapter() -> None:
    """vLLM 0.33 counts the adapters of all requests that it is shown as running, and dies of too many."""
    engine = make_engine(max_loras=1, is_async=True)
    queues, shown = engine.scheduler.plugin.queues, []
    hide_others = queues.hide_others

    def watched(*arguments: Any) -> Any:
        hidden = hide_others(*arguments)
        shown.append({request.lora_request.lora_int_id for request in engine.scheduler.running})
        return hidden

    queues.hide_others = watched
    send(engine, "long", 1, list(range(3, 203)))
    engine.step()
    send(engine, "short", 2, list(range(300, 310)), num_output_tokens=1)  # goes first
    while engine.scheduler.requests:
        engine.step()
    assert max(map(len, shown)) == 1
