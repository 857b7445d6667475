"""The scheduler of an engine that computes KV for others, as a prefill lane does: nothing is ever loaded there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.supported import only_sends_kv
from tests.backends.vllm.scheduler.test_intake import error, send
from tests.engine.oracle import V1OracleRunner

Make = Callable[..., Any]
TOKENS = list(range(40))
FRONT, SAME = TOKENS[:10], TOKENS[10:]


class Sender(V1OracleRunner):
    """A runner of which a decode lane reads what it should, when told."""

    read: frozenset[str] = frozenset()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output, sent, self.read = super().execute(step), set(self.read), frozenset()
        return replace(output, kv_connector_output=KVConnectorOutput(finished_sending=sent)) if sent else output


def connected(bench: Make, connector: str = "NixlConnector", role: str = "kv_producer", **limits: Any) -> Any:
    b = bench(**limits)
    b.connect(Sender, kv_connector=connector, kv_role=role)
    return b


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_that_another_has_computed_meanwhile_is_computed_once(bench: Make, is_async: bool) -> None:
    b = connected(bench, is_async=is_async)
    for name in ("a", "b"):
        b.chunk(name, FRONT)
    b.run()
    for name in ("a", "b"):
        b.chunk(name, SAME, kept=10)
        b.run()
        b.chunk(name, [900, ord(name)], kept=40, is_complete=True)
        b.run()
    assert b.record("b").num_from_cache > 20
    assert b.tokens("b") == b.fresh_answer([*TOKENS, 900, ord("b")])
    b.check_empty()


def test_the_rest_of_a_complete_prompt_takes_no_more_of_a_step_than_is_planned(bench: Make) -> None:
    b = connected(bench, max_num_batched_tokens=16, streamrag={"policy": "fcfs"})
    b.chunk("first", TOKENS[:13], is_complete=True)
    b.chunk("second", TOKENS[::-1], is_complete=True)
    planned: list[int] = []
    limit = b.scheduler.plugin.executor._limit_to_grant

    def look(grant: Any, request: Any) -> None:
        limit(grant, request)
        planned.append(request.num_tokens - request.num_computed_tokens)

    b.scheduler.plugin.executor._limit_to_grant = look
    b.step()
    assert planned == [13, 3]
    b.run()
    assert b.tokens("second") == b.fresh_answer(TOKENS[::-1])


def test_kv_that_a_decode_lane_will_read_stays_until_it_has(bench: Make) -> None:
    b = connected(bench)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    b.engine.add("a", FRONT, params, PromptMessage(0, 0, False, 0.0))
    b.chunk("b", FRONT)
    b.run()
    b.engine.add("a", SAME, params, PromptMessage(1, 10, True, 0.0))
    for _ in range(8):
        b.step()
    (last,) = [o for o in b.outputs if o.request_id == "a" and "remote_block_ids" in (o.kv_transfer_params or {})]
    assert len(last.kv_transfer_params["remote_block_ids"][0]) == 10
    b.chunk("b", SAME, kept=10, is_complete=True)  # takes the blocks that wait to be read
    for _ in range(8):
        b.step()
    assert b.record("b").num_from_cache > 20
    assert b.tokens("b") == b.fresh_answer(TOKENS)
    b.runner.read = frozenset({"a"})
    b.run()
    b.check_empty()


@pytest.mark.parametrize("num_tokens", [20, 18])
def test_kv_is_handed_over_whole_however_short_memory_is(bench: Make, num_tokens: int) -> None:
    b = connected(bench, is_async=True, num_blocks=10, max_num_batched_tokens=100, streamrag={"policy": "fcfs"})
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    for name, max_tokens in (("a", 1), ("b", 1), ("c", 3)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, extra_args=extra)
        b.engine.add(name, [ord(name), *range(1, num_tokens)], params)
    handed: dict[str, int] = {}
    while len(handed) < 3:
        last = [o for o in b.step() if "remote_block_ids" in (o.kv_transfer_params or {})]
        handed |= {o.request_id: len(o.kv_transfer_params["remote_block_ids"][0]) for o in last}
        b.runner.read |= {o.request_id for o in last}
    assert handed == {"a": 5, "b": 5, "c": 5 if num_tokens == 18 else 6}
    b.run()
    b.check_empty()


def test_output_in_flight_of_an_evicted_request_is_computed_again_with_its_kv(bench: Make) -> None:
    b = connected(bench, is_async=True, max_num_batched_tokens=100)
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    b.engine.add("a", TOKENS, SamplingParams(max_tokens=1, temperature=0.0, extra_args=extra))
    b.engine.launch()
    b.scheduler.plugin.evictions.evict(b.scheduler.requests["a"])
    while not b.outputs:
        b.step()
    assert b.tokens("a") == b.fresh_answer(TOKENS, 1)
    assert len(b.outputs[-1].kv_transfer_params["remote_block_ids"][0]) == 10
    b.runner.read = frozenset({"a"})
    b.run()
    b.check_empty()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_decode": True, "remote_block_ids": [[1]], "remote_host": "x"}]
)
def test_a_request_that_names_kv_to_load_is_refused(bench: Make, params: dict[str, Any], is_stream: bool) -> None:
    b = connected(bench)
    extra: dict[str, Any] = {"kv_transfer_params": params}
    if is_stream:
        extra |= PromptMessage(0, 0, True, 0.0).extra_args()
    send(b, "bad", extra, resumable=is_stream)
    b.plain("good", 30)
    b.run()
    assert "only computes KV for others" in error(b, "bad")
    assert b.tokens("good") == b.fresh_answer(list(range(30)))
    b.check_empty()


@pytest.mark.parametrize(
    ("connector", "role", "extra", "only_sends"),
    [
        ("NixlConnector", "kv_producer", {}, True),
        ("NixlConnector", "kv_producer", {"bidirectional_kv_xfer": True}, False),
        ("NixlConnector", "kv_both", {}, False),
        ("NixlConnector", "kv_consumer", {}, False),
        ("LMCacheConnectorV1", "kv_producer", {}, False),
    ],
)
def test_only_a_nixl_producer_counts_as_a_connector_that_only_sends(
    connector: str, role: Any, extra: Any, only_sends: bool
) -> None:
    config: Any = VllmConfig.__new__(VllmConfig)
    object.__setattr__(config, "kv_transfer_config", None)
    assert not only_sends_kv(config)
    transfer = KVTransferConfig(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)
    object.__setattr__(config, "kv_transfer_config", transfer)
    assert only_sends_kv(config) == only_sends
