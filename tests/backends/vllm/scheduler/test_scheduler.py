"""The streaming scheduler inside vLLM's, one situation at a time. The fuzz mixes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec

from streamrag.backends.simulated.config import EngineShape, kv_cache_config, vllm_config
from streamrag.backends.vllm.scheduler.supported import CHECKS, check_supported
from streamrag.engine.step_size import StepCostEstimator, StepCosts
from streamrag.errors import ConfigurationError

Make = Callable[..., Any]
TOKENS = list(range(40))


def test_an_appended_prompt_is_answered_as_if_it_had_come_at_once(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS[:10])
    b.run()
    b.chunk("s", TOKENS[10:30], kept=10)
    b.run()
    b.chunk("s", TOKENS[30:], kept=30, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer(TOKENS)
    assert b.num_finishes("s") == 3


def test_a_partial_prompt_samples_no_token(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    assert b.tokens("s") == []
    assert b.scheduler.plugin.queues.idle["s"].num_computed_tokens == len(TOKENS) - 1


def test_a_chunk_in_mid_prefill_takes_effect_at_the_next_step(bench: Make) -> None:
    b = bench(max_num_batched_tokens=8)
    b.chunk("s", TOKENS)
    b.step()
    new = TOKENS[:6] + [500] * 10
    b.chunk("s", new, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer(new)
    record = b.record("s")
    assert record.num_computed == 8 + len(new) - 4  # the old prompt was not finished first
    assert record.num_invalidated == record.num_recomputed == 2  # of the block in which the LCP ends


def test_an_update_keeps_the_kv_up_to_the_common_prefix_and_nothing_past_it(bench: Make) -> None:
    b = bench(has_prefix_cache=False)
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", [*TOKENS[:21], 500, 501, 502])
    assert b.scheduler.requests["s"].num_computed_tokens == 21
    assert b.scheduler.plugin.kv_memory.num_blocks(b.scheduler.requests["s"]) == 6


def test_a_full_block_that_others_may_find_is_not_written_again(bench: Make) -> None:
    b = bench(has_prefix_cache=True)
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", [*TOKENS[:21], 500, 501, 502])
    assert b.scheduler.requests["s"].num_computed_tokens == 20


@pytest.mark.parametrize(
    ("name", "first", "last", "kept"),
    [
        ("an empty final append", TOKENS, TOKENS, 39),
        ("an identical final update", TOKENS, TOKENS, 0),
        ("a shorter prompt", TOKENS, TOKENS[:7], 0),
        ("a shorter prompt, to the edge of a block", TOKENS, TOKENS[:8], 7),
        ("an update that shares nothing", TOKENS, [900, 901, 902], 0),
        ("one token", [1], [1], 0),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_every_last_chunk_is_answered(
    bench: Make, name: str, first: list[int], last: list[int], kept: int, is_async: bool, num_steps: int
) -> None:
    b = bench(is_async=is_async)
    b.chunk("s", first)
    for _ in range(num_steps):
        if b.engine.has_work:
            b.step()
    b.chunk("s", last[kept:], kept=kept, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer(last)
    assert b.num_finishes("s") == 2


@pytest.mark.parametrize(("num_tokens", "max_tokens", "max_model_len"), [(20, 1, 200), (18, 3, 200), (19, 100, 21)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_whose_last_token_is_being_sampled_needs_no_more_memory(
    bench: Make, num_tokens: int, max_tokens: int, max_model_len: int, is_stream: bool
) -> None:
    num_answered = min(max_tokens, max_model_len - num_tokens)
    assert num_tokens + num_answered - 1 == 20, "the KV of both fits exactly"
    b = bench(
        is_async=True,
        num_blocks=2 * 5,
        max_num_batched_tokens=100,
        max_model_len=max_model_len,
        has_prefix_cache=False,
    )
    prompts = {name: list(range(first, first + num_tokens)) for name, first in (("a", 0), ("b", 100))}
    for name, tokens in prompts.items():
        if is_stream:
            b.chunk(name, tokens[:10])
            b.chunk(name, tokens[10:], kept=10, is_complete=True, max_tokens=max_tokens)
        else:
            b.plain(name, num_tokens, first=tokens[0], max_tokens=max_tokens)
    b.run()
    for name, tokens in prompts.items():
        assert b.record(name).preemptions == ()
        assert b.tokens(name) == b.fresh_answer(tokens, num_answered)


def test_a_waiting_request_evicts_none_for_memory_that_the_step_in_flight_frees(bench: Make) -> None:
    b = bench(is_async=True, num_blocks=10, max_num_batched_tokens=100, has_prefix_cache=False)
    b.chunk("idle", list(range(500, 513)))
    b.run()
    b.plain("a", 20, max_tokens=1)
    b.plain("b", 28, first=100, max_tokens=1)  # fits beside the idle one when the first has ended
    b.run()
    assert b.record("b").preemptions == b.record("a").preemptions == ()
    b.chunk("idle", [600], kept=13, is_complete=True)
    b.run()
    assert b.record("idle").preemptions == ()


@pytest.mark.parametrize(("can_partial_evict", "num_idle"), [(True, 20), (False, 12)])
def test_many_more_idle_streams_than_slots_stall_no_request(
    bench: Make, can_partial_evict: bool, num_idle: int
) -> None:
    b = bench(num_blocks=60, max_num_seqs=2, streamrag={"can_partial_evict": can_partial_evict})
    for i in range(20):
        b.chunk(f"s{i}", [i * 50 + t for t in range(20)])
    b.run()  # which ends: those that wait for memory do not keep the engine awake
    assert len(b.scheduler.plugin.queues.idle) == num_idle
    b.plain("p", 100, first=5_000)
    for i in range(20):
        b.chunk(f"s{i}", [7], kept=20, is_complete=True)
    b.run()
    assert all(len(b.tokens(f"s{i}")) == 2 for i in range(20))
    assert len(b.tokens("p")) == 2


def test_idle_streams_are_the_first_victims(bench: Make) -> None:
    b = bench(num_blocks=50)
    b.chunk("idle", TOKENS)
    b.run()
    b.plain("busy", 150, first=1_000, max_tokens=20)
    b.plain("late", 20, first=2_000)
    b.run()
    assert b.scheduler.plugin.queues.idle["idle"].log.preemptions[0].num_tokens_lost == len(TOKENS) - 1
    assert len(b.tokens("busy")) == 20


def test_an_engine_with_idle_streams_only_sleeps(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    assert not b.engine.has_work
    assert b.scheduler.has_requests() is False
    b.chunk("s", TOKENS, is_complete=True)
    assert b.engine.has_work


@pytest.mark.parametrize("num_tokens", [200, 250])
def test_outgrowing_the_model_fails_that_request_alone(bench: Make, num_tokens: int) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.plain("p", 30)
    b.step()
    b.chunk("s", list(range(num_tokens)))
    b.run()
    failed = [o for o in b.outputs if o.finish_reason == FinishReason.ERROR]
    assert [o.request_id for o in failed] == ["s"]
    assert "does not fit the model's length of 200" in failed[0].kv_transfer_params["streamrag"]["error"]
    assert len(b.tokens("p")) == 2


def test_a_stream_may_be_aborted_at_any_step(bench: Make) -> None:
    for num_steps in range(8):
        b = bench(is_async=num_steps % 2 == 1)
        b.chunk("s", TOKENS)
        for _ in range(num_steps):
            b.engine.step()
        b.engine.abort("s")
        b.chunk("s", [1], kept=40, is_complete=True)  # comes too late
        b.check_empty()


def test_output_for_an_aborted_request_is_not_sent_to_the_next_of_its_id(bench: Make) -> None:
    b = bench(max_num_batched_tokens=8)
    b.chunk("s", TOKENS)
    b.step()
    b.chunk("s", [1], kept=40)  # by which the first is acknowledged, with the output of the next step
    b.engine.abort("s")
    b.plain("s", 20)
    b.run()
    assert b.tokens("s") == b.fresh_answer(list(range(20)))
    assert b.num_finishes("s") == 1


def test_a_stream_that_is_refused_at_once_is_recorded_as_a_stream(bench: Make) -> None:
    b = bench()
    b.chunk("s", list(range(200)))
    b.run()
    assert b.record("s").is_stream


def test_ending_the_input_without_a_last_chunk_frees_the_stream(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.step()
    b.scheduler.plugin.intake.end_input("s")
    b.check_empty()
    assert b.num_finishes("s") == 1


def test_complete_prompts_go_before_partial_ones_under_fcfs(bench: Make) -> None:
    b = bench(streamrag={"policy": "fcfs", "num_partial_tokens": None})
    b.chunk("partial", list(range(100)))
    b.step()
    b.plain("complete", 30, first=500)
    b.step()
    b.step()
    assert b.scheduler.requests["partial"].num_computed_tokens == 16 + 2
    b.step()
    assert len(b.tokens("complete")) == 2


def test_a_running_request_does_not_take_the_tokens_of_a_more_urgent_one(bench: Make) -> None:
    b = bench(streamrag={"policy": "fcfs", "num_partial_tokens": None})
    b.chunk("partial", list(range(100)))
    b.step()
    b.plain("complete", 10, first=500)
    b.step()
    assert b.scheduler.requests["partial"].num_computed_tokens == 16 + 6
    assert len(b.tokens("complete")) == 1


def test_a_lean_step_leaves_partial_prompts_out_beside_a_complete_one(bench: Make) -> None:
    b = bench(streamrag={"policy": "fcfs"})
    b.chunk("partial", list(range(100)))
    b.step()
    b.plain("complete", 10, first=500)
    b.step()
    assert b.scheduler.requests["partial"].num_computed_tokens == 16
    assert len(b.tokens("complete")) == 1
    b.run()
    assert "partial" in b.scheduler.plugin.queues.idle


def test_a_partial_prompt_that_is_alone_takes_short_steps_too_because_its_next_chunk_waits_for_them(
    bench: Make,
) -> None:
    b = bench(max_num_batched_tokens=512, num_blocks=400, max_model_len=1_000)
    b.chunk("partial", list(range(400)))
    b.step()
    assert b.scheduler.requests["partial"].num_computed_tokens == 128  # before any step was measured, and after
    b.chunk("partial", list(range(500, 600)), is_complete=True)
    b.step()
    assert b.tokens("partial") == b.fresh_answer(list(range(500, 600)))[:1]


def test_a_prompt_whose_source_soon_replaces_it_takes_the_shortest_steps(bench: Make) -> None:
    b = bench(max_num_batched_tokens=512, num_blocks=400, max_model_len=1_000)
    b.plain("measured", 300)  # a second a step
    b.run()
    b.scheduler.plugin.estimates.forecast.observe("", gap_s=0.02, kept_share=0.5)
    b.chunk("partial", list(range(400, 800)))
    b.step()
    assert b.scheduler.requests["partial"].num_computed_tokens == 39  # sqrt(2 x 64 tokens x 0.04 s x 300 tokens / s)


def test_the_head_of_a_prompt_is_not_held_for_one_that_its_source_replaces(bench: Make) -> None:
    b = bench(max_num_batched_tokens=512, num_blocks=400, max_model_len=1_000)
    b.plain("measured", 300)  # a second a step
    b.run()
    b.scheduler.plugin.estimates.forecast.observe("search", gap_s=0.02, kept_share=0.5)
    b.chunk("query", list(range(400, 800)))  # its head, which is of no source
    b.step()
    assert b.scheduler.requests["query"].num_computed_tokens == 128
    b.chunk("query", list(range(800, 900)), kept=400, source_name="search")
    b.step()
    assert b.scheduler.requests["query"].num_computed_tokens == 128 + 34  # the speed is that of both steps


def test_a_source_is_not_known_by_the_head_that_its_first_chunk_follows(bench: Make) -> None:
    b = bench()
    forecast = b.scheduler.plugin.estimates.forecast
    b.chunk("query", list(range(20)))
    b.engine.now_s += 5.0
    b.chunk("query", list(range(100, 140)), kept=20, source_name="search")
    b.run()
    assert not forecast._habits, "neither how soon it found something, nor that this left the head as it was"
    b.chunk("query", list(range(200, 240)), kept=20, source_name="search")
    assert forecast.replaced_every_s("search") < 10.0


def long_steps_seldom() -> StepCostEstimator:
    """Return sizes that say a step of 256 tokens is best."""
    sizes = StepCostEstimator()
    sizes.at = lambda now_s: StepCosts(overhead=1.0, arrivals_per_token=1.0)  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("is_async", [True, False])
def test_a_prompt_that_starts_computes_no_more_than_planned(bench: Make, is_async: bool) -> None:
    b = bench(max_num_batched_tokens=2_000, num_blocks=1_000, max_model_len=4_000, is_async=is_async)
    b.scheduler.plugin.estimates.step_costs = long_steps_seldom()
    b.plain("long", 1_500)
    b.step()
    assert b.scheduler.requests["long"].num_computed_tokens == 250  # a sixth; steps of 256 tokens are best
    b.run()
    at_once = bench(max_num_batched_tokens=2_000, num_blocks=1_000, max_model_len=4_000, is_async=is_async)
    at_once.plain("long", 1_500)
    at_once.run()
    assert b.tokens("long") == at_once.tokens("long")
    assert len(b.tokens("long")) == 2


def test_a_long_prompt_that_needs_the_memory_of_an_idle_stream_gets_it_without_a_reserve_for_all_of_it(
    bench: Make,
) -> None:
    b = bench(max_num_batched_tokens=2_000, num_blocks=500, max_model_len=2_000, must_fit_whole=False)
    b.scheduler.plugin.estimates.step_costs = long_steps_seldom()
    b.chunk("idle", list(range(3_000, 3_200)))
    b.run()
    b.plain("long", 1_900)
    for _ in range(20):
        b.step()
    assert len(b.tokens("long")) == 2


@pytest.mark.parametrize(("first_token", "num_computed"), [(0, 16), (100, 8)])
def test_prompts_of_a_source_that_replaces_are_no_backlog(bench: Make, first_token: int, num_computed: int) -> None:
    b = bench(num_blocks=400, streamrag={"num_partial_tokens": 8})
    b.chunk("appended or replaced", list(range(100)))
    b.chunk("appended or replaced", list(range(first_token, 120)))
    for i in range(4):
        b.chunk(f"of the same source {i}", list(range(500 * i, 500 * i + 150)))
    b.step()
    assert sum(r.num_computed_tokens for r in b.scheduler.requests.values()) == num_computed


@pytest.mark.parametrize(("late_binding", "num_steps"), [(True, 2), (False, 3)])
def test_a_prompt_that_becomes_complete_waits_for_one_step_of_partial_prompts_at_most(
    bench: Make, late_binding: bool, num_steps: int
) -> None:
    b = bench(is_async=True, streamrag={"late_binding": late_binding})
    b.chunk("partial", list(range(100)))
    b.chunk("complete soon", list(range(500, 510)))
    b.engine.launch()
    b.chunk("complete soon", [1, 2], kept=10, is_complete=True)
    for _step in range(1, 10):
        b.outputs += b.engine.collect()
        b.engine.launch()
        if b.tokens("complete soon"):
            break
    assert b.engine.now_s == num_steps
    assert b.tokens("complete soon")[:1] == b.fresh_answer([*range(500, 510), 1, 2])[:1]


def test_the_length_of_steps_follows_from_steps_and_from_each_prompt_that_becomes_complete(bench: Make) -> None:
    b = bench()
    complete: list[float] = []
    steps: list[tuple[int, float, float]] = []
    b.scheduler.plugin.estimates.step_costs.observe_complete = complete.append
    b.scheduler.plugin.estimates.step_costs.observe_step = lambda *of_step: steps.append(of_step)
    b.plain("plain", 10)
    b.chunk("s", list(range(100, 120)))
    b.step()
    assert complete == [0.0]
    b.chunk("s", [1, 2], kept=20, is_complete=True)
    b.run()
    assert complete == [0.0, 1.0]
    assert sum(num_tokens for num_tokens, _, _ in steps) >= 32
    assert all(duration_s == 1.0 for _, _, duration_s in steps)
    # Of 10 and of 22 tokens each attends to all before it; those sampled to all of the prompt.
    assert sum(num_pairs for _, num_pairs, _ in steps) >= 10**2 / 2 + 22**2 / 2


def test_the_policy_named_in_the_configuration_is_used(bench: Make) -> None:
    b = bench(streamrag={"policy": "srpf(0)"})
    b.plain("long", 100)
    b.plain("short", 10, first=500)
    b.step()
    assert len(b.tokens("short")) == 1


def test_vllms_own_sessions_are_refused(bench: Make) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    b = bench()
    b.scheduler.add_request(Request("x", [1, 2], SamplingParams(max_tokens=1), None, resumable=True))
    b.run()
    assert b.outputs[0].finish_reason == FinishReason.ERROR
    assert "own scheduler" in b.outputs[0].kv_transfer_params["streamrag"]["error"]


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_goes_on_where_it_was(bench: Make, state: PauseState) -> None:
    b = bench(num_blocks=50)
    b.chunk("s", TOKENS)
    b.plain("p", 100, first=500)
    b.step()
    b.scheduler.set_pause_state(state)
    b.chunk("s", TOKENS[:30] + TOKENS, is_complete=True)
    for _ in range(20):
        if b.engine.has_work:
            b.step()
    assert not b.engine.has_work
    b.scheduler.set_pause_state(PauseState.UNPAUSED)
    b.run()
    assert b.tokens("s") == b.fresh_answer(TOKENS[:30] + TOKENS)
    assert b.tokens("p") == b.fresh_answer(list(range(500, 600)))


SHAPE = EngineShape(num_blocks=10, block_size=4, max_model_len=40)


def test_a_supported_engine_passes() -> None:
    check_supported(vllm_config(SHAPE), kv_cache_config(SHAPE))


@pytest.mark.parametrize(
    ("part", "field", "value", "name"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("scheduler_config", "policy", "priority", "vLLM's priority scheduling"),
        ("scheduler_config", "enable_chunked_prefill", False, "prefill without chunks"),
        ("scheduler_config", "prefill_schedule_interval", 2, "an interval between prefill steps"),
        ("aux_output_config", "enable_return_routed_experts", True, "auxiliary outputs"),
    ],
)
def test_an_unsupported_engine_is_refused_by_name(part: str, field: str, value: Any, name: str) -> None:
    import copy

    config = vllm_config(SHAPE)
    changed = copy.copy(getattr(config, part))
    object.__setattr__(changed, field, value)
    object.__setattr__(config, part, changed)
    assert any(check.startswith(name) for check in CHECKS)
    with pytest.raises(ConfigurationError, match=name):
        check_supported(config, kv_cache_config(SHAPE))


def test_memory_for_blocks_of_hisparse_is_refused_by_name() -> None:
    config = replace(kv_cache_config(SHAPE), hisparse_host_num_blocks=8)
    with pytest.raises(ConfigurationError, match="HiSparse"):
        check_supported(vllm_config(SHAPE), config)


def test_prefix_replay_with_a_connector_of_others_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config, connected = vllm_config(SHAPE), vllm_config(SHAPE)
    connected.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer")
    check_supported(connected, kv_cache_config(SHAPE))
    monkeypatch.setattr(FullAttentionSpec, "prefix_replay_tokens", 4)
    check_supported(config, kv_cache_config(SHAPE))
    with pytest.raises(ConfigurationError, match="prefix replay together with a KV connector other than ours"):
        check_supported(connected, kv_cache_config(SHAPE))


def test_an_unknown_option_is_refused(bench: Make) -> None:
    with pytest.raises(ConfigurationError, match="polcy"):
        bench(streamrag={"polcy": "fcfs"})
