"""Evicted prompts whose KV host memory holds: they are nearly done, and are ordered so."""

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]
SWAPPING = {"eviction": "swap", "num_host_blocks": 100, "can_partial_evict": True, "policy": "srpf(0)"}


def test_a_stream_with_kv_in_host_memory_counts_as_nearly_done_and_goes_first(bench: Make) -> None:
    b = bench(num_blocks=50, streamrag=SWAPPING)
    b.chunk("s", list(range(100)))
    b.run()
    b.plain("p", 190, first=1_000)  # which takes the KV of the idle stream
    b.run()
    stream = b.scheduler.requests["s"]
    assert (stream.num_computed_tokens, stream.num_kept_tokens) == (0, 99)
    b.chunk("s", [7], kept=100, is_complete=True)
    assert b.scheduler.plugin.kv_memory.cached_view(stream).num_likely_tokens == 2
    b.plain("shorter than the whole", 60, first=5_000)
    b.step()
    b.step()
    assert b.tokens("s"), "it goes first, though its prompt is longer"
    assert not b.tokens("shorter than the whole")
    b.run()
    assert b.tokens("s") == b.fresh_answer([*range(100), 7])


def test_kv_that_an_update_replaces_does_not_count_as_kept(bench: Make) -> None:
    b = bench(num_blocks=50, streamrag=SWAPPING)
    b.chunk("s", list(range(100)))
    b.run()
    b.plain("p", 190, first=1_000)
    b.run()
    b.chunk("s", list(range(500, 540)), kept=60)
    assert b.scheduler.requests["s"].num_kept_tokens == 60


def test_kv_that_host_memory_has_dropped_does_not_count_as_kept(bench: Make) -> None:
    b = bench(num_blocks=50, streamrag=SWAPPING)
    b.chunk("s", list(range(100)))
    b.run()
    b.plain("p", 190, first=1_000)
    b.run()
    stream = b.scheduler.requests["s"]
    assert stream.num_kept_tokens == 99
    b.scheduler.plugin.host_memory.clear()
    b.scheduler.kv_cache_manager.reset_prefix_cache()
    b.chunk("s", [7], kept=100)
    b.step()
    assert stream.num_kept_tokens == 0
    assert b.scheduler.plugin.kv_memory.cached_view(stream).num_likely_tokens == stream.num_remaining_tokens


def test_kv_that_an_eviction_drops_does_not_count_as_kept(bench: Make) -> None:
    b = bench(num_blocks=50, streamrag={**SWAPPING, "eviction": "recompute"})
    b.chunk("s", list(range(100)))
    b.run()
    b.plain("p", 190, first=1_000)
    b.run()
    assert b.scheduler.requests["s"].was_evicted
    assert b.scheduler.requests["s"].num_kept_tokens == 0
