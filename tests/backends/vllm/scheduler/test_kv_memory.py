"""What a plan is told of KV memory. The fuzz shows that it is enough; only here can be seen that it is exact."""

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]
TOKENS = list(range(40))


def test_who_starts_needs_the_watermark_as_well(bench: Make) -> None:
    """Without, a step comes out short as long as others run: vLLM does not admit what was granted."""
    b = bench(num_blocks=100, watermark=0.1)
    b.plain("p", 20)
    memory = b.scheduler.kv_memory
    memory.start_step()
    assert memory.num_blocks_needed(memory.view(b.scheduler.requests["p"]), 16) == 5 + 10


def test_blocks_that_others_hold_as_well_do_not_come_free(bench: Make) -> None:
    """If they counted, a step would come out short, and the next one evict somebody else."""
    b = bench(has_prefix_cache=True)
    for name in ("a", "b"):
        b.chunk(name, TOKENS)
        b.run()
    memory = b.scheduler.kv_memory
    view = memory.view(b.scheduler.idle["a"], is_idle=True)
    assert view.num_blocks == 10
    assert memory.num_blocks_freed(view) == 1
