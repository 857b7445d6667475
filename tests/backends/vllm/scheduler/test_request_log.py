"""The records that the scheduler makes of requests. The fuzz checks each of its requests' as well."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from streamrag.errors import ConfigurationError
from streamrag.records import ChunkRecord, PreemptionRecord, read_records

Make = Callable[..., Any]
TOKENS = list(range(40))


def test_the_record_of_a_stream_tells_what_it_went_through(bench: Make) -> None:
    b = bench(num_blocks=50, has_prefix_cache=False)
    b.chunk("s", TOKENS)  # 39 tokens in steps of 16, the last of which ends at 3
    b.run()
    b.plain("p", 180, first=1_000)  # needs 46 of the 50 blocks
    b.run()
    answered_s = b.engine.now_s
    b.chunk("s", TOKENS[:20], is_complete=True)
    b.run()
    record = b.record("s")
    assert record.chunks == (ChunkRecord(0.0, 40, 0, 0), ChunkRecord(answered_s, 20, 20, 0))
    assert record.preemptions == (PreemptionRecord(3.0, "recompute", 39),)
    assert (record.num_computed, record.num_recomputed, record.num_from_cache) == (39 + 20, 20, 0)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (20, 2)
    assert (record.arrival_s, record.queued_s, record.scheduled_s, record.first_kv_s) == (0.0, 0.0, 0.0, 1.0)
    assert (record.last_kv_s, record.finished_s) == (answered_s + 2, answered_s + 3)
    assert (record.outcome, record.is_stream) == ("finished", True)


def test_an_update_counts_what_it_invalidates(bench: Make) -> None:
    b = bench(has_prefix_cache=False)
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", [*TOKENS[:21], 500, 501], is_complete=True)
    b.run()
    record = b.record("s")
    assert record.chunks[1].num_shared == 21
    assert record.num_invalidated == record.chunks[1].num_invalidated == 39 - 21
    assert (record.num_computed, record.num_recomputed) == (39 + 2, 0)


def test_the_record_of_a_plain_request_is_on_its_last_output(bench: Make) -> None:
    b = bench()
    b.plain("p", 30)
    b.run()
    record = b.record("p")
    assert (record.outcome, record.is_stream, record.chunks) == ("finished", False, ())
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_computed) == (30, 2, 30)
    assert (record.queued_s, record.scheduled_s, record.first_kv_s, record.last_kv_s) == (0.0, 0.0, 1.0, 2.0)
    assert record.finished_s == 3.0


@pytest.mark.parametrize("is_async", [False, True])
def test_decode_steps_are_not_counted_as_prompt_tokens(bench: Make, is_async: bool) -> None:
    b = bench(is_async=is_async)
    b.plain("p", 30, max_tokens=10)
    b.run()
    assert b.record("p").num_computed == 30


def test_tokens_from_the_prefix_cache_are_counted_and_are_kv_from_the_start(bench: Make) -> None:
    b = bench()
    b.plain("first", 30)
    b.run()
    start_s = b.engine.now_s
    b.plain("second", 30)
    b.run()
    record = b.record("second")
    assert (record.num_from_cache, record.num_computed, record.num_recomputed) == (28, 2, 0)
    assert (record.first_kv_s, record.last_kv_s) == (start_s, start_s + 1)


def test_a_preempted_answer_loses_its_tokens_too_and_only_prompt_tokens_count_as_computed(bench: Make) -> None:
    b = bench(has_prefix_cache=False)
    b.plain("p", 10, max_tokens=10)
    for _ in range(4):  # the prompt, and three tokens after the first
        b.step()
    b.scheduler.plugin.evictions.evict(b.scheduler.requests["p"])
    b.run()
    record = b.record("p")
    assert [p.num_tokens_lost for p in record.preemptions] == [13]
    assert (record.num_computed, record.num_recomputed, record.num_output_tokens) == (20, 10, 10)
    assert record.last_kv_s == 1.0  # for the first time


def test_every_request_leaves_one_line_however_it_ends(bench: Make, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    b = bench(streamrag={"records": str(path)})
    assert not path.exists()
    b.plain("finished", 10)
    b.chunk("answered", TOKENS, is_complete=True)
    b.chunk("too long at once", list(range(300)))
    b.chunk("too long later", TOKENS)
    b.chunk("left", TOKENS)
    b.chunk("no last chunk", TOKENS)
    b.engine.abort("never heard of")
    b.run()
    b.chunk("too long later", list(range(300)))
    b.scheduler.plugin.intake.end_input("no last chunk")
    b.engine.abort("left")
    b.chunk("left", [1], kept=40, is_complete=True)  # comes too late
    b.plain("aborted in time", 10)
    b.engine.abort("aborted in time")
    b.run()
    records = {record.request_id: record for record in read_records(path)}
    assert len(path.read_text().splitlines()) == len(records)
    num_ready = {name: record.num_computed + record.num_from_cache for name, record in records.items()}
    assert {name: (record.outcome, num_ready[name]) for name, record in records.items()} == {
        "finished": ("finished", 10),
        "answered": ("finished", 40),
        "too long at once": ("failed", 0),
        "too long later": ("failed", 39),
        "left": ("aborted", 39),
        "no last chunk": ("failed", 39),
        "aborted in time": ("aborted", 0),
    }
    assert records["finished"] == b.record("finished")
    assert records["too long at once"].scheduled_s is None
    assert records["left"].last_kv_s is None


def test_a_failed_stream_has_its_record_beside_the_reason(bench: Make) -> None:
    b = bench()
    b.chunk("s", TOKENS)
    b.run()
    b.chunk("s", list(range(300)))
    b.run()
    (failed,) = [o for o in b.outputs if o.finish_reason == FinishReason.ERROR]
    assert "does not fit" in failed.kv_transfer_params["streamrag"]["error"]
    assert (b.record("s").outcome, len(b.record("s").chunks)) == ("failed", 1)


def test_parameters_that_a_kv_connector_returns_for_a_request_are_kept(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    monkeypatch.setattr(b.scheduler, "_connector_finished", lambda request: (False, {"remote_host": "here"}))
    b.plain("p", 10)
    b.run()
    assert b.outputs[-1].kv_transfer_params["remote_host"] == "here"
    assert b.record("p").num_computed == 10


def test_the_clock_is_the_hosts_and_a_plain_request_arrived_when_it_was_sent(bench: Make) -> None:
    b = bench()
    b.scheduler.plugin.clock.monotonic, b.scheduler.plugin.clock.wall = time.monotonic, time.time
    before_s = time.monotonic()
    b.scheduler.add_request(Request("p", [1, 2], SamplingParams(max_tokens=1), None, arrival_time=time.time() - 5))
    b.scheduler.add_request(Request("future", [1, 2], SamplingParams(max_tokens=1), None, arrival_time=time.time() + 5))
    b.run()
    record, future = b.record("p"), b.record("future")
    assert record.arrival_s == pytest.approx(before_s - 5, abs=1)
    assert before_s <= record.queued_s <= record.scheduled_s <= record.first_kv_s <= record.finished_s
    assert record.finished_s <= time.monotonic()
    assert future.arrival_s == future.queued_s


@pytest.mark.parametrize("records", ["", 3, "missing/records.jsonl", "."])
def test_a_file_that_cannot_be_is_refused_when_the_engine_starts(bench: Make, records: Any) -> None:
    with pytest.raises(ConfigurationError, match="records="):
        bench(streamrag={"records": records})


def test_the_file_is_closed_with_the_engine(bench: Make, tmp_path: Path) -> None:
    b = bench(streamrag={"records": str(tmp_path / "records.jsonl")})
    b.plain("p", 10)
    b.run()
    file = b.scheduler.plugin.records.file._file
    b.scheduler.shutdown()
    assert file.closed


def test_a_record_in_a_file_counts_the_steps_in_which_a_rule_held_the_request_back(bench: Make, tmp_path: Path) -> None:
    for path, holds in ((None, {}), (str(tmp_path / "records.jsonl"), {"StepBudget": 2, "LeanPartials": 1})):
        b = bench(streamrag={"records": path, "sizes_steps": False})
        b.plain("asked", 40, max_tokens=1)  # 16 tokens a step
        b.chunk("stream", TOKENS[:20])
        b.run()
        b.chunk("stream", TOKENS[:24], kept=20, is_complete=True)
        b.run()
        assert b.record("stream").holds == holds
        assert b.record("asked").holds == {}
