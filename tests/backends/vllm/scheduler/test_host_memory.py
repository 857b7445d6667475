"""What host memory holds of whom, and for how long, inside vLLM's scheduler. The fuzz mixes the situations."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.sampling_params import SamplingParams

from tests.engine.oracle import UNKNOWN
from tests.engine.sizes import container_sizes, what_has_grown

Make = Callable[..., Any]
SWAP = {"eviction": "swap", "num_host_blocks": 200}


def load_new_weights(b: Any, **how: bool) -> None:
    """All KV that there is, anywhere, is of the old ones from now on: whoever reads it is told."""
    assert b.scheduler.reset_prefix_cache(reset_running_requests=True, **how)
    for slots in (*b.runner.slots, *b.runner.host.values()):
        slots[:] = [UNKNOWN] * len(slots)


def crowd(b: Any, num_streams: int = 6) -> dict[str, list[int]]:
    """More streams than there is memory for, one after the other: the idle ones lose theirs."""
    prompts = {f"s{i}": [100 * i + t for t in range(60)] for i in range(num_streams)}
    for name, prompt in prompts.items():
        b.chunk(name, prompt)
        b.run()
        b.plain(f"after {name}", 90, first=1_000 + 100 * len(b.outputs))
        b.run()
    return prompts


@pytest.mark.parametrize("reset_connector", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8])
def test_no_kv_of_old_weights_is_saved_or_loaded(
    bench: Make, reset_connector: bool, is_async: bool, num_steps: int
) -> None:
    b = bench(num_blocks=52, is_async=is_async, streamrag=SWAP)
    prompts = crowd(b)
    assert b.scheduler.plugin.host_memory.pool.num_used > 0
    answered = list(prompts)[:4]
    for name in answered:
        b.chunk(name, [7], kept=60, is_complete=True, max_tokens=20)
    for _ in range(num_steps):
        b.step()
    load_new_weights(b, reset_connector=reset_connector)
    b.run()
    for name in answered:
        assert b.tokens(name) == b.fresh_answer([*prompts[name], 7], max_tokens=20)
    assert any(r.preemptions for r in map(b.record, answered))


def test_blocks_being_saved_during_a_reset_cannot_be_loaded_after_it(bench: Make) -> None:
    b = bench(num_blocks=52, is_async=True, streamrag=SWAP)
    prompts = crowd(b)
    pool = b.scheduler.plugin.host_memory.pool
    b.plain("busy", 150, first=5_000)
    b.engine.launch()
    while not pool._saving:
        b.outputs += b.engine.collect()
        b.engine.launch()
    load_new_weights(b)
    assert pool.num_used == len(pool._saving) > 0  # until their copies have ended
    b.run()
    assert not pool._saving
    for name in ("s0", "s1", "s2"):
        b.chunk(name, [7], kept=60, is_complete=True)
    b.run()
    for name in ("s0", "s1", "s2"):
        assert b.tokens(name) == b.fresh_answer([*prompts[name], 7])


def test_idle_streams_write_through_again_after_a_reset(bench: Make) -> None:
    b = bench(streamrag=SWAP)
    b.chunk("s", list(range(40)))
    b.run()
    memory = b.scheduler.plugin.host_memory
    memory.choice.num_to_write_through = lambda share_free: 100
    b.chunk("s", [7], kept=40)
    b.run()
    assert memory.num_saved == 9
    load_new_weights(b)
    for num_kept in (41, 42):  # what the first computes is written through beside the second
        b.chunk("s", [8], kept=num_kept)
        b.run()
    assert memory.num_saved == 9 + 10


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_may_have_the_id_of_one_that_has_lost_kv(bench: Make, is_async: bool) -> None:
    b = bench(num_blocks=52, is_async=is_async, streamrag=SWAP)
    prompt = list(range(60))
    b.chunk("s", prompt)
    b.run()
    b.scheduler.plugin.evictions.evict(b.scheduler.requests["s"])
    b.engine.abort("s")
    b.run()
    # As long a prompt with the same tokens, which others have overwritten by the time it would start.
    b.plain("busy", 150, first=1_000, max_tokens=30)
    b.engine.add("s", prompt, SamplingParams(max_tokens=2, temperature=0.0))
    b.run()
    assert b.tokens("s") == b.fresh_answer(prompt)


@pytest.mark.parametrize("eviction", ["recompute", "swap"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ending", ["answered", "aborted", "reset", "mixed"])
def test_requests_that_are_gone_leave_nothing_in_the_scheduler(
    bench: Make, eviction: str, is_async: bool, ending: str
) -> None:
    b = bench(num_blocks=52, is_async=is_async, streamrag={**SWAP, "eviction": eviction})
    at_start = container_sizes(b.scheduler)
    names = list(crowd(b))
    for i, name in enumerate(names):
        if ending == "answered" or (ending == "mixed" and i % 2):
            b.chunk(name, [7], kept=60, is_complete=True, max_tokens=20)
    for _ in range(3):
        if b.engine.has_work:
            b.step()
    if ending == "reset":
        b.scheduler.reset_prefix_cache(reset_running_requests=True)
    if ending != "answered":
        for name in names:
            b.engine.abort(name)
    b.run()
    assert not b.scheduler.requests
    assert what_has_grown(b.scheduler, at_start) == {}


def test_models_whose_blocks_cannot_be_copied_are_served_with_host_memory_asked_for(bench: Make) -> None:
    b = bench(sliding_window=8, streamrag=SWAP)
    assert b.scheduler.connector is not None
    assert b.scheduler.plugin.host_memory is None
    b.chunk("s", list(range(40)))
    b.plain("p", 30)
    b.run()
    b.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    b.chunk("s", [7], kept=40, is_complete=True)
    b.run()
    assert b.tokens("p") == b.fresh_answer(list(range(30)))
    assert b.tokens("s") == b.fresh_answer([*range(40), 7])


def test_a_failed_load_is_blamed_on_what_its_own_step_loaded(bench: Make) -> None:
    """Two steps are in flight, which load different things into the same block; the load of the first fails."""
    memory = bench(is_async=True, streamrag=SWAP).scheduler.plugin.host_memory
    nothing_else = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]), num_scheduled_tokens={}
    )
    block = SimpleNamespace(block_id=3)
    for key in ("first", "second"):
        memory.pool.on_saved(memory.pool.reserve(key, key), is_valid=True)
        request = SimpleNamespace(
            request_id=key, block_hashes=[key], num_tokens=6, skip_reading_prefix_cache=False, was_evicted=False
        )
        match = memory.look_up(request, 0)
        assert match.num_tokens == 4
        memory._group.req_to_blocks[key] = [block]
        memory.commit(request, match, match.num_tokens)
        assert len(memory.take_copies(nothing_else).loads) == 1
        del memory._group.req_to_blocks[key]
    memory.on_step_end(nothing_else, None, 0.0)
    assert memory.on_failed_loads({3}).blocks == {3}
    assert (memory.pool.num_valid(["first"]), memory.pool.num_valid(["second"])) == (0, 1)


def test_a_block_of_a_failed_load_is_not_saved_for_a_request_that_lost_it_before_the_failure(bench: Make) -> None:
    memory = bench(is_async=True, streamrag=SWAP).scheduler.plugin.host_memory
    step = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]), num_scheduled_tokens={}
    )
    memory.pool.on_saved(memory.pool.reserve("key", "key"), is_valid=True)
    request = Mock(
        request_id="key",
        block_hashes=["key"],
        num_tokens=6,
        num_computed_tokens=4,
        skip_reading_prefix_cache=False,
        was_evicted=False,
        released_blocks=set(),
        is_finished=lambda: False,
    )
    memory._group.req_to_blocks["key"] = [SimpleNamespace(block_id=3)]
    memory.commit(request, memory.look_up(request, 0), 4)
    memory.take_copies(step)
    memory.on_release(request)
    del memory._group.req_to_blocks["key"]
    request.num_computed_tokens = 0
    memory.on_step_end(step, None, 0.0)
    memory.on_failed_loads({3})
    step.scheduled_new_reqs = [SimpleNamespace(req_id="other", block_ids=([3],))]
    assert memory.take_copies(step).saves == []


def test_a_match_in_host_memory_counts_once_and_for_its_own_request(bench: Make) -> None:
    connector = bench(streamrag=SWAP).scheduler.connector
    memory = connector.host_memory
    memory.pool.on_saved(memory.pool.reserve("a", "key"), is_valid=True)
    committed = []
    memory.commit = lambda request, match, num_tokens: committed.append((request.request_id, match is not None))
    a, b = (
        SimpleNamespace(
            request_id=name, block_hashes=["key"], num_tokens=6, skip_reading_prefix_cache=False, was_evicted=True
        )
        for name in "ab"
    )
    assert connector.get_num_new_matched_tokens(a, 0) == (4, False)
    connector.update_state_after_alloc(a, None, 4)
    connector.update_state_after_alloc(a, None, 0)
    connector.get_num_new_matched_tokens(a, 0)
    connector.update_state_after_alloc(b, None, 0)
    assert committed == [("a", True), ("a", False), ("b", False)]


@pytest.mark.parametrize(("num_host_blocks", "num_evicted"), [(200, 8), (10, 0)])
def test_partial_prompts_take_memory_from_each_other_only_if_the_host_holds_it(
    bench: Make, num_host_blocks: int, num_evicted: int
) -> None:
    b = bench(num_blocks=20, streamrag={"eviction": "swap", "num_host_blocks": num_host_blocks})
    prompts = [[100 * i + t for t in range(20)] for i in range(12)]
    for i, prompt in enumerate(prompts):
        b.chunk(f"s{i}", prompt)
        b.run()
    assert sum(bool(b.scheduler.requests[f"s{i}"].log.preemptions) for i in range(12)) == num_evicted
    for i, prompt in enumerate(prompts):
        b.chunk(f"s{i}", [7], kept=20, is_complete=True)
        b.run()
        assert b.tokens(f"s{i}") == b.fresh_answer([*prompt, 7])
