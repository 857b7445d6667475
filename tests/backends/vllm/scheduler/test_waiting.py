"""Partial prompts that do not fit, and those that lose their slot."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from streamrag.backends.simulated.engine import SimulatedEngine, always
from tests.engine.fuzz.prompt_logprobs import PromptLogprobs, expected_logprobs
from tests.engine.oracle import V1OracleRunner, V2OracleRunner

Make = Callable[..., Any]
TOKENS = list(range(40))


def acknowledgements(b: Any, name: str) -> list[dict[str, Any]]:
    ours = [o.kv_transfer_params["streamrag"] for o in b.outputs if o.request_id == name and o.kv_transfer_params]
    return [each for each in ours if "chunk" in each]


@pytest.mark.parametrize("num_big", [4, 9, 30])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_prompt_that_fits_is_served_behind_any_number_that_do_not(bench: Make, num_big: int, is_busy: bool) -> None:
    b = bench(num_blocks=60)
    b.chunk("idle", list(range(120)))  # holds half of the memory
    b.run()
    for i in range(num_big):
        b.chunk(f"big {i}", [1_000 * (i + 1) + t for t in range(150)])
    b.chunk("small", [*range(500, 508)])
    if is_busy:
        b.plain("busy", 20, first=700, max_tokens=60)
    for _ in range(30):
        if b.engine.has_work:
            b.step()
    assert acknowledgements(b, "small") == [{"chunk": 0, "num_computed": 7}]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_client_hears_of_a_prompt_that_waits_for_memory(bench: Make, is_busy: bool) -> None:
    b = bench(num_blocks=50)
    b.chunk("idle", list(range(120)))
    b.run()
    if is_busy:
        b.plain("busy", 20, first=700, max_tokens=60)
    b.chunk("stuck", [*range(500, 620)])
    for _ in range(10):
        if b.engine.has_work:
            b.step()
    assert acknowledgements(b, "stuck") == [{"chunk": 0, "num_computed": 0, "is_waiting": True}]
    assert "stuck" not in b.scheduler.plugin.queues.idle
    b.chunk("stuck", [7], kept=120)
    b.run()
    b.engine.abort("idle")
    b.run()
    assert "stuck" in b.scheduler.plugin.queues.idle  # it goes on by itself, and is acknowledged once
    assert [each["chunk"] for each in acknowledgements(b, "stuck")] == [0, 1]
    b.chunk("stuck", [8], kept=121, is_complete=True)
    b.run()
    assert b.tokens("stuck") == b.fresh_answer([*range(500, 620), 7, 8])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_client_hears_of_a_prompt_that_got_stuck_while_its_last_step_was_in_flight(
    bench: Make, is_async: bool
) -> None:
    limits = {"num_blocks": 8, "max_model_len": 32, "max_num_batched_tokens": 3, "max_num_seqs": 2}
    b = bench(is_async=is_async, must_fit_whole=False, **limits)
    names = ["a", "b", "c"]
    for i, name in enumerate(names):
        b.chunk(name, [*range(100 * i, 100 * i + 23)])
    b.run()
    assert [[each["chunk"] for each in acknowledgements(b, name)] for name in names] == [[0], [0], [0]]
    assert len(b.scheduler.plugin.queues.idle) < 3


@pytest.mark.parametrize("is_async", [False, True])
def test_a_client_hears_that_another_prompt_has_grown_into_its_memory(bench: Make, is_async: bool) -> None:
    b = bench(is_async=is_async, num_blocks=8, max_model_len=32, max_num_batched_tokens=5, max_num_seqs=2)
    b.chunk("grows", [*range(5)])
    b.chunk("stuck", [*range(100, 126)])
    b.step()
    b.step()
    b.chunk("grows", [*range(7, 12)], kept=5)
    b.run()
    (told,) = acknowledgements(b, "stuck")
    assert told["is_waiting"]
    assert list(b.scheduler.plugin.queues.idle) == ["grows"]


class LogprobsRunner(V2OracleRunner):
    """Collects log-probabilities of prompts as vLLM's `PromptLogprobsWorker` does: while a request has its slot."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.collected: dict[str, list[int]] = {}
        self.delivered: dict[str, list[int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (step.preempted_req_ids or set()) | {new.req_id for new in step.scheduled_new_reqs}:
            self.collected[request_id] = []
        output = super().execute(step)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            positions = self.collected[request_id]
            end = row.num_computed + num_tokens
            positions += range(row.num_computed, min(end, len(row.prompt)))
            if end >= len(row.prompt):
                self.delivered.setdefault(request_id, positions.copy())
        return output


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("eviction", ["recompute", "swap"])
def test_log_probabilities_of_a_prompt_are_whole_though_it_gave_up_its_slot(
    bench: Make, is_async: bool, eviction: str
) -> None:
    limits = {"eviction": eviction, "num_host_blocks": 50, "policy": "lcas"}
    b = bench(max_num_seqs=2, is_async=is_async, streamrag=limits)
    shape = b.engine.shape
    runner = LogprobsRunner(shape.num_blocks, shape.block_size, 1_000, is_async, num_slots=2)
    b.engine = SimulatedEngine(shape, runner, always(1.0), has_v2_runner=True)
    b.scheduler = b.engine.scheduler
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    for i in range(6):  # each is more urgent than those before it
        b.engine.add(f"p{i}", range(100 * i, 100 * i + 50), params)
        b.step()
        b.step()
    assert any(r.num_preemptions for r in b.scheduler.requests.values())
    b.run()
    assert runner.delivered == {f"p{i}": list(range(50)) for i in range(6)}
    for i in range(6):
        assert b.tokens(f"p{i}") == b.fresh_answer(list(range(100 * i, 100 * i + 50)))


class LogprobsV1Runner(PromptLogprobs, V1OracleRunner):
    """The first model runner, which collects log-probabilities only for a request that it does not know."""


def test_log_probabilities_of_a_prompt_outlive_a_reset_while_its_end_is_computed(bench: Make) -> None:
    b = bench(is_async=True, max_num_batched_tokens=200)
    shape = b.engine.shape
    b.engine = SimulatedEngine(shape, LogprobsV1Runner(shape.num_blocks, shape.block_size, 1_000, True), always(1.0))
    b.scheduler = b.engine.scheduler
    b.engine.add("p", TOKENS, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1))
    assert b.engine.launch() is not None
    assert b.scheduler.reset_prefix_cache(reset_running_requests=True)
    b.outputs += b.engine.collect()
    b.run()
    (logprobs,) = [o.new_prompt_logprobs_tensors for o in b.outputs if o.new_prompt_logprobs_tensors]
    assert tuple(logprobs) == expected_logprobs(TOKENS)
    assert b.tokens("p") == b.fresh_answer(TOKENS)


def test_several_answers_after_a_stream_compute_its_last_block_each_and_nothing_else(bench: Make) -> None:
    b = bench(max_num_batched_tokens=64, max_num_seqs=8)
    b.chunk("s", list(range(30)))
    b.run()
    b.chunk("s", list(range(100, 123)), kept=20, is_complete=True, max_tokens=1)
    b.run()
    prompt = [*range(20), *range(100, 123)]  # 43 tokens: ten whole blocks of 4
    for i in range(4):
        b.engine.add(f"a{i}", prompt, SamplingParams(max_tokens=3, temperature=0.0))
    b.run()
    records = [b.record(f"a{i}") for i in range(4)]
    assert [(record.num_computed, record.num_from_cache) for record in records] == [(3, 40)] * 4
    assert b.record("s").num_computed == 29 + 23
    assert {tuple(b.tokens(f"a{i}")) for i in range(4)} == {tuple(b.fresh_answer(prompt, max_tokens=3))}


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 1}, {"prompt_logprob_token_ids": [[1]] * 40}])
def test_streams_cannot_have_log_probabilities_of_their_prompt(bench: Make, wanted: dict[str, Any]) -> None:
    from streamrag.backends.vllm.chunk_wire import PromptMessage

    b = bench()
    b.engine.add("s", TOKENS, SamplingParams(max_tokens=2, **wanted), PromptMessage(0, 0, True))
    b.check_empty()
    assert "log-probabilities of the prompt" in str(b.outputs[-1].kv_transfer_params)
