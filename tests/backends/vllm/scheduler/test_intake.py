"""What comes in at the scheduler's door, and should not have been sent. Whoever sent it fails, and nobody else."""

from collections.abc import Callable
from typing import Any

import pytest
from test_chunk_wire import MALFORMED
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from streamrag.backends.vllm.chunk_wire import KEY, EndOfInput, PromptMessage
from streamrag.backends.vllm.scheduler.records import NUM_GONE
from tests.engine.sizes import container_sizes, what_has_grown

Make = Callable[..., Any]
TOKENS = list(range(40))
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def send(b: Any, name: str, extra_args: Any, *, resumable: bool, tokens: list[int] = TOKENS, **more: Any) -> None:
    params = GREEDY.clone()
    params.extra_args = extra_args  # past the checks of vLLM's client, which does not look into it but for huge numbers
    at_s, hasher = b.engine.now_s, b.engine._hasher
    request = Request(name, tokens, params, None, arrival_time=at_s, block_hasher=hasher, resumable=resumable, **more)
    b.scheduler.add_request(request)


def error(b: Any, name: str) -> str:
    """Why the request has failed, which is the last that is said of it."""
    (output,) = [o for o in b.outputs if o.request_id == name and o.finish_reason == FinishReason.ERROR]
    assert b.record(name).outcome == "failed"
    return str(output.kv_transfer_params["streamrag"]["error"])


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("resumable", [False, True])
def test_malformed_extra_args_fail_their_request_alone(bench: Make, fields: Any, resumable: bool) -> None:
    b = bench(streamrag={"eviction": "swap", "num_host_blocks": 10})
    at_start = container_sizes(b.scheduler)
    b.chunk("s", TOKENS)
    b.plain("p", 30, first=500)
    b.step()
    send(b, "bad", {KEY: fields}, resumable=resumable)
    b.run()
    assert "extra_args" in error(b, "bad")
    b.chunk("s", [7], kept=40, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer([*TOKENS, 7])
    assert b.tokens("p") == b.fresh_answer(list(range(500, 530)))
    assert what_has_grown(b.scheduler, at_start) == {}


def test_a_malformed_chunk_fails_its_stream(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    send(b, "s", {KEY: 5}, resumable=True)
    b.check_empty()
    assert "extra_args" in error(b, "s")


@pytest.mark.parametrize("value", [5, [1], "do_remote_prefill"])
@pytest.mark.parametrize("eviction", ["recompute", "swap"])
def test_kv_transfer_params_that_are_no_mapping_fail_their_request_alone(
    bench: Make, value: Any, eviction: str
) -> None:
    b = bench(streamrag={"eviction": eviction, "num_host_blocks": 10})
    b.plain("p", 30, first=500)
    send(b, "bad", {"kv_transfer_params": value}, resumable=False)
    send(b, "good", {"kv_transfer_params": {"do_remote_prefill": True}}, resumable=False)
    b.run()
    assert "kv_transfer_params" in error(b, "bad")
    assert b.tokens("good") == b.fresh_answer(TOKENS)
    assert b.tokens("p") == b.fresh_answer(list(range(500, 530)))


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_chunk_that_comes_as_a_plain_request_is_refused(bench: Make, is_complete: bool) -> None:
    b = bench()
    send(b, "p", PromptMessage(0, 0, is_complete).extra_args(), resumable=False)
    b.check_empty()
    assert "streamed inputs" in error(b, "p")


@pytest.mark.parametrize(
    ("index", "why"),
    [(0, "came instead of message 2"), (1, "came instead of"), (3, "came instead of"), (2**70, "came")],
)
@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_a_gap_or_a_repetition_fails_its_stream_alone(
    bench: Make, index: int, why: str, is_complete: bool, num_steps: int
) -> None:
    b = bench(is_async=True)
    b.chunk("other", [*range(500, 540)])
    b.chunk("s", TOKENS)
    b.chunk("s", [7], kept=40)
    for _ in range(num_steps):
        b.step() if b.engine.has_work else None
    b.engine.add("s", [8], GREEDY, PromptMessage(index, 41, is_complete))
    b.chunk("s", [9], kept=42, is_complete=True)  # comes too late
    b.run()
    assert why in error(b, "s")
    assert b.tokens("s") == []
    b.chunk("other", [7], kept=40, is_complete=True)
    b.run()
    assert b.tokens("other") == b.fresh_answer([*range(500, 540), 7])


@pytest.mark.parametrize("num_kept", [41, 2**40])
def test_a_chunk_that_keeps_more_than_there_is_fails_its_stream(bench: Make, num_kept: int) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", [7], kept=num_kept, is_complete=True)
    b.check_empty()
    assert f"keeps {num_kept} tokens of a prompt of 40" in error(b, "s")


def test_a_first_chunk_that_keeps_something_is_refused(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS, kept=5)
    b.check_empty()
    assert "no previous prompt" in error(b, "s")
    assert b.record("s").is_stream


def test_a_chunk_after_the_last_one_fails_its_stream(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS, is_complete=True, max_tokens=20)
    b.step()
    b.chunk("s", [7], kept=40)
    b.check_empty()
    assert "after the last one" in error(b, "s")


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("is_complete", [False, True])
def test_a_chunk_without_a_stream_that_comes_as_a_plain_request_is_refused(
    bench: Make, index: int, is_complete: bool
) -> None:
    b = bench()
    for name in ("p", "p again"):
        send(b, name, PromptMessage(index, 2, is_complete).extra_args(), resumable=False)
        b.check_empty()
        assert "streamed inputs" in error(b, name)


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_stream_whose_first_chunk_is_lost_fails_once(bench: Make, is_complete: bool) -> None:
    b = bench()
    at_start = container_sizes(b.scheduler)
    for index in (1, 2, 3):
        send(b, "s", PromptMessage(index, 40, is_complete and index == 3).extra_args(), resumable=True)
        b.check_empty()
    assert "chunk 1 came, but no chunk 0" in error(b, "s")
    assert b.num_finishes("s") == 1
    assert b.record("s").is_stream
    assert what_has_grown(b.scheduler, at_start) == {}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_late_chunks_of_a_stream_do_not_reach_the_next_owner_of_its_id(
    bench: Make, is_stream: bool, is_aborted: bool
) -> None:
    b = bench()
    b.chunk("again", TOKENS)
    b.step()
    if is_aborted:
        b.engine.abort("again")
    else:
        send(b, "again", {KEY: 5}, resumable=True)
    b.run()
    b.outputs.clear()
    late = PromptMessage(1, 40, False).extra_args()
    send(b, "again", late, resumable=True)
    b.run()
    assert b.outputs == []
    send(b, "again", PromptMessage(0, 0, True).extra_args() if is_stream else None, resumable=is_stream)
    if not is_stream:
        send(b, "again", late, resumable=True)
    b.run()
    assert b.tokens("again") == b.fresh_answer(TOKENS)


def test_no_more_is_remembered_of_those_that_failed_than_the_last_thousand(bench: Make) -> None:
    b = bench()
    for i in range(NUM_GONE + 5):
        send(b, f"s{i}", PromptMessage(1, 0, False).extra_args(), resumable=True)
    assert len(b.scheduler.plugin.records.gone_ids) == NUM_GONE


@pytest.mark.parametrize("resumable", [False, True])
def test_an_empty_prompt_is_refused(bench: Make, resumable: bool) -> None:
    b = bench()
    send(b, "e", PromptMessage(0, 0, False).extra_args() if resumable else None, resumable=resumable, tokens=[])
    b.check_empty()
    assert "at least one token" in error(b, "e")


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("num_steps", [0, 20])
def test_a_chunk_that_leaves_an_empty_prompt_fails_its_stream(bench: Make, is_complete: bool, num_steps: int) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    for _ in range(num_steps):
        b.step() if b.engine.has_work else None
    b.chunk("s", [], is_complete=is_complete)
    b.check_empty()
    assert "at least one token" in error(b, "s")


def test_a_chunk_may_do_nothing_but_shorten_its_prompt(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", [], kept=5, is_complete=True)
    b.check_empty()
    assert b.tokens("s") == b.fresh_answer(TOKENS[:5])


@pytest.mark.parametrize(
    "other", [{"lora_request": LoRARequest("b", 2, "/b")}, {"lora_request": None}, {"cache_salt": "b"}]
)
@pytest.mark.parametrize("num_kept", [0, 4])
def test_a_chunk_with_another_adapter_or_salt_than_its_stream_fails_it(
    bench: Make, other: dict[str, Any], num_kept: int
) -> None:
    b = bench()
    ours = {"lora_request": LoRARequest("a", 1, "/a"), "cache_salt": "a"}
    send(b, "good", PromptMessage(0, 0, False).extra_args(), resumable=True, **ours)
    send(b, "bad", PromptMessage(0, 0, False).extra_args(), resumable=True, **ours)
    b.run()
    send(b, "bad", PromptMessage(1, num_kept, True).extra_args(), resumable=True, **{**ours, **other})
    same = {"lora_request": LoRARequest("a", 1, "/a"), "cache_salt": "a"}
    send(b, "good", PromptMessage(1, num_kept, True).extra_args(), resumable=True, **same)
    b.check_empty()
    assert "another LoRA adapter, or another cache salt" in error(b, "bad")
    assert b.tokens("good") == b.fresh_answer(TOKENS[:num_kept] + TOKENS)


def test_kv_is_shared_only_by_requests_of_the_same_adapter_and_salt(bench: Make) -> None:
    b = bench(num_blocks=400)
    keys: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    keys += [{"lora_request": LoRARequest(name, number, f"/{name}")} for number, name in enumerate("ab", 1)]
    keys.append({"lora_request": LoRARequest("a", 1, "/a"), "cache_salt": "a"})
    for turn in range(2):
        for number, key in enumerate(keys):
            name = f"{turn}-{number}"
            send(b, name, PromptMessage(0, 0, False).extra_args(), resumable=True, **key)
            b.run()
            send(b, name, PromptMessage(1, len(TOKENS), True).extra_args(), resumable=True, **key)
            b.run()
            assert (b.record(name).num_from_cache > 0) == (turn == 1), name


def test_the_end_of_input_fails_partial_prompts_and_nothing_else(bench: Make) -> None:
    b = bench()
    b.chunk("partial", TOKENS)
    b.chunk("complete", TOKENS, is_complete=True)
    b.plain("plain", 30)
    b.step()
    for name in ("partial", "complete", "plain", "unknown"):
        send(b, name, EndOfInput().extra_args(), resumable=False, tokens=[0])
    b.run()
    assert b.tokens("complete") == b.fresh_answer(TOKENS)
    assert b.tokens("plain") == b.fresh_answer(list(range(30)))
    assert "ended after chunk 0, which is not the last one" in error(b, "partial")
    assert b.num_finishes("partial") == 1
    assert b.num_finishes("unknown") == 0


def test_a_plain_request_cannot_take_the_id_of_one_that_lives(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    b.plain("s", 30)
    b.run()
    assert "already" in str(b.outputs[-1].kv_transfer_params)
    b.chunk("s", [7], kept=40, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer([*TOKENS, 7])


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_id_may_be_used_again_while_steps_of_its_last_owner_are_in_flight(
    bench: Make, num_steps: int, is_stream: bool
) -> None:
    b = bench(is_async=True, has_prefix_cache=False)
    b.plain("again", 40, max_tokens=20)
    for _ in range(num_steps):
        b.step()
    b.engine.launch()
    b.engine.abort("again")
    b.outputs.clear()
    if is_stream:
        b.chunk("again", [*range(500, 530)], is_complete=True)
    else:
        b.plain("again", 30, first=500)
    b.run()
    assert b.tokens("again") == b.fresh_answer([*range(500, 530)])


def test_the_gap_between_chunks_is_that_of_their_arrivals_and_not_of_the_steps_that_they_waited_for(
    bench: Make,
) -> None:
    b = bench()
    b.chunk("s", list(range(40)))
    arrived_s = b.engine.now_s
    b.step()  # a second, during which the next chunk arrives
    message = PromptMessage(1, 0, is_complete=False, arrival_s=arrived_s + 0.02)
    b.engine.add("s", list(range(100, 140)), SamplingParams(max_tokens=2, temperature=0.0), message)
    assert b.scheduler.plugin.estimates.forecast.replaced_every_s("") == pytest.approx(0.02)


def test_a_chunk_that_claims_to_have_arrived_before_the_one_before_it_ends_nothing(bench: Make) -> None:
    b = bench(max_num_batched_tokens=128)
    b.plain("measured", 100)
    b.run()
    b.chunk("s", list(range(40)))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    b.engine.add("s", list(range(100, 140)), params, PromptMessage(1, 0, is_complete=False, arrival_s=0.0))
    b.engine.add("s", list(range(200, 240)), params, PromptMessage(2, 0, is_complete=True, arrival_s=0.0))
    b.run()
    assert b.tokens("s") == b.fresh_answer(list(range(200, 240)))
