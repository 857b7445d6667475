"""Streams that hold KV take from the prefix cache what others have computed meanwhile."""

from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams

from streamrag.backends.vllm.chunk_wire import PromptMessage

Make = Callable[..., Any]
FRONT, SAME = list(range(10)), list(range(10, 50))
"""What two streams have at first, in blocks of four, and what both get then."""


def test_a_chunk_that_another_has_computed_is_computed_once(bench: Make) -> None:
    computed, answers = {}, {}
    for looks_up_again in (True, False):
        b = bench(streamrag={"looks_up_again": looks_up_again})
        for name in ("a", "b"):
            b.chunk(name, FRONT)
        b.run()
        for name in ("a", "b"):
            b.chunk(name, SAME, kept=10)
            b.run()
            b.chunk(name, [900, ord(name)], kept=50, is_complete=True)
            b.run()
        record = b.record("b")
        computed[looks_up_again] = record.num_computed
        answers[looks_up_again] = b.tokens("b")
        assert record.num_computed - record.num_recomputed + record.num_from_cache == 52
        assert b.tokens("b") == b.fresh_answer([*FRONT, *SAME, 900, ord("b")])
    assert answers[True] == answers[False]
    assert computed[False] - computed[True] == 48 - 8


def test_a_stream_in_mid_prefill_takes_blocks_that_another_has_computed(bench: Make) -> None:
    for is_async in (True, False):
        b = bench(is_async=is_async, max_num_batched_tokens=8, streamrag={"policy": "fcfs", "num_partial_tokens": None})
        b.chunk("late", FRONT)
        b.chunk("early", FRONT[:5])
        b.run()
        b.chunk("early", [*FRONT, *SAME], is_complete=True)
        b.step()
        b.step()
        b.chunk("late", SAME, kept=10, is_complete=True)
        b.run()
        records = [b.record(name) for name in ("early", "late")]
        assert sum(record.num_computed for record in records) < 50 + 20
        assert b.tokens("early") == b.tokens("late") == b.fresh_answer([*FRONT, *SAME])


def test_plain_requests_are_looked_up_once_as_in_vllm(bench: Make) -> None:
    b = bench(max_num_batched_tokens=8)
    b.plain("a", 40)
    b.step()
    b.chunk("s", list(range(40)), is_complete=True)
    b.run()
    assert b.record("a").num_from_cache == 0


def test_a_stream_that_reads_no_prefix_cache_takes_nothing_from_it_later(bench: Make) -> None:
    for reads in (True, False):
        b = bench()
        params = SamplingParams(max_tokens=2, temperature=0.0, skip_reading_prefix_cache=not reads)
        b.chunk("a", FRONT)
        b.engine.add("b", FRONT, params, PromptMessage(0, 0, False, 0.0))
        b.run()
        b.chunk("a", SAME, kept=10, is_complete=True)
        b.run()
        b.engine.add("b", SAME, params, PromptMessage(1, 10, True, 0.0))
        b.run()
        record = b.record("b")
        assert (record.num_from_cache > 0) == reads
        assert record.num_computed - record.num_recomputed + record.num_from_cache == 50


def test_unheld_cached_blocks_are_no_longer_free_for_the_stream_that_takes_them(bench: Make) -> None:
    b = bench(num_blocks=20, max_model_len=80)
    b.chunk("idle", list(range(500, 525)))  # six blocks
    b.chunk("late", FRONT)  # three, the last of which is not whole
    b.run()
    b.plain("ended", 40, max_tokens=1)  # the same as "late" at first; eight blocks of its own stay cached
    b.run()
    b.chunk("late", [*range(10, 40), *range(600, 624)], kept=10, is_complete=True, max_tokens=1)
    # 16 blocks in all: two are held, eight are found, and six more must be free beside these. Ten or eleven are free.
    b.step()
    assert b.scheduler.requests["late"].num_computed_tokens == 40 + 16, "a step was planned that did not fit"
    assert b.scheduler.plugin.queues.idle["idle"].num_computed_tokens == 0
    b.run()
    assert b.tokens("late") == b.fresh_answer([*range(40), *range(600, 624)], max_tokens=1)
