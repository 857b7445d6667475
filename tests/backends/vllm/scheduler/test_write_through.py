"""Blocks of partial prompts that are copied to host memory while they are still held."""

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]
TOKENS = list(range(40))


def test_blocks_computed_from_a_load_are_copied_once_the_load_is_known_good(bench: Make) -> None:
    """The oracle raises when a block is copied that may be wrong."""
    b = bench(num_blocks=50, is_async=True, streamrag={"eviction": "swap", "num_host_blocks": 100})
    b.chunk("s", TOKENS)
    b.run()
    b.plain("p", 190, first=1_000)  # which takes the KV of the idle stream
    b.plain("q", 100, first=5_000, max_tokens=20)
    b.run()
    host_memory = b.scheduler.plugin.host_memory
    assert host_memory.pool.num_used > 0
    host_memory.choice.num_to_write_through = lambda share_free: 100
    b.runner.load_fails = lambda slot: True
    b.chunk("s", list(range(40, 80)), kept=40)
    b.run()
    b.chunk("s", [7], kept=80, is_complete=True)
    b.run()
    assert b.runner.num_not_loaded > 0
    assert b.tokens("s") == b.fresh_answer([*range(80), 7])


def test_cached_blocks_computed_in_the_same_step_are_not_copied_too_early(bench: Make) -> None:
    """A prompt that starts again finds in the prefix cache what one before it computes in this very step."""
    options = {"eviction": "swap", "num_host_blocks": 100, "num_partial_tokens": 100}
    b = bench(num_blocks=50, max_num_batched_tokens=100, streamrag=options)
    choice = b.scheduler.plugin.host_memory.choice
    choice.num_to_write_through = lambda share_free: 0
    b.chunk("first", [500, 501, 502])
    b.chunk("s", [600, 601, 602])
    b.run()
    choice.num_to_write_through = lambda share_free: 100
    b.chunk("first", [*TOKENS, 8])
    b.chunk("s", TOKENS)
    b.step()
    assert b.scheduler.requests["s"].log.num_from_cache == 36
    b.plain("p", 190, first=1_000)  # which takes the KV of the idle streams
    b.plain("q", 190, first=5_000)
    b.run()
    b.chunk("s", [7], kept=40, is_complete=True)
    b.run()
    assert b.runner.num_loaded > 0
    assert b.tokens("s") == b.fresh_answer([*TOKENS, 7])
