"""Records of requests as values, and in a file."""

import json
from pathlib import Path

import pytest

from streamrag.errors import ConfigurationError
from streamrag.records import ChunkRecord, PreemptionRecord, RequestRecord, read_records

RECORD = RequestRecord(
    request_id="r-1",
    outcome="finished",
    is_stream=True,
    arrival_s=1.0,
    queued_s=1.1,
    scheduled_s=1.2,
    first_kv_s=1.3,
    last_kv_s=1.4,
    finished_s=1.5,
    num_prompt_tokens=10,
    num_output_tokens=2,
    num_computed=16,
    num_recomputed=3,
    num_invalidated=4,
    num_from_cache=5,
    chunks=(ChunkRecord(1.0, 8, 0, 0), ChunkRecord(1.2, 10, 3, 7)),
    preemptions=(PreemptionRecord(1.3, "recompute", 6),),
)


def line(record: RequestRecord) -> str:
    return json.dumps(record.as_dict()) + "\n"


def test_a_record_comes_back_from_json_as_it_was() -> None:
    assert RequestRecord.from_dict(json.loads(json.dumps(RECORD.as_dict()))) == RECORD


def test_a_chunk_invalidates_what_was_computed_past_its_lcp() -> None:
    assert [chunk.num_invalidated for chunk in RECORD.chunks] == [0, 4]


def test_a_file_is_read_in_its_order(tmp_path: Path) -> None:
    other = RequestRecord.from_dict({**RECORD.as_dict(), "request_id": "r-2", "scheduled_s": None})
    path = tmp_path / "records.jsonl"
    path.write_text(line(RECORD) + line(other))
    assert read_records(path) == [RECORD, other]


def test_a_last_line_that_is_torn_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line(RECORD) + line(RECORD)[:50])
    assert read_records(path) == [RECORD]
    path.write_text("")
    assert read_records(path) == []


@pytest.mark.parametrize(
    "wrong", ['{"request_id": "r-2"', '{"request_id": "r-2"}', "[]", "", '{"chunks": 1}', "\ufeff"]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line(RECORD) + wrong + "\n" + line(RECORD))
    with pytest.raises(ConfigurationError, match=r"records\.jsonl, line 2 is no record"):
        read_records(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.jsonl"):
        read_records(tmp_path / "nothing.jsonl")
