"""The scheduler beside a KV connector that is not ours and may load KV, as LMCache's does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from streamrag.engine.step_size import StepCosts
from tests.engine.oracle import V1OracleRunner

Make = Callable[..., Any]
TOKENS = list(range(40))


class Loader(V1OracleRunner):
    """A runner whose loads end when `loaded` names them, and which knows the KV that was loaded."""

    loaded: frozenset[str] = frozenset()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output, loaded, self.loaded = super().execute(step), set(self.loaded), frozenset()
        return replace(output, kv_connector_output=KVConnectorOutput(finished_recving=loaded)) if loaded else output


class FailingLoads(V1OracleRunner):
    """A runner in which all loads of new requests fail."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        missing: set[int] = set()
        for new in step.scheduled_new_reqs:
            missing.update(new.block_ids[0][: -(-new.num_computed_tokens // self.block_size)])
        self._taint(missing)
        output = super().execute(step)
        return replace(output, kv_connector_output=KVConnectorOutput(invalid_block_ids=missing)) if missing else output


def connected(bench: Make, runner: type[V1OracleRunner] = Loader, **limits: Any) -> Any:
    """Make a bench with a connector that claims to have the KV of all prompts, unless a test replaces its lookup."""
    b = bench(**limits)
    b.connect(runner, kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_load_failure_policy="recompute")
    b.scheduler.connector.update_state_after_alloc = lambda *arguments: None
    return b


def test_failed_loads_are_left_to_vllm(bench: Make) -> None:
    b = connected(bench, FailingLoads)
    assert b.scheduler.plugin.host_memory is None
    b.plain("p", len(TOKENS))
    b.step()
    request = b.scheduler.requests["p"]
    assert (request.status, request.num_computed_tokens) == (RequestStatus.RUNNING, 0)  # ours would have to queue anew
    assert b.tokens("p") == []
    b.run()
    assert b.tokens("p") == b.fresh_answer(TOKENS)
    assert b.record("p").preemptions == ()


def test_the_connector_is_asked_about_all_tokens_of_a_complete_prompt(bench: Make) -> None:
    b = connected(bench)
    asked: list[int] = []

    def look_up(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        asked.append(request.num_tokens)
        return 0, False

    b.scheduler.connector.get_num_new_matched_tokens = look_up
    b.plain("p", len(TOKENS))
    b.run()
    assert set(asked) == {len(TOKENS)}  # more than a step computes
    assert b.tokens("p") == b.fresh_answer(TOKENS)


def test_the_engine_does_not_sleep_while_it_loads(bench: Make) -> None:
    b = connected(bench)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (4, True)
    b.plain("p", len(TOKENS))
    b.step()
    assert b.scheduler.requests["p"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(3):
        assert b.engine.has_work
        b.step()
    b.runner.loaded = frozenset({"p"})
    b.step()
    assert b.scheduler.finished_recving_kv_req_ids == {"p"}
    b.scheduler.requests["p"].num_computed_tokens = 0  # nothing was written: they are computed after all
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.run()
    assert b.tokens("p") == b.fresh_answer(TOKENS)


def test_the_engine_does_not_sleep_while_it_writes_kv_elsewhere(bench: Make) -> None:
    b = connected(bench)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (40, False)
    b.chunk("s", TOKENS)  # waits until it is complete, because all of it would be loaded
    b.run()
    writes = iter([True, False])
    b.scheduler.connector.has_pending_push_work = lambda: next(writes, False)
    assert b.engine.has_work
    assert not b.engine.has_work


@pytest.mark.parametrize("is_async", [False, True])
def test_the_engine_does_not_sleep_while_it_looks_up(bench: Make, is_async: bool) -> None:
    b = connected(bench, is_async=is_async)
    answers = iter([*[(None, False)] * 5])
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: next(answers, (0, False))
    b.plain("p", len(TOKENS))
    b.run()
    assert b.tokens("p") == b.fresh_answer(TOKENS)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_is_looked_up_takes_nothing_from_those_behind_it(bench: Make, is_stream: bool) -> None:
    b = connected(bench, max_num_seqs=2, streamrag={"policy": "fcfs"})
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (
        (None, False) if request.request_id.startswith("slow") else (0, False)
    )
    for i in range(4):
        if is_stream:
            b.chunk(f"slow{i}", [i, *TOKENS], is_complete=i % 2 == 0)
        else:
            b.plain(f"slow{i}", 40, first=100 * i)
    b.plain("ready", 16)
    b.step()
    assert b.scheduler.requests["ready"].num_computed_tokens == 16
    for i in range(4):
        b.engine.abort(f"slow{i}")
    b.run()
    assert b.tokens("ready") == b.fresh_answer(list(range(16)))


def test_a_step_that_is_short_on_purpose_gives_nothing_to_prompts_behind_its_grants(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = connected(bench, streamrag={"policy": "fcfs"})
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.plain("ready", 28)
    b.step()
    b.plain("next", 40, first=100)  # it would delay the first token of the other by more than it saves
    costs = StepCosts(overhead=1, arrivals_per_token=0.0)
    monkeypatch.setattr(b.scheduler.plugin.estimates.step_costs, "at", lambda now_s: costs)
    b.step()
    assert [b.scheduler.requests[name].num_computed_tokens for name in ("ready", "next")] == [28, 0]


def test_a_request_that_is_looked_up_takes_nothing_from_running_ones(bench: Make) -> None:
    b = connected(bench, streamrag={"policy": "lcas"})  # the newest first
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (
        (None, False) if request.request_id == "slow" else (0, False)
    )
    b.plain("long", 60)
    b.step()
    b.plain("slow", 40, first=100)
    b.step()
    b.step()
    assert b.scheduler.requests["long"].num_computed_tokens == 32
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.run()
    assert b.tokens("slow") == b.fresh_answer(list(range(100, 140)))


@contextmanager
def no_memory_for(b: Any, request_id: str) -> Iterator[None]:
    """Within the context, vLLM finds no KV blocks for that request."""
    allocate = b.scheduler.kv_cache_manager.allocate_slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            b.scheduler.kv_cache_manager,
            "allocate_slots",
            lambda request, *rest, **more: (
                None if request.request_id == request_id else allocate(request, *rest, **more)
            ),
        )
        yield


def test_a_load_without_memory_takes_nothing_from_running_ones_and_claims_nothing(bench: Make) -> None:
    b = connected(bench, num_blocks=400, streamrag={"policy": "lcas", "kv_budget": 0.5})  # the newest first
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (
        (36, True) if request.request_id == "load" else (0, False)
    )
    with no_memory_for(b, "load"):
        b.plain("long", 60)
        b.step()
        b.engine.now_s += 1
        b.plain("load", 40, first=100)
        for num_computed in (16, 32, 48):  # first it has the step's tokens, before vLLM finds no memory for it
            b.step()
            assert b.scheduler.requests["long"].num_computed_tokens == num_computed
            assert b.scheduler.requests["load"].num_blocks_claimed is None
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.run()
    assert b.tokens("load") == b.fresh_answer(list(range(100, 140)))


def test_a_loaded_prompt_does_not_wait_behind_a_load_without_memory(bench: Make) -> None:
    b = connected(bench, num_blocks=400, max_num_batched_tokens=64, streamrag={"policy": "lcas"})
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (36, True)
    b.plain("loaded", 40)
    b.step()
    b.runner.loaded = frozenset({"loaded"})
    b.step()
    b.engine.now_s += 1
    b.plain("load", 40, first=100)
    with no_memory_for(b, "load"):
        assert b.scheduler.schedule().num_scheduled_tokens == {"loaded": 4}
    for name in ("loaded", "load"):
        b.engine.abort(name)


def test_loads_between_steps_take_neither_tokens_nor_slots(bench: Make) -> None:
    b = connected(bench, num_blocks=400, max_num_seqs=2, max_num_batched_tokens=32)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (36, True)
    for i in range(32):
        b.plain(f"p{i}", 40, first=100 * i)
    b.step()
    assert len(b.scheduler.kv_holding_waiting) == 32
    for i in range(32):
        b.engine.abort(f"p{i}")
    b.runner.loaded = frozenset(f"p{i}" for i in range(32))


def test_loads_within_a_step_take_none_of_its_tokens(bench: Make) -> None:
    b = connected(bench, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=32)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (36, False)
    for i in range(8):
        b.plain(f"p{i}", 40, first=100 * i)
    scheduled = b.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {f"p{i}": 4 for i in range(8)}
    for i in range(8):
        b.engine.abort(f"p{i}")


@pytest.mark.parametrize(("num_loaded", "is_between"), [(16, True), (40, True), (40, False), (39, False)])
def test_a_partial_prompt_that_would_be_loaded_between_steps_or_whole_waits_until_it_is_complete(
    bench: Make, num_loaded: int, is_between: bool
) -> None:
    b = connected(bench)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (num_loaded, is_between)
    b.chunk("s", TOKENS)
    b.run()
    assert b.scheduler.requests["s"].status == RequestStatus.WAITING
    assert b.num_finishes("s") == 1  # acknowledged, so that its client sends more
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.chunk("s", [900], kept=40, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer([*TOKENS, 900])


def test_blocks_that_a_step_in_flight_may_write_are_evicted_only_after_it(bench: Make) -> None:
    b = connected(
        bench, is_async=True, num_blocks=12, max_num_batched_tokens=100, streamrag={"policy": "fcfs"}, max_num_seqs=4
    )
    assert b.scheduler.defer_block_free
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.plain("a", 22, max_tokens=20)
    b.plain("b", 20, first=100, max_tokens=20)
    deferred: list[int] = []
    preempt = b.scheduler.plugin.evictions.preempt

    def look(request: Any) -> None:
        deferred.append(not b.scheduler._request_blocks_can_be_freed(request))
        preempt(request)

    b.scheduler.plugin.evictions.preempt = look
    b.run()
    assert deferred
    assert not any(deferred)
    assert b.tokens("a") == b.fresh_answer(list(range(22)), 20)
    assert b.tokens("b") == b.fresh_answer(list(range(100, 120)), 20)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_loses_loaded_kv_before_it_ran_is_loaded_and_answered_again(
    bench: Make, is_stream: bool
) -> None:
    b = connected(bench, has_prefix_cache=False)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (8, True)
    if is_stream:
        b.chunk("s", TOKENS, is_complete=True)
    else:
        b.plain("s", len(TOKENS))
    for _ in range(2):
        b.step()
        b.runner.loaded = frozenset({"s"})
        b.step()
        b.scheduler.plugin.queues.take_loaded()
        (request,) = b.scheduler.waiting
        assert b.scheduler._handle_blocked_waiting_request(request)
        assert request.status == RequestStatus.WAITING
        b.scheduler.plugin.evictions.evict(request)
        assert not b.scheduler._inflight_prefills
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.run()
    assert b.tokens("s") == b.fresh_answer(TOKENS)


def test_kv_that_was_not_loaded_is_in_no_cache_when_its_request_is_evicted(bench: Make) -> None:
    b = connected(bench, FailingLoads, has_prefix_cache=True)
    b.plain("p", len(TOKENS))
    b.step()
    b.scheduler.plugin.evictions.evict(b.scheduler.requests["p"])
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (0, False)
    b.run()
    assert b.tokens("p") == b.fresh_answer(TOKENS)


def test_a_prompt_whose_load_failed_is_recorded_as_computed(bench: Make) -> None:
    b = connected(bench, FailingLoads)
    b.plain("p", len(TOKENS))
    b.run()
    assert b.record("p").num_computed == 1 + len(TOKENS)  # the one beside the load, then all


def test_a_partial_prompt_whose_load_failed_is_acknowledged(bench: Make) -> None:
    b = connected(bench, FailingLoads)
    b.scheduler.connector.get_num_new_matched_tokens = lambda request, num: (36 - num, False)
    b.chunk("s", TOKENS)
    b.run()
    assert b.num_finishes("s") == 1
    b.chunk("s", [900], kept=40, is_complete=True)
    b.run()
    assert b.tokens("s") == b.fresh_answer([*TOKENS, 900])
