"""What a plan is told of KV memory. The fuzz shows that it is enough; only here can be seen that it is exact."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from streamrag.backends.vllm.client.stats import EngineStats
from streamrag.records import KvHeld

Make = Callable[..., Any]
TOKENS = list(range(40))


def test_a_request_that_starts_needs_the_watermark_as_well(bench: Make) -> None:
    """Without, a step comes out short as long as others run: vLLM does not admit what was granted."""
    b = bench(num_blocks=100, watermark=0.1)
    b.plain("p", 20)
    memory = b.scheduler.plugin.kv_memory
    memory.start_step()
    assert memory.num_blocks_needed(memory.cached_view(b.scheduler.requests["p"]), 16) == 5 + 10


def test_blocks_that_others_hold_as_well_do_not_come_free(bench: Make) -> None:
    """If they counted, a step would come out short, and the next one evict somebody else."""
    b = bench(has_prefix_cache=True)
    for name in ("a", "b"):
        b.chunk(name, TOKENS)
        b.run()
    memory = b.scheduler.plugin.kv_memory
    view = memory.cached_view(b.scheduler.plugin.queues.idle["a"], is_idle=True)
    assert view.num_blocks == 10
    assert memory.num_blocks_freed(view) == 1


def test_kv_use_is_reported_by_state_of_requests_if_that_is_switched_on(bench: Make) -> None:
    b = bench(has_prefix_cache=True)
    for name in ("a", "b"):
        b.chunk(name, TOKENS)
        b.run()
    b.plain("p", 20, first=100, max_tokens=50)
    b.step()
    b.step()
    b.plain("q", 20, first=200)
    scheduler = b.scheduler
    use = scheduler.plugin.kv_memory.use(scheduler.plugin.queues.idle.values())
    assert use.idle == KvHeld(2, 2 * 39), "the last token of a partial prompt is not computed"
    assert (use.running.num_requests, use.waiting) == (1, KvHeld(1, 0))
    assert use.running.num_tokens >= 20
    assert use.num_capacity == 100 * 4
    assert (use.num_host, use.num_host_capacity) == (0, 0)
    assert scheduler.make_stats() is None, "vLLM was told to collect none"
    scheduler.log_stats = scheduler.kv_cache_manager.log_stats = True
    scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    assert scheduler.make_stats().kv_connector_stats is None, "where vLLM serves, its loggers know no such stats"
    scheduler.plugin.options = replace(scheduler.plugin.options, reports_kv_use=True)
    log = EngineStats()
    assert log.kv_use() is None
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=scheduler.make_stats()))
    log.record(MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats, None)
    log.record(None, None)
    assert log.kv_use() == use
