"""The file of records: what it refuses, and that it never spoils what is in it."""

import logging
import os
from pathlib import Path

import pytest

from streamrag.backends.vllm.scheduler.records import RecordFile
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord, read_records


def record(name: str) -> RequestRecord:
    return RequestLog(name, False, 1.0, 2.0).end("aborted", 3.0, 10, 0)


def test_records_are_in_the_file_at_once_and_the_file_is_made_with_the_first(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "records.jsonl")
    assert not file.path.exists()
    for name in ("a", "b"):
        file.write(record(name))
    assert read_records(file.path) == [record("a"), record("b")]
    file.close()
    file.close()


def test_a_file_is_gone_on_with_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for name, torn in [("a", b'{"torn'), ("b", b""), ("c", b'{"request_id": "torn')]:
        with path.open("ab") as file:
            file.write(torn)
        records = RecordFile(path)
        records.write(record(name))
        records.close()
    assert read_records(path) == [record("a"), record("b"), record("c")]


def test_a_file_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no folder '.*missing'; make it first"):
        RecordFile(tmp_path / "missing" / "records.jsonl")
    with pytest.raises(ConfigurationError, match="is a folder; name a file in it"):
        RecordFile(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigurationError, match=r"there is no folder '.*file'"):
        RecordFile(file / "records.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        RecordFile(tmp_path / "records.jsonl")


def test_a_full_disk_is_told_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    file = RecordFile(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        file.write(record("a"))
        file.write(record("b"))
    (told,) = caplog.messages
    assert "/dev/full" in told
    assert "No space left" in told
