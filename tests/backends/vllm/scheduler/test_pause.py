"""An engine that is paused, as `AsyncLLM.pause_generation` and `sleep` do it: see `EngineCoreProc.pause_scheduler`."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

Make = Callable[..., Any]
TOKENS = list(range(40))
MODES = ["abort", "wait", "keep"]
MOST_STEPS = 200


def pause(b: Any, mode: str, *, clears_cache: bool = True) -> None:
    """Until the engine has no work, which is what vLLM waits for before it says that the pause is complete."""
    if mode == "abort":
        b.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    b.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
    settle(b)
    if clears_cache:
        assert b.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    settle(b)


def settle(b: Any) -> None:
    for _ in range(MOST_STEPS):
        if not b.engine.has_work:
            return
        b.step()
    raise AssertionError("the engine has work for ever")


def idle_stream_and_answered_request(b: Any) -> None:
    b.chunk("idle", TOKENS)
    b.run()
    b.plain("answered", 30, first=500)
    b.run()


def waiting_for_memory(b: Any) -> None:
    b.chunk("idle", [*range(120)])
    b.run()
    b.chunk("stuck", [*range(500, 650)])
    b.run()
    assert "stuck" not in b.scheduler.plugin.queues.idle


def in_mid_prefill(b: Any) -> None:
    b.chunk("idle", TOKENS)
    b.run()
    b.chunk("growing", [*range(500, 600)])
    b.plain("plain", 100, first=700, max_tokens=5)
    b.step()
    b.step()


def queued_acknowledgements(b: Any) -> None:
    b.chunk("idle", TOKENS)
    b.run()
    for _ in range(3):
        b.chunk("hasty", [*range(500, 540)])


SITUATIONS = [idle_stream_and_answered_request, waiting_for_memory, in_mid_prefill, queued_acknowledgements]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clears_cache", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("eviction", ["recompute", "swap"])
def test_a_pause_comes_to_an_end_and_what_it_keeps_goes_on_after_it(
    bench: Make,
    situation: Callable[[Any], None],
    mode: str,
    clears_cache: bool,
    is_async: bool,
    eviction: str,
) -> None:
    b = bench(num_blocks=50, is_async=is_async, streamrag={"eviction": eviction, "num_host_blocks": 100})
    situation(b)
    pause(b, mode, clears_cache=clears_cache)
    kept = set(b.scheduler.requests)
    assert (kept == set()) == (mode == "abort")
    b.plain("new", 30, first=900)  # is queued until then
    settle(b)
    assert b.tokens("new") == []
    b.scheduler.set_pause_state(PauseState.UNPAUSED)
    for name in kept & {"idle", "stuck", "growing", "hasty"}:
        b.chunk(name, [*TOKENS[:20], 7], is_complete=True)
    settle(b)
    assert b.tokens("new") == b.fresh_answer([*range(900, 930)])
    for name in kept & {"idle", "stuck", "growing", "hasty"}:
        assert b.tokens(name) == b.fresh_answer([*TOKENS[:20], 7])
    assert not b.scheduler.requests


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_sees_that_streams_are_aborted_and_chunks_come_during_it(bench: Make, mode: str) -> None:
    b = bench(num_blocks=50)
    idle_stream_and_answered_request(b)
    pause(b, mode)
    b.chunk("late", TOKENS)
    b.chunk("late", [*TOKENS, 7])
    b.chunk("given up", TOKENS)
    settle(b)
    b.engine.abort("given up")
    b.engine.abort("idle")
    settle(b)
    b.scheduler.set_pause_state(PauseState.UNPAUSED)
    b.chunk("late", [8], kept=41, is_complete=True)
    settle(b)
    assert b.tokens("late") == b.fresh_answer([*TOKENS, 7, 8])
    assert b.num_finishes("late") == 3


def test_a_paused_engine_ends_what_runs_and_starts_nothing(bench: Make) -> None:
    b = bench(num_blocks=50)
    in_mid_prefill(b)
    waiting = {r.request_id for r in b.scheduler.waiting}
    b.plain("behind", 10, first=900)
    pause(b, "wait", clears_cache=False)
    assert {r.request_id for r in b.scheduler.waiting} == waiting | {"behind"}
    assert b.scheduler.running == []
